"""What the runs of a lab show, in sentences made from the numbers, each with the tests it rests on."""

from .evidence import Evidence as Evidence
from .evidence import Finding as Finding
from .evidence import Observation as Observation
from .observing import observe as observe

__all__ = ["Evidence", "Finding", "Observation", "observe"]
