"""The sockets between the processes, and the check of who may connect to them."""
