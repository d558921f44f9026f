"""What a found budget depends on: the code that runs, and settings that no weight shows."""

import enum
import functools
import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig

from batchwright.integrations._contents import UndescribableError, contents_of
from batchwright.integrations._describing import describe_callable, describe_model, describe_read


def namespace(text):
    """Return the names that a script makes, as if it were a module of its own."""
    made = {"__name__": "script", "nn": nn, "functools": functools}
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
    script = "def even(n):\n    return n == 0 or odd(n - 1)\n\ndef odd(n):\n    return n != {} and even(n - 1)\n"
    zero, again, one = (describe_callable(namespace(script.format(number))["even"]) for number in (0, 0, 1))
    assert zero == again != one


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

    assert list(describe_read(Loss(4, 1), [Loss.compute])) == ["num_negatives"]
    assert describe_callable(Loss(4, 1).compute) == describe_callable(Loss(4, 2).compute)
    assert describe_callable(Loss(4, 1).compute) != describe_callable(Loss(5, 1).compute)


CONSTANT = "STEPS = {}\ndef loss(x):\n    for _ in range(STEPS):\n        x = x * 2\n    return x\n"
OPTION = "def loss(x, *, steps={}):\n    return x * steps\n"
MADE = "class Loss:\n    def of(self, x):\n        return x * {}\n\ndef loss(x):\n    return Loss().of(x)\n"
INHERITED = """
class Base:
    def of(self, x):
        return x * {}

class Loss(Base):
    def of(self, x):
        return super().of(x)

loss = Loss().of
"""
OF_ITS_CLASS = """
class Loss:
    steps = {}

    def __call__(self, x):
        return x * self.steps

loss = Loss()
"""
DECORATED = """
def repeated(num):
    def decorate(function):
        @functools.wraps(function)
        def run(x):
            for _ in range(num):
                x = function(x)
            return x
        return run
    return decorate

@repeated({})
def loss(x):
    return x
"""
NOTED = "def loss(x):\n    return x * loss.scale\n\nloss.scale = {}\n"
NAMESAKES = (
    "def inner(x):\n    return x\n\nother = lambda x: x + 1\npick = {}\nloss = lambda x: (inner, other)[pick](x)\n"
)


@pytest.mark.parametrize("script", [CONSTANT, OPTION, MADE, INHERITED, OF_ITS_CLASS, DECORATED, NOTED, NAMESAKES])
def test_what_steers_a_loss_from_outside_of_its_code_is_part_of_it(script):
    one, again, other = (describe_callable(namespace(script.replace("{}", text))["loss"]) for text in "001")
    assert one == again != other


class Part(nn.Module):
    """Computes nothing, and holds something."""

    def __init__(self, held=None, buffer=None):
        super().__init__()
        self.linear, self._held = nn.Linear(2, 2), held
        self.register_buffer("constant", buffer)

    def forward(self, x):
        return self.linear(x)


class Settings:
    """Shows nothing of itself."""

    def __init__(self, **settings):
        vars(self).update(settings)

    def __repr__(self):
        return "Settings()"


class Slots:
    __slots__ = ("steps",)

    def __init__(self, steps):
        self.steps = steps


Kind = enum.Enum("Kind", "SHORT LONG")
HELD = {
    "buffer": [lambda: Part(buffer=torch.zeros(2)), lambda: Part(buffer=torch.zeros(2000))],
    "value of a buffer": [lambda: Part(buffer=torch.tensor(2)), lambda: Part(buffer=torch.tensor(8))],
    "tensor": [lambda: Part(torch.zeros(2)), lambda: Part(torch.zeros(2000))],
    "value of a tensor": [lambda: Part(torch.tensor([1, 2])), lambda: Part(torch.tensor([1, 8]))],
    "dict": [lambda: Part({"steps": 1}), lambda: Part({"steps": 8})],
    "list": [lambda: Part([1, 2]), lambda: Part([1, 2, 3])],
    "set": [lambda: Part({"a", "b"}), lambda: Part({"a", "c"})],
    "object": [lambda: Part(Settings(inner=Settings(n=1))), lambda: Part(Settings(inner=Settings(n=2)))],
    "slots": [lambda: Part(Slots(1)), lambda: Part(Slots(2))],
    "namespace": [lambda: Part(SimpleNamespace(n=[1])), lambda: Part(SimpleNamespace(n=[2]))],
    "enum": [lambda: Part(Kind.SHORT), lambda: Part(Kind.LONG)],
    "type of numbers": [lambda: Part(torch.bfloat16), lambda: Part(torch.float32)],
    "module in a list": [lambda: Part([nn.Linear(2, 2)]), lambda: Part([nn.Linear(2, 2000)])],
    "quantization": [
        lambda: Part(LlamaConfig(quantization_config=BitsAndBytesConfig(load_in_4bit=True))),
        lambda: Part(LlamaConfig(quantization_config=BitsAndBytesConfig(load_in_8bit=True))),
    ],
    "config in a config": [
        lambda: Part(Settings(text=LlamaConfig(rope_scaling={"rope_type": "linear", "factor": 2.0}))),
        lambda: Part(Settings(text=LlamaConfig(rope_scaling={"rope_type": "linear", "factor": 4.0}))),
    ],
    "function": [lambda: Part(abs), lambda: Part(len)],
    "partial": [lambda: Part(functools.partial(max, 1)), lambda: Part(functools.partial(max, 2))],
}


@pytest.mark.parametrize("kind", HELD)
def test_what_a_model_holds_is_part_of_it_however_deep(kind):
    one, other = HELD[kind]
    assert describe_model(one()) == describe_model(one()) != describe_model(other())


def test_a_compiled_model_is_the_same_in_every_process_and_its_backend_is_part_of_it():
    def described(**options):
        return describe_model(torch.compile(nn.Linear(2, 2), **options))

    eager = described(backend="eager")
    assert eager == described(backend="eager") != described(backend="aot_eager")
    assert eager != described(backend="eager", dynamic=True)
    assert eager != describe_model(nn.Linear(2, 2))


def test_hooks_of_a_model_are_part_of_it():
    one, other = Part(), Part()
    other.register_forward_pre_hook(lambda module, args: None)
    assert describe_model(one) != describe_model(other)


def test_weights_and_mode_are_no_part_of_a_model():
    one, other = Part(), Part().eval()
    other.load_state_dict({name: value + 1 for name, value in one.state_dict().items()}, strict=False)
    assert describe_model(one) == describe_model(other)


@pytest.mark.parametrize("holds", ["closure", "attribute", "list"])
def test_another_model_that_a_loss_runs_is_part_of_it(holds):
    def make(width):
        teacher = nn.Linear(2, width)
        if holds == "closure":
            return lambda outputs, labels: teacher(outputs)
        return Settings(teacher=teacher if holds == "attribute" else [teacher])

    assert describe_callable(make(2)) == describe_callable(make(2)) != describe_callable(make(3))


def test_an_object_that_refers_to_itself_is_described():
    one, other = Settings(n=1), Settings(n=2)
    one.itself, other.itself = [one], [other]
    assert contents_of(one) != contents_of(other)


@pytest.mark.parametrize("value", [(number for number in [1]), [object()] * 2 + [memoryview(b"1")]])
def test_what_does_not_show_what_it_holds_is_refused(value):
    with pytest.raises(UndescribableError, match="does not show what it holds"):
        contents_of(value)


class Opaque(bytearray):
    """Bytes of which only pickle knows."""

    __slots__ = ()


def test_bytes_that_only_pickle_knows_count_and_whole_data_sets_are_refused():
    one, same, other = (Opaque(text) for text in (b"a", b"a", b"b"))
    assert contents_of(one) == contents_of(same) != contents_of(other)
    with pytest.raises(UndescribableError, match="does not show what it holds"):
        contents_of(Opaque(2**24 + 1))


@pytest.mark.parametrize("kind", [list, set, frozenset, tuple])
def test_long_lists_of_numbers_are_part_of_what_holds_them(kind):
    assert contents_of(kind(range(10**5))) == contents_of(kind(range(10**5))) != contents_of(kind(range(10**5 + 1)))


def test_too_much_to_look_at_is_refused():
    with pytest.raises(UndescribableError, match="more than 50000 objects"):
        contents_of([[place] for place in range(50_001)])


def test_locks_and_generators_show_nothing_and_cost_nothing():
    assert contents_of([threading.Lock(), torch.Generator()]) == contents_of([threading.Lock(), torch.Generator()])


def test_contents_are_the_same_in_another_process():
    code = (
        "from batchwright.integrations._contents import contents_of\nfrom transformers import LlamaConfig, "
        "LlamaForCausalLM as Model\nprint(contents_of([{'a', 'b', 'c'}, Model(LlamaConfig(vocab_size=8, hidden_size="
        "8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)), lambda x: x in {'a', 'b', 'c'}]))"
    )
    found = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)}
    assert len(found) == 1
    assert len(*found) > 10
