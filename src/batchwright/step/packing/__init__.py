"""Packing: rows of several examples without padding, and the attention that keeps them apart."""
