"""Engines of others, each a process that reads prompts and writes what it made of them."""
