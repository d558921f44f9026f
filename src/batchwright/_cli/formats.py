"""Names that have moved to the ground floor."""

from .._files import FORMATS as FORMATS
from .._files import Record as Record
from .._files import file_format as file_format
from .._files import read_records as read_records
