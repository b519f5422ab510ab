"""The pictures of the README, each made by running what it shows: `make pictures`."""
