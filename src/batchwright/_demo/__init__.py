"""The demo: a small language model trained with fixed-size and with planned batches, and a page about it."""
