"""Small models by name, and one collator, one loss and one validation for all of them. Needs torch."""

from ..._optional import require

require("torch", extra="lab")

# After the check, so that its message is read.
from .networks import count_parameters as count_parameters  # noqa: E402
from .networks import make_model as make_model  # noqa: E402
from .networks import models_for as models_for  # noqa: E402
from .objective import collate_for as collate_for  # noqa: E402
from .objective import evaluate as evaluate  # noqa: E402
from .objective import loss_fn_for as loss_fn_for  # noqa: E402

__all__ = ["collate_for", "count_parameters", "evaluate", "loss_fn_for", "make_model", "models_for"]
