"""The journal of `serve --journal`: answers outlive the death of their coordinator."""
