"""Who may import whom, and how the code must look."""
