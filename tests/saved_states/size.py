"""States of controllers with every policy and transform, and of averages of the noise."""

import math
from functools import partial

import batchwright as bw
from batchwright import size
from batchwright.size.noise import NoiseAverage

from .cases import Case, without_words

TIME = bw.TimeModel.from_json(
    '{"kind": "batchwright.TimeModel", "version": 1, "num_axes": 1, "first_visit_seconds": 0.5, '
    '"coefficients": {"1": 0.1, "b": 0.0, "b*L0": 1e-05, "b*L0^2": 0.0}}'
)


def halving(index):
    return 0.5**index


def falling(index):
    return 1 / (1 + 0.2 * index)


def quarter_of_noise(o):
    return o.noise_s / o.noise_g2 / 4


def inverse_loss(o):
    return 40 / o.loss


def policies():
    """Return every policy, with usual and unusual settings."""
    noise = {"horizon": 1000.0}
    return {
        "constant": size.constant(24),
        "linear": size.linear(16, 3),
        "linear per step": size.linear(16, 1.5, per="step", every=2),
        "exponential": size.exponential(8, 1.3),
        "exponential per examples": size.exponential(8, 1.1, per="examples", every=100),
        "warm_up": size.warm_up(8, 64, 6),
        "warm_up geometric": size.warm_up(8, 64, 20, mode="geometric", per="step"),
        "milestones": size.milestones({0: 8, 3: 24, 6: 48}),
        "milestones per examples": size.milestones({0: 8, 200: 24, 500: 48}, per="examples"),
        "cyclic": size.cyclic(size.linear(8, 8), 3),
        "cyclic of a signal": size.cyclic(size.loss_driven(), 4, per="step"),
        "from_lr": size.from_lr(halving),
        "from_lr from a start": size.from_lr(
            falling, start=16, power=2.0, after=2, max_factor=3.0, per="step", every=2
        ),
        "seesaw": size.seesaw(falling)[0],
        "seesaw per step": size.seesaw(halving, start=8, per="step", every=4, max_factor=6)[0],
        "loss difference": size.loss_driven(tolerance=0.02),
        "loss difference linear": size.loss_driven(mode="linear", up=6, down=3, relative=False, per="step"),
        "loss gain": size.loss_driven(gain=1.5, direction=-1, per="step", every=2),
        "loss ema": size.loss_driven("ema", alpha=0.3, mode="linear", gain=50),
        "loss variance": size.loss_driven("variance", window=3, per="step"),
        "loss variance detrended": size.loss_driven("variance", window=3, detrend=True, per="examples", every=20),
        "loss variance gain": size.loss_driven("variance", window=3, gain=5, fluctuating=1.0, per="step"),
        "loss below": size.loss_below(2.0, mode="linear", per="step"),
        "loss settled": size.loss_settled(tolerance=0.5, window=2),
        "entropy": size.entropy_driven(10, smallest=8, largest=128),
        "entropy with a reference": size.entropy_driven(10, smallest=8, largest=128, reference=1.7, per="step"),
        "entropy threshold": size.entropy_driven(10, mode="threshold", low=0.3, high=0.6, up=1.5, per="step", every=2),
        "noise": size.noise_driven(**noise),
        "noise target": size.noise_driven(0.5, num_examples=3000),
        "noise ratio": size.noise_driven(1.0, estimator="ratio", high=1.2, low=0.4, up=1.5, down=0.7, per="step"),
        "noise per epoch": size.noise_driven(per="epoch", **noise),
        "noise ratio of four": size.noise_driven(estimator="ratio", num_parts=4, up=1.1, per="step"),
        "memory": size.memory_driven(),
        "memory forgetting": size.memory_driven(0.7, 0.5, 1.5, patience=3),
        "memory without memory": size.memory_driven(remember=False),
        "memory per epoch": size.memory_driven(per="epoch"),
        "speed": size.speed_driven(per="step", every=2),
        "step time": size.step_time(150, every=2),
        "goodput": size.goodput(TIME, length=64, base_size=8, horizon=1000.0),
        "goodput in parts": size.goodput(TIME, length=64, base_size=8, max_items=16, world_size=2, gain=1.0, **noise),
        "goodput on line": size.goodput(),
        "goodput in tokens": size.goodput(base_size=40, unit="tokens", **noise),
        "goodput without a length": size.goodput(TIME, base_size=8),
        "measured": size.measured(level=0.1),
        "cooldown of tokens": size.chain(size.track(inverse_loss), size.cooldown(tokens=200)),
        "linear per tokens": size.linear(8, 2, per="tokens", every=100),
        "track": size.track(quarter_of_noise, needs=("noise_s", "noise_g2"), **noise),
        "track the loss": size.track(inverse_loss),
        "curriculum": size.Curriculum(range(40), start_fraction=0.25, full_at=6, shape="sqrt").policy(8),
        "curriculum geometric": size.Curriculum(range(40), start_fraction=0.25, full_at=6, shape="geometric").policy(8),
        "switch": size.switch({0: size.linear(8, 2), 3: size.loss_driven(), 6: size.constant(40)}),
        "switch per step": size.switch({0: size.constant(12), 9: size.loss_driven("ema")}, per="step"),
        "maximum": size.maximum(size.linear(8, 2), size.loss_driven("ema"), size.memory_driven()),
        "minimum": size.minimum(size.memory_driven(per="epoch"), size.speed_driven()),
        "chain after a gain": size.chain(size.loss_driven(gain=0.2, per="step"), size.multiple_of(8)),
        **{f"chain with {name}": size.chain(size.track(inverse_loss), part) for name, part in transforms().items()},
        "chain of all": size.chain(size.noise_driven(**noise), *transforms().values()),
    }


def transforms():
    return {
        "smooth": size.smooth(0.6),
        "rate_limit": size.rate_limit(1.25),
        "multiple_of": size.multiple_of(4),
        "cooldown": size.cooldown(steps=3),
        "cooldown of examples": size.cooldown(examples=150),
        "cooldown of epochs": size.cooldown(epochs=2),
        "hysteresis": size.hysteresis(0.1),
        "monotone": size.monotone(),
        "clamp": size.clamp(10, 60),
    }


def figures(number, batch_size):
    """Return what training might report after an update; arithmetic only, the same everywhere."""
    swing = ((7 * number) % 5 - 2) / 10
    return {
        "epoch": number // 3,
        "batch_size": batch_size,
        "tokens": 40 * number,
        "loss": 4 / (1 + number / 4) * (1 + swing),
        "lr": 0.1,
        "entropy": 2.0 - number / 20 + swing / 2,
        "noise_s": 40 + 2.0 * number + 5 * swing,
        "noise_g2": 1.5 - number / 40 + swing / 20,
        "noise_reliable": True,
        "noise_parts": 4,
        "seconds": 0.1 + batch_size / 1000,
        "memory_fraction": min(1.0, 0.3 + batch_size / 150 + swing / 2),
    }


def make_controller(name):
    policy = policies()[name]
    return bw.BatchSizeController(policy, min_size=2, max_size=400, initial=16 if policy.start() is None else None)


def observe(controller, start, stop):
    return [controller.observe(**figures(number, controller.size)) for number in range(start, stop)]


def save_controller(name):
    controller = make_controller(name)
    observe(controller, 0, 14)
    return controller.state_dict()


def go_on_controller(name, state):
    controller = make_controller(name)
    controller.load_state_dict(state)
    kept = without_words(controller.state_dict()) == without_words(state)
    sizes = observe(controller, 14, 30)
    after = controller.state_dict()
    wanted = [decision.wanted for decision in controller.history]
    return {
        "kept": kept,
        "sizes": sizes,
        "wanted": wanted,
        "policy_state": after["policy_state"],
        "counts": after["counts"],
    }


def save_average():
    average = NoiseAverage(horizon=500.0)
    for number in range(20):
        average = average.update(40 + number % 3, 1.5 + number % 4 / 10, num_examples=10 + number)
    return average.to_state()


def go_on_average(state):
    average = NoiseAverage(**state).update(50.0, 1.0, num_examples=64).update(math.nan, 1.0, num_examples=64)
    return {
        "state": average.to_state(),
        "scale": average.scale,
        "is_reliable": average.is_reliable,
        "num_updates": average.num_updates,
    }


CASES = [Case(name, partial(save_controller, name), partial(go_on_controller, name)) for name in policies()]
CASES.append(Case("NoiseAverage", save_average, go_on_average))
