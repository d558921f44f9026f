"""The command ``doctor``: measure this machine and say what that means for batches."""
