"""What a program asks for: settings, prompts, an `LLM` or a pair of nodes, and what comes back."""
