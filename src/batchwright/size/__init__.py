"""How many examples the next update uses, and what follows for the learning rate. NumPy only."""

from . import learning_rate as learning_rate
from . import momentum as momentum
from . import noise as noise
from .combine import maximum as maximum
from .combine import minimum as minimum
from .combine import switch as switch
from .controller import BatchSizeController as BatchSizeController
from .controller import Decision as Decision
from .curriculum import Curriculum as Curriculum
from .experiments import ExperimentBudget as ExperimentBudget
from .from_learning_rate import from_lr as from_lr
from .from_learning_rate import seesaw as seesaw
from .observation import Observation as Observation
from .policy import Policy as Policy
from .policy import Transform as Transform
from .schedules import constant as constant
from .schedules import cyclic as cyclic
from .schedules import exponential as exponential
from .schedules import linear as linear
from .schedules import milestones as milestones
from .schedules import warm_up as warm_up
from .signals import entropy_driven as entropy_driven
from .signals import goodput as goodput
from .signals import loss_below as loss_below
from .signals import loss_driven as loss_driven
from .signals import loss_settled as loss_settled
from .signals import measured as measured
from .signals import memory_driven as memory_driven
from .signals import noise_driven as noise_driven
from .signals import speed_driven as speed_driven
from .signals import step_time as step_time
from .signals import track as track
from .transforms import chain as chain
from .transforms import clamp as clamp
from .transforms import cooldown as cooldown
from .transforms import hysteresis as hysteresis
from .transforms import monotone as monotone
from .transforms import multiple_of as multiple_of
from .transforms import rate_limit as rate_limit
from .transforms import smooth as smooth

__all__ = [
    "BatchSizeController",
    "Curriculum",
    "Decision",
    "ExperimentBudget",
    "Observation",
    "Policy",
    "Transform",
    "chain",
    "clamp",
    "constant",
    "cooldown",
    "cyclic",
    "entropy_driven",
    "exponential",
    "from_lr",
    "goodput",
    "hysteresis",
    "learning_rate",
    "linear",
    "loss_below",
    "loss_driven",
    "loss_settled",
    "maximum",
    "measured",
    "memory_driven",
    "milestones",
    "minimum",
    "momentum",
    "monotone",
    "multiple_of",
    "noise",
    "noise_driven",
    "rate_limit",
    "seesaw",
    "smooth",
    "speed_driven",
    "step_time",
    "switch",
    "track",
    "warm_up",
]
