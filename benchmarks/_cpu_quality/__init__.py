"""Parts of quality.py: tasks, clocks, strategies, one run, the protocol, and what results say together."""
