"""The models of a pair: their settings, whether one is a head, what their nodes are told."""
