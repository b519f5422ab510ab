"""The command `measure`: how often a pair's drafts are right, and what everything costs."""
