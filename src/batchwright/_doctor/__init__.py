"""What ``batchwright doctor`` runs: measure this machine and say what that means for batches."""
