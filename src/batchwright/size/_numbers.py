"""The checks of numbers, for modules that still import them from here."""

from .._checks import as_number as as_number
from .._checks import as_whole as as_whole
