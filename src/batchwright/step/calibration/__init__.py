"""Calibration: measure batch shapes, and fit what they cost in memory and time."""
