"""Lets a drafter work for a target that has another tokenizer."""
