"""What crosses a process boundary, and what it means. Imports no other package of the project."""
