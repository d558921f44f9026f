"""Strategies by name: what decides the batch size of a run, its examples, and its learning rate."""

from .catalogue import HANDFUL as HANDFUL
from .catalogue import get as get
from .catalogue import names as names
from .schedules import schedule_of as schedule_of
from .strategy import BASELINE as BASELINE
from .strategy import GROUPS as GROUPS
from .strategy import Conditions as Conditions
from .strategy import RunSettings as RunSettings
from .strategy import Setup as Setup
from .strategy import Strategy as Strategy

__all__ = [
    "BASELINE",
    "GROUPS",
    "HANDFUL",
    "Conditions",
    "RunSettings",
    "Setup",
    "Strategy",
    "get",
    "names",
    "schedule_of",
]
