"""The lengths of examples: measured once and kept."""
