"""Builds the wheel and tries it out."""
