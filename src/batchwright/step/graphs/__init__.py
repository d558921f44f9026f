"""Graphed steps: forward, backward and update captured once per planned shape, and replayed."""
