"""Choose tokens from logits: sampling distributions, coupled choice, classical acceptance rules."""
