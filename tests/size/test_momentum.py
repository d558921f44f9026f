"""Adam's averages when beta2 changes: with a constant gradient g, corrected averages are g and its square."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from batchwright.errors import ArgumentError  # noqa: E402
from batchwright.size.momentum import MADE_AT, MADE_FOR, changed_beta2, check_beta2, follow_beta2, follow_noise  # noqa: E402

torch.set_num_threads(1)
GRADIENT = torch.tensor([3.0, -0.5, 1e-2])
BETA2S = (0.98, 0.5, 0.9999, 0.86, 0.86, 0.0, 0.92, 0.98, 0.7, 0.999, 0.3, 0.99)
OPTIONS = {"lr": 0.25, "betas": (0.9, 0.98), "eps": 1e-12}
KINDS = {
    "adam": (torch.optim.Adam, {"foreach": False}),
    "adam foreach": (torch.optim.Adam, {"foreach": True}),
    "adam fused": (torch.optim.Adam, {"fused": True}),
    "adam amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "adam amsgrad fused": (torch.optim.Adam, {"amsgrad": True, "fused": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.0}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "radam foreach": (torch.optim.RAdam, {"foreach": True}),
}


def run(optimizer, parameter, beta2s):
    """Take a step with each beta2; yield it with the number of steps done."""
    for num, beta2 in enumerate(beta2s, 1):
        parameter.grad = GRADIENT.clone()
        with changed_beta2(optimizer, [beta2]):
            optimizer.step()
        yield num, beta2


def check_average(optimizer, parameter, beta2, rtol=5e-6):
    state = optimizer.state[parameter]
    num = float(state["step"])
    for name in {"exp_avg_sq", "max_exp_avg_sq"} & state.keys():
        expected = GRADIENT.double().square() * weight(beta2, num)
        torch.testing.assert_close(state[name].double(), expected, rtol=rtol, atol=0)
    if isinstance(optimizer, torch.optim.Adam):
        torch.testing.assert_close(state["exp_avg"].double(), GRADIENT.double() * weight(0.9, num), rtol=rtol, atol=0)


def weight(beta, num):
    return -math.expm1(num * math.log(beta) if beta else -math.inf)


@pytest.mark.parametrize("name", KINDS)
def test_the_corrected_average_of_a_constant_gradient_is_its_square_at_every_beta2(name):
    kind, more = KINDS[name]
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = kind([parameter], **OPTIONS, **more)
    for _, beta2 in run(optimizer, parameter, BETA2S):
        check_average(optimizer, parameter, beta2)


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("adam")])
def test_adam_then_moves_by_the_rate_at_every_step(name):
    kind, more = KINDS[name]
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = kind([parameter], **OPTIONS, **more)
    for num, _ in run(optimizer, parameter, BETA2S):
        torch.testing.assert_close(parameter.detach(), -0.25 * num * GRADIENT.sign(), rtol=1e-5, atol=0)


def test_radam_moves_by_the_rate_times_the_rectification_of_the_beta2_in_force():
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.RAdam([parameter], **OPTIONS)
    before = torch.zeros(3)
    for num, beta2 in run(optimizer, parameter, BETA2S * 2):
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * num * beta2**num / (1 - beta2**num)
        if length > 5:
            top, bottom = (length - 4) * (length - 2) * longest, (longest - 4) * (longest - 2) * length
            expected = -0.25 * math.sqrt(top / bottom) * GRADIENT.sign()
        else:
            expected = -0.25 * GRADIENT
        torch.testing.assert_close(parameter.detach() - before, expected, rtol=1e-4, atol=1e-6)
        before = parameter.detach().clone()


def test_sparse_adam_moves_by_the_rate_in_rows_that_come_at_every_step():
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.SparseAdam([weight], **OPTIONS)
    for num, beta2 in enumerate(BETA2S, 1):
        weight.grad = torch.sparse_coo_tensor([[1]], GRADIENT[None], (2, 3), check_invariants=True)
        with changed_beta2(optimizer, [beta2]):
            optimizer.step()
        torch.testing.assert_close(weight[1].detach(), -0.25 * num * GRADIENT.sign(), rtol=1e-5, atol=0)


@given(st.lists(st.floats(0.0, 0.99999), min_size=1, max_size=12))
@settings(deadline=None)
def test_any_sequence_of_beta2_keeps_the_corrected_average(beta2s):
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([parameter], **OPTIONS)
    for _, beta2 in run(optimizer, parameter, beta2s):
        check_average(optimizer, parameter, beta2, rtol=1e-4)


def test_parameters_count_their_own_steps_and_those_without_a_step_stay():
    often, seldom, never = (torch.nn.Parameter(torch.zeros(3)) for _ in range(3))
    optimizer = torch.optim.Adam([often, seldom, never], **OPTIONS)
    for turn, beta2 in enumerate((0.98, 0.8, 0.99, 0.5, 0.97)):
        seldom.grad = GRADIENT.clone() if turn % 3 == 2 else None
        list(run(optimizer, often, [beta2]))
        check_average(optimizer, often, beta2)
        if turn >= 2:
            check_average(optimizer, seldom, beta2)
    assert never not in optimizer.state


def test_groups_follow_their_own_beta2():
    first, second = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    groups = [{"params": [first]}, {"params": [second], "betas": (0.9, 0.5)}]
    optimizer = torch.optim.Adam(groups, **OPTIONS)
    for pair in ((0.98, 0.5), (0.98, 0.7), (0.9, 0.7), (0.98, 0.5)):
        first.grad, second.grad = GRADIENT.clone(), GRADIENT.clone()
        with changed_beta2(optimizer, pair):
            optimizer.step()
        check_average(optimizer, first, pair[0])
        check_average(optimizer, second, pair[1])


def test_ten_updates_of_16_examples_count_as_one_and_a_quarter_of_128():
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter], **OPTIONS)
    list(run(optimizer, parameter, [0.999] * 10))
    follow_beta2(optimizer, [0.999**8])
    assert float(optimizer.state[parameter]["step"]) == pytest.approx(1.25)
    follow_beta2(optimizer, [0.999])
    assert float(optimizer.state[parameter]["step"]) == pytest.approx(10)
    check_average(optimizer, parameter, 0.999)


def test_squares_of_small_batches_count_by_their_examples():
    # Ten updates of 16 examples with squares of 9, one of 128 with squares of 1: (160 · 9 + 128 · 1) / 288, as beta2 of
    # almost 1 forgets nothing.
    parameter, base = torch.nn.Parameter(torch.zeros(1)), 1 - 1e-6
    optimizer = torch.optim.Adam([parameter], lr=1e-3, betas=(0.9, base))
    for beta2, gradient in [(base, 3.0)] * 10 + [(base**8, 1.0)]:
        parameter.grad = torch.tensor([gradient])
        with changed_beta2(optimizer, [beta2]):
            optimizer.step()
    state = optimizer.state[parameter]
    corrected = float(state["exp_avg_sq"]) / weight(base**8, float(state["step"]))
    assert corrected == pytest.approx((160 * 9 + 128) / 288, rel=1e-4)


def test_steps_on_a_device_are_never_read():
    # Tensors without values: whoever asked for the number of steps would get an error.
    weight = torch.nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.Adam([weight], **OPTIONS)
    average, step = torch.zeros(3, device="meta"), torch.zeros((), device="meta")
    optimizer.state[weight] = {"step": step, "exp_avg": average, "exp_avg_sq": torch.zeros(3, device="meta")}
    versions = average._version, step._version
    follow_beta2(optimizer, [0.5])
    assert (average._version, step._version) == (versions[0] + 1, versions[1] + 1)
    assert optimizer.param_groups[0][MADE_FOR] == 0.5


@pytest.mark.needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("more", [{"fused": True}, {"capturable": True}, {"foreach": True}])
def test_steps_on_a_gpu_give_the_same_averages_without_synchronising(more):
    one = torch.nn.Parameter(torch.zeros(3, device="cuda"))
    optimizer = torch.optim.Adam([one], **OPTIONS, **more)
    for beta2 in BETA2S:
        one.grad = GRADIENT.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            follow_beta2(optimizer, [beta2])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with changed_beta2(optimizer, [beta2]):
            optimizer.step()
        expected = GRADIENT.double().square() * weight(beta2, float(optimizer.state[one]["step"]))
        torch.testing.assert_close(optimizer.state[one]["exp_avg_sq"].cpu().double(), expected, rtol=1e-5, atol=0)


def test_the_same_beta2_again_changes_nothing_and_a_group_without_changes_gets_no_note():
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([parameter], **OPTIONS)
    list(run(optimizer, parameter, [0.98]))
    assert MADE_FOR not in optimizer.param_groups[0]
    follow_beta2(optimizer, [0.5])
    before = {name: value.clone() for name, value in optimizer.state[parameter].items()}
    follow_beta2(optimizer, [0.5])
    assert all(torch.equal(optimizer.state[parameter][name], value) for name, value in before.items())
    follow_beta2(optimizer, [None])
    assert optimizer.param_groups[0][MADE_FOR] == 0.5


def test_averages_that_were_counted_anew_are_refused_without_the_note_of_their_beta2():
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter], **OPTIONS)
    list(run(optimizer, parameter, [0.98, 0.97]))
    saved = optimizer.state_dict()
    again = torch.optim.AdamW([parameter], **OPTIONS)
    again.load_state_dict(saved)
    follow_beta2(again, [0.96])
    del again.param_groups[0][MADE_FOR]  # as a loader does that keeps only what a new optimizer has
    with pytest.raises(ArgumentError, match=f"'{MADE_FOR}', which says for which beta2; load a state_dict"):
        follow_beta2(again, [0.96])
    again.param_groups[0][MADE_FOR] = 0.96
    follow_beta2(again, [0.96])


def test_optimizers_are_known_by_what_they_are_made_from():
    class Watched(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    class Lion(torch.optim.Optimizer):
        pass

    class Adam(torch.optim.Optimizer):
        pass

    parameter = torch.nn.Parameter(torch.zeros(1))
    names = ("Adam", "AdamW", "NAdam", "RAdam", "SparseAdam", "Adamax")
    for kind in (*(getattr(torch.optim, name) for name in names), Watched):
        check_beta2(kind([parameter]))
    check_beta2(Lion([parameter], {"betas": (0.9, 0.99)}))
    with pytest.warns(UserWarning, match="does not know the bias correction of Adam, if it has one"):
        check_beta2(Adam([parameter], {"betas": (0.9, 0.99)}))
    optimizer = Watched([parameter])
    follow_beta2(optimizer, [0.5])
    assert optimizer.param_groups[0][MADE_FOR] == 0.5


@pytest.mark.parametrize("name", ["adam", "adam amsgrad", "nadam"])
def test_squares_of_a_size_become_those_of_another(name):
    # N = 48: 1 + 48/16 = 4 at 16 examples, 1 + 48/48 = 2 at 48. The average of squares is half as large, others stay.
    kind, more = KINDS[name]
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = kind([parameter], **OPTIONS, **more)
    follow_noise(optimizer, 16, lambda: 48.0)
    list(run(optimizer, parameter, [0.98] * 3))
    before = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    follow_noise(optimizer, 48, lambda: 48.0)
    follow_noise(optimizer, 48, lambda: 48.0)
    for key, value in optimizer.state[parameter].items():
        expected = before[key] / 2 if "exp_avg_sq" in key else before[key]
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
    assert optimizer.param_groups[0][MADE_AT] == 48


def test_squares_stay_where_the_noise_is_not_known_or_the_size_is_about_the_same():
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([parameter], **OPTIONS)
    follow_noise(optimizer, 100, lambda: pytest.fail("nobody needs to know"))
    list(run(optimizer, parameter, [0.98]))
    average = optimizer.state[parameter]["exp_avg_sq"].clone()
    follow_noise(optimizer, 109, lambda: pytest.fail("nobody needs to know"))
    follow_noise(optimizer, 200, lambda: None)
    follow_noise(optimizer, 400, lambda: math.inf)
    assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], average)
    assert optimizer.param_groups[0][MADE_AT] == 400


def test_an_optimizer_whose_averages_are_not_known_is_left_alone():
    class Lion(torch.optim.Optimizer):
        pass

    optimizer = Lion([torch.nn.Parameter(torch.zeros(1))], {"betas": (0.9, 0.99)})
    follow_noise(optimizer, 16, lambda: 48.0)
    assert MADE_AT not in optimizer.param_groups[0]
