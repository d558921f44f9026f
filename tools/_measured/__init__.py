"""The parts of ``measured.py``: result files read, tables and sentences written from them, one picture."""
