"""The command ``demo``: train a small language model with fixed-size and planned batches, and write a page."""
