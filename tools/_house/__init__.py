"""The parts of ``house.py``."""
