"""What a request may end with, other than its answer or the exception of its own item."""

from ..errors import Closed as Closed
from ..errors import DeadlineExceeded as DeadlineExceeded
from ..errors import QueueFull as QueueFull
from ..errors import ResultError as ResultError
from ..errors import TooLarge as TooLarge
