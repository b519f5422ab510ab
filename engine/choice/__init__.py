"""From logits to tokens: distributions, coupling, the classical rules."""
