"""The predictor on the command line."""
