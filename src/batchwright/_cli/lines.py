"""Names that have moved to the ground floor."""

from .._files import read_lines as read_lines
