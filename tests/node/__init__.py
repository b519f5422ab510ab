"""What both nodes share."""
