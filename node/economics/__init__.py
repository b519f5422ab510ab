"""What things cost, how often drafts are right, and the prices made of both (pure)."""
