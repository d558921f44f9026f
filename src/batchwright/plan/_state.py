"""Names that have moved to the ground floor."""

from .._checks import check_same as check_same
from .._checks import read_whole as read_whole
