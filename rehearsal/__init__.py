"""The real machines in virtual time: for the predictor `plan`, and for the simulator in tests."""
