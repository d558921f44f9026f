"""One look for every page: the frame of a page, its style sheet, and the script that draws charts.

The pages of ``demo``, ``lab`` and ``serve`` are made of these.
"""
