"""Which slot of a cache holds which token, and what was there before (pure)."""
