"""What a found budget depends on: the code that runs, and settings that no weight shows."""

import json

import pytest
from torch import nn

from batchwright.integrations._describing import describe_callable, describe_model, describe_read


def namespace(text):
    """Return the names that a script makes, as if it were a module of its own."""
    made = {"__name__": "script", "nn": nn}
    exec(text, made)
    return made


FUNCTION = """
def helper(x):
    return x * {}

def loss(x):
    return helper(x)
"""
METHOD = """
class Collate:
    def pad(self, x):
        return x * {}

    def __call__(self, x):
        return self.pad(x)

loss = Collate()
"""
CLOSURE = """
def make(pad):
    return lambda x: pad(x)

loss = make(lambda x: x * {})
"""
STATIC = """
class Loss:
    @staticmethod
    def scale(x):
        return x * {}

    def of(self, x):
        return [self.scale(one) for one in x]

loss = Loss().of
"""


@pytest.mark.parametrize("script", [FUNCTION, METHOD, CLOSURE, STATIC], ids=["function", "method", "closure", "static"])
def test_what_a_loss_calls_is_part_of_it(script):
    two, again, three = (describe_callable(namespace(script.format(factor))["loss"]) for factor in (2, 2, 3))
    assert two == again != three


def test_what_a_forward_pass_calls_is_part_of_the_model():
    script = """
class Model(nn.Module):
    def encode(self, x):
        return x * {}

    def forward(self, x):
        return self.encode(x)
"""
    two, again, three = (describe_model(namespace(script.format(factor))["Model"]()) for factor in (2, 2, 3))
    assert two == again != three


def test_functions_that_call_each_other_are_read_once():
    made = namespace(
        "def even(n):\n    return n == 0 or odd(n - 1)\n\ndef odd(n):\n    return n != 0 and even(n - 1)\n"
    )
    assert describe_callable(made["even"])[1] == describe_callable(made["odd"])[1]


def test_settings_of_modules_that_no_weight_shows_are_part_of_the_model():
    """Attention of 8 heads holds four times the memory of 2, with the same weights."""

    def described(heads, *, training=True):
        return describe_model(nn.TransformerEncoderLayer(16, heads, dropout=0.0).train(training))

    assert described(2) == described(2, training=False) != described(8)


WRAPPED = """
class Pad:
    def __init__(self, to):
        self.to = to

    def __call__(self, x):
        return x + [0] * (self.to - len(x))

class Wrap:
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)

loss = Wrap(Pad({}))
"""
IN_A_PARTIAL = WRAPPED + "from functools import partial\nloss = partial(lambda collate, x: collate(x), Pad({}))"
BOUND = WRAPPED + "loss = Pad({}).__call__"


@pytest.mark.parametrize("script", [WRAPPED, IN_A_PARTIAL, BOUND], ids=["attribute", "partial", "bound method"])
def test_settings_of_what_is_called_inside_are_part_of_it(script):
    two, again, three = (describe_callable(namespace(script.replace("{}", text))["loss"]) for text in "223")
    assert two == again != three
    assert json.loads(json.dumps(two)) == two


def test_attributes_that_a_loss_reads_are_part_of_it_and_counts_of_others_are_not():
    class Loss:
        def __init__(self, num_negatives, num_logs):
            self.num_negatives, self.num_logs = num_negatives, num_logs

        def compute(self):
            return self.draw()

        def draw(self):
            return self.num_negatives

        def log(self):
            self.num_logs += 1

    assert describe_read(Loss(4, 1), [Loss.compute]) == {"num_negatives": "4"}
    assert describe_callable(Loss(4, 1).compute) == describe_callable(Loss(4, 2).compute)
    assert describe_callable(Loss(4, 1).compute) != describe_callable(Loss(5, 1).compute)
