"""Every update is exact or refused: cases drawn at random against plain autograd, one example at a time.

A failure prints the plainest case that still fails. To run it alone::

    from tests.step.exactness.cases import Case
    from tests.step.exactness.examiner import outcome_of
    print(outcome_of(Case(model="temperature", clip=True)))
"""

import random
import re

import pytest
import torch.distributed as dist

from ...processes import leave_group
from ...thorough import num_cases
from .cases import draw_case, simplest
from .examiner import outcome_of

NUM_CASES = num_cases(100, thorough=2000)
PER_TEST = 100

# Every refusal that a drawn case may meet; the guide lists them.
REFUSALS = (
    r"the batch is a list of \d+ entries that may be fields or examples",
    r"the batch has to be cut into micro-batches, but .* is a PackedSequence",
    r"the batch has to be cut into micro-batches, but .* may be one entry per example or \d+ fields",
    r"fields of a batch must share their first dimension.*give split=",
    r"the batch has to be cut into micro-batches, but the fields of a batch must share",
)


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    leave_group()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # PyTorch's own, once per process
@pytest.mark.parametrize("first", range(0, NUM_CASES, PER_TEST))
def test_every_drawn_case_is_exact_or_refused_and_nine_of_ten_are_exact(first):
    outcomes = [outcome_of(draw_case(random.Random(seed))) for seed in range(first, first + PER_TEST)]
    wrong = [outcome for outcome in outcomes if outcome.kind == "wrong"]
    assert not wrong, f"{len(wrong)} of {PER_TEST} are wrong:\n" + "\n".join(map(_plainest, wrong[:8]))
    refused = [outcome for outcome in outcomes if outcome.kind == "refused"]
    unknown = [outcome for outcome in refused if not any(re.search(text, outcome.what) for text in REFUSALS)]
    assert not unknown, "refusals that are not listed:\n" + "\n".join(map(str, unknown))
    assert len(refused) <= PER_TEST // 10, f"{len(refused)} of {PER_TEST} are refused:\n" + "\n".join(map(str, refused))


def _plainest(outcome):
    start = outcome.what[:12]

    def fails_alike(case):
        other = outcome_of(case)
        return other.kind == "wrong" and other.what[:12] == start

    return str(outcome_of(simplest(outcome.case, fails_alike)))
