"""The links of the documentation."""
