"""The forward pass: one interface (`Backend`), and the backends that implement it."""
