"""How much memory and time batches take, measured by running them."""
