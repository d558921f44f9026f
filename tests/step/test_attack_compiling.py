"""Plans whose marks still make torch.compile give up."""

import pytest
import torch
from torch import nn

from batchwright.step import CompileCounter, MarkShapes


@pytest.mark.filterwarnings("ignore")
def test_a_plan_with_batches_of_one_row_does_not_run_into_the_limit_of_torch():
    # Expected: MarkShapes: "So no plan runs into torch's limit", and "one more for a dynamic size of 1": 6 + 1.
    # Found: torch compiles (1, length) once per static length, so 6 lengths take 12 compilations; at the 9th torch
    # gives up and runs everything eagerly. Batches of one long example are in most plans.
    torch._dynamo.reset()
    shapes = [(rows, length) for rows in (3, 1, 5) for length in (8, 16, 24, 32, 40, 48)]
    mark, counter, layer = MarkShapes(shapes), CompileCounter(), nn.Linear(7, 5)
    table, seen = nn.Embedding(10, 7), []

    def forward(ids):
        if not torch.compiler.is_compiling():
            seen.append(tuple(ids.shape))  # ran eagerly
        return layer(table(ids)).sum()

    compiled = torch.compile(forward, backend="eager")
    for shape in shapes:
        compiled(mark(torch.ones(shape, dtype=torch.long)))
    assert seen == []
    assert counter.num <= mark.num_expected + 1
