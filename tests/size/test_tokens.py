"""Tokens are counted as examples are: schedules, periods and pauses may follow them."""

import json

import pytest

from batchwright import size
from batchwright.errors import ArgumentError, MissingSignalError, StateMismatchError
from batchwright.size import BatchSizeController, Observation


def falling(index):
    return 0.5**index


# With every=1000, the size after 3,500 tokens: index 3.
SCHEDULES = {
    "linear": (size.linear(16, 4, per="tokens", every=1000), 28.0),
    "exponential": (size.exponential(16, 2, per="tokens", every=1000), 128.0),
    "warm_up": (size.warm_up(16, 64, 4, per="tokens", every=1000), 52.0),
    "milestones": (size.milestones({0: 8, 3000: 24, 4000: 48}, per="tokens"), 24.0),
    "cyclic": (size.cyclic(size.linear(16, 4, per="tokens", every=1000), 2, per="tokens", every=1000), 20.0),
    "from_lr": (size.from_lr(falling, start=16, per="tokens", every=1000), 128.0),
    "seesaw": (size.seesaw(falling, start=16, per="tokens", every=1000)[0], 128.0),
    "switch": (size.switch({0: size.constant(8), 3: size.constant(24)}, per="tokens", every=1000), 24.0),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_counts_tokens(name):
    policy, wanted = SCHEDULES[name]
    assert policy.update(policy.init(), Observation(tokens=3500, size=16))[0] == wanted
    with pytest.raises(MissingSignalError, match="needs tokens, which was not observed; pass batch_tokens"):
        policy.update(policy.init(), Observation(examples=3500, size=16))


def test_the_warm_up_of_a_paper_is_a_line():
    policy = size.milestones({0: 1024, 100_000_000_000: 2048, 400_000_000_000: 4096}, per="tokens")
    controller = BatchSizeController(policy, min_size=1, max_size=8192)
    sizes = [controller.observe(tokens=count * 10**9) for count in (0, 99, 100, 400)]
    assert sizes == [1024, 1024, 2048, 4096]
    assert str(controller.history[-1]).startswith("tokens 400000000000: 2048 -> 4096 (milestones: 4096 from milestone")


def test_the_controller_adds_up_the_tokens_of_updates():
    controller = BatchSizeController(size.linear(8, 8, per="tokens", every=100), min_size=8, max_size=64)
    assert [controller.observe(batch_size=4, batch_tokens=60) for _ in range(4)] == [8, 16, 16, 24]
    assert controller.state_dict()["counts"]["tokens"] == 240
    assert controller.observe(batch_size=4, batch_tokens=60, tokens=500) == 48  # a count that is given wins
    assert controller.history[-1].tokens == 500


class Spy(size.Policy):
    """Keeps the tokens of every update that it saw."""

    def init(self):
        return []

    def update(self, state, observation):
        return 8.0, [*state, observation.batch_tokens]


@pytest.mark.parametrize(
    ("observed", "seen"),
    [
        ([{"tokens": 100}, {"tokens": 160}, {"tokens": 200}], [None, 60, 40]),  # where the count began, nobody knows
        ([{"batch_tokens": 30}, {"tokens": 100}, {}], [30, 70, None]),
        ([{"tokens": 100, "step": 1}, {"tokens": 900, "step": 9}, {"tokens": 950, "step": 10}], [None, None, 50]),
        ([{"tokens": 100}, {"tokens": 20}, {"tokens": 50}], [None, None, 30]),  # a new run
    ],
    ids=["a count", "tokens of an update, then a count", "a count after several updates", "a count that falls"],
)
def test_the_tokens_of_an_update_are_told_from_counts(observed, seen):
    controller = BatchSizeController(Spy(), min_size=1, max_size=64)
    for figures in observed:
        controller.observe(batch_size=4, **figures)
    assert controller.state_dict()["policy_state"] == seen


def test_a_period_of_tokens_gathers_until_it_is_full():
    policy = size.loss_below(2.0, per="tokens", every=100)
    controller = BatchSizeController(policy, min_size=8, max_size=1024)
    sizes = [controller.observe(batch_size=4, batch_tokens=40, loss=1.0) for _ in range(6)]
    assert sizes == [8, 8, 16, 16, 16, 32]  # 120 tokens are a period
    with pytest.raises(MissingSignalError, match="needs batch_tokens, which was not observed"):
        controller.observe(batch_size=4, loss=1.0)


def test_a_pause_may_last_for_tokens():
    policy = size.chain(size.track(lambda o: 2.0 * o.current), size.cooldown(tokens=100))
    controller = BatchSizeController(policy, min_size=8, max_size=1024)
    assert [controller.observe(batch_size=4, batch_tokens=40) for _ in range(6)] == [16, 16, 16, 32, 32, 32]
    assert repr(size.cooldown(tokens=100)) == "cooldown(tokens=100)"


@pytest.mark.parametrize(
    "text",
    [
        "linear(16, 4, per='tokens', every=1)",
        "milestones({0: 8, 100: 16}, per='tokens')",
        "loss_driven(per='tokens', every=1)",
        "speed_driven(per='tokens', every=5000)",
        "noise_driven(per='tokens', every=5000)",
        "cooldown(tokens=100)",
    ],
)
def test_a_policy_is_written_as_the_call_that_makes_it(text):
    assert repr(eval(f"size.{text}")) == text


def test_counting_single_tokens_by_mistake_is_refused():
    with pytest.raises(ArgumentError, match="linear per tokens needs every, the tokens of one block"):
        size.linear(16, 4, per="tokens")
    with pytest.raises(ArgumentError, match="one of examples, steps, epochs and tokens, got steps=1, tokens=2"):
        size.cooldown(steps=1, tokens=2)


def test_a_history_holds_tokens_only_where_they_were_counted():
    controllers = [BatchSizeController(size.linear(8, 8), min_size=8, max_size=64) for _ in range(2)]
    controllers[0].observe(epoch=1)
    controllers[1].observe(epoch=1, tokens=70)
    entries = [controller.state_dict()["history"][0] for controller in controllers]
    assert "tokens" not in entries[0]
    assert entries[1]["tokens"] == 70
    for controller in controllers:
        state = json.loads(json.dumps(controller.state_dict()))
        other = BatchSizeController(size.linear(8, 8), min_size=8, max_size=64)
        other.load_state_dict(state)
        assert other.history == controller.history
        state["history"][0]["tokens"] = -1
        with pytest.raises(StateMismatchError, match="tokens must be a whole number of 0 or more, got -1"):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    "policy",
    [size.loss_driven(per="tokens", every=1000), size.noise_driven(per="tokens", every=1000)],
    ids=["loss", "noise"],
)
def test_the_count_of_tokens_with_every_update_is_enough_for_a_period_of_tokens(policy):
    controller = size.BatchSizeController(policy, min_size=16, max_size=64)
    for step in range(1, 30):
        figures = {"loss": 1.0 / step, "noise_s": 800.0, "noise_g2": 2.0}
        controller.observe(batch_size=16, tokens=160 * step, **figures)
    assert controller.num_changes > 0


def test_an_update_without_tokens_is_one_where_the_count_is_given_and_stays():
    controller = BatchSizeController(size.speed_driven(per="tokens", every=100), min_size=1, max_size=64)
    for tokens in (0, 50, 50, 90):
        controller.observe(batch_size=controller.size, seconds=0.1, tokens=tokens)
    with pytest.raises(MissingSignalError, match="needs batch_tokens"):
        controller.observe(batch_size=controller.size, seconds=0.1)
