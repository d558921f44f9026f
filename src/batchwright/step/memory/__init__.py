"""Memory: how much is in use, how much is left, and how much a batch may take."""
