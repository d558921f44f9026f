"""Parts of gpu_quality.py: the corpora, the arms, one training loop with a clock, and what is made of the results."""
