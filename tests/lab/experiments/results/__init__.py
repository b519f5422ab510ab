"""What is made of the rows of an experiment: figures, pictures, a page, answers."""
