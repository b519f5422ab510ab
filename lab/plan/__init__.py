"""The command `plan`, which predicts what each policy gains on given hardware."""
