"""What an update takes and what a batch size is worth, measured while a model trains."""
