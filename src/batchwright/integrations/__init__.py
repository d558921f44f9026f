"""Frameworks people already use: each module here translates, the rooms below decide."""
