"""Names that have moved to the ground floor."""

from .._stdlib_source import functions_of as functions_of
from .._stdlib_source import python_files as python_files
from .._stdlib_source import tokenize as tokenize
