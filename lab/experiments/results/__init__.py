"""Makes the results of an experiment (tables, pictures, sentences, a report) from its rows."""
