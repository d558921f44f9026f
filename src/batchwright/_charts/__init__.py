"""One look for every page: a style sheet, charts drawn in Python or in the browser, and the frame around them.

The pages of ``demo``, ``lab`` and ``serve`` are made of these.
"""
