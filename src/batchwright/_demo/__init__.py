"""Names that have moved to the ground floor."""
