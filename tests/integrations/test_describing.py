"""What a found budget depends on: the code that runs, and settings that no weight shows."""

import pytest
from torch import nn

from batchwright.integrations._describing import describe_callable, describe_model


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
