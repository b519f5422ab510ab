"""Drafters with another tokenizer than the target."""
