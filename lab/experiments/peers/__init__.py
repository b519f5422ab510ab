"""Peers (engines of others): each is a process that reads prompts and writes generated tokens."""
