"""The packages that have dynabatch's names: this one, and dynabatch itself where it is installed."""

import importlib.util

OURS = "batchwright.integrations.dynabatch"
PACKAGES = [OURS, *(["dynabatch"] if importlib.util.find_spec("dynabatch") else [])]
