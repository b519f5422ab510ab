"""What the models of a pair are: their settings, whether one is a head, what their nodes are told."""
