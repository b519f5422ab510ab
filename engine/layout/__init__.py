"""Layout of the KV cache (which slot holds which token) and copies of earlier text (pure)."""
