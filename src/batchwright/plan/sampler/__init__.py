"""Batches for a loader: planned, resizable, regrouped or streamed."""
