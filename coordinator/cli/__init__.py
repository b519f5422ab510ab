"""The command line: its commands, what they show, and how they read and write."""
