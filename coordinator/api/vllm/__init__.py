"""vLLM's names, where ours are others: what `LLM` and its `speculative_config` take."""
