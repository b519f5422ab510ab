"""What both nodes share: the process, the loop, and the entrance of their machines."""
