"""Which examples share a batch."""
