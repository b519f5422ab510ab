"""What the results of an experiment are made with: ratios, names, parts of pictures, answers."""
