"""Parts of gpu_all.py: the table of measurements, what runs them one by one, and what they need to be at hand."""
