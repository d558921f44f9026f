"""What the command line does: read a file, measure it, compare groupings, advise. Needs numpy only."""
