"""How much memory and time a batch takes, fitted from a few measured shapes."""
