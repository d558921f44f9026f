"""Running a model without training it: in pieces that fit, and generation."""
