"""What is used, what is left, and how much a batch may take."""
