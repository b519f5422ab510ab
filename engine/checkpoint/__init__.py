"""Load a model from its folder (config.json and weights), or refuse it with a reason."""
