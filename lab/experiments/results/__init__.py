"""What is made of the rows of an experiment."""
