"""Losses that need the whole logical batch, in micro-batches that fit."""
