"""The memory of decoding: counted before it is taken, so that nothing has to run out."""

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

import batchwright as bw
from batchwright.step import MemoryMonitor
from batchwright.step.inference import _decoding, _reading
from batchwright.step.inference._reading import cuts, worth_of
from batchwright.step.inference._sizing import GraphBytes, Layout, Sizes, layout_of, room_for
from batchwright.step.inference.generation import generate
from batchwright.testing import EagerGraphs, FakeMemory
from tests.step.graphs.tape import TapeGraphs

from . import shapes
from .ledger import CountedGraphs

# 10 bytes a token of the decoder, 20 of the source; to read a prompt 4 a token and 8 a row; 16 a row for a step.
SIZES = Sizes(own=10, source=20, per_token=4.0, per_row=8.0, per_step=16.0)


def test_a_batch_takes_its_cache_its_steps_and_a_piece_of_its_prompts():
    layout = layout_of(10, 1, 32, 60)
    assert layout == Layout(16, 32, 64)
    # 16 rows of 32 x 10 + 64 x 20 + 1.25 x 16; all 10 rows are read at once: 1.25 x (60 x 4 + 8) for each of 16 slots.
    assert SIZES.of_batch(layout, 60, 10**9) == 16 * 1620 + 16 * 310
    # Of 8,000 bytes an eighth is for reading.
    assert SIZES.of_batch(layout, 60, 8000) == 16 * 1620 + 1000
    # One row is read whatever it takes.
    assert SIZES.of_batch(layout, 60, 80) == 16 * 1620 + 310


def test_prompts_are_read_in_pieces_that_an_eighth_of_the_room_holds():
    assert SIZES.rows_of_piece(60, 8 * 3100) == 10
    assert SIZES.rows_of_piece(60, 8 * 309) == 1
    assert SIZES.rows_of_piece(60, None) == 65_536 // 60
    assert SIZES.rows_of_piece(10**6, None) == 1


@given(st.integers(1, 600), st.integers(1, 200), st.integers(10**4, 10**7), st.booleans())
def test_the_budget_is_kept_in_every_slot(source, new, room, is_encoder_decoder):
    budget = GraphBytes(SIZES, float(room), 1 if is_encoder_decoder else None, None)
    lengths = np.array([[source, new]])
    (num,) = budget.max_items(lengths).tolist()
    assert num == 0 or budget.fraction(np.array([num]), lengths)[0] <= 1
    if num:
        layout = layout_of(num, 1 if is_encoder_decoder else source, new, source if is_encoder_decoder else None)
        assert SIZES.of_batch(layout, source, room) <= room
    more = num + 1 if num < 8 else num + 8
    assert budget.fraction(np.array([more]), lengths)[0] > 1


def test_the_room_is_what_a_budget_in_bytes_leaves():
    memory = MemoryMonitor(source=FakeMemory(1000, used_bytes=100))
    model = bw.MemoryModel.fit([(1, 8), (2, 8), (4, 8), (4, 16), (8, 16), (8, 32)], [18, 26, 42, 74, 138, 266])
    assert room_for(None, None) is None
    assert room_for(None, memory) == 700  # 0.8 of all, less what is in use
    assert room_for(bw.MaxItems(8), memory) == 850
    assert room_for(model.budget(500) & bw.MaxItems(8), memory) == 400
    assert room_for(model.budget(500), memory, 60) == 460
    assert room_for(model.budget(50), memory) == 0


@pytest.mark.parametrize("name", ["m2m100", "llama"])
@pytest.mark.parametrize("has_budget", [False, True])
def test_nothing_runs_out_where_a_batch_ten_times_as_large_would(name, has_budget, counted):
    total = 3 * 10**6
    model, ledger, reads = counted(name, total)
    examples = shapes.prompts(300, longest=60)
    budget = bw.MaxItems(300) if has_budget else None
    memory = MemoryMonitor(source=ledger)
    options = {"max_new_tokens": 24, "eos_token_id": [59]}
    found = generate(model, examples, graphs=CountedGraphs(ledger), budget=budget, memory=memory, **options)
    assert ledger.num_ooms == 0
    assert ledger.used_bytes == 0
    assert shapes.as_lists(found) == shapes.as_lists(generate(shapes.make(name), examples, graphs=False, **options))
    # The rows of all batches would take several times the memory, so they are not read at once, and few one by one.
    assert 4 < len(reads) < 80
    # The memory is used: the first batch alone fills more than half of what it may.
    assert ledger.peak_bytes > 0.5 * (0.95 if has_budget else 0.8) * total


def test_a_budget_in_bytes_is_kept(counted):
    model, ledger, _ = counted("m2m100", 10**9)
    sizes = [(b, source, new) for b in (1, 4, 16) for source in (8, 32) for new in (4, 16)]
    fitted = bw.MemoryModel.fit(sizes, [1000 + 40 * b * (source + new) for b, source, new in sizes])  # far too few
    most = 2 * 10**6
    options = {"max_new_tokens": 24, "eos_token_id": [59], "memory": MemoryMonitor(source=ledger)}
    generate(model, shapes.prompts(300, 60), graphs=CountedGraphs(ledger), budget=fitted.budget(most),
             count_output=True, **options)  # fmt: skip
    assert ledger.peak_bytes <= most
    assert ledger.peak_bytes > 0.5 * most


def test_a_second_call_begins_with_large_batches(counted):
    model, ledger, reads = counted("m2m100", 10**9)
    options = {"max_new_tokens": 24, "eos_token_id": [59], "memory": MemoryMonitor(source=ledger)}
    examples = shapes.prompts(300, 60)
    generate(model, examples, graphs=CountedGraphs(ledger), **options)
    assert reads == [1, 7, 4, 300]  # some rows in two pieces, the same by eager steps, and all
    reads.clear()
    generate(model, examples, graphs=CountedGraphs(ledger), **options)
    assert reads == [300]


def test_lengths_of_ones_own_are_split_before_memory_runs_out(counted):
    model, ledger, _ = counted("llama", 10**6)
    examples, options = shapes.prompts(100, longest=40), {"max_new_tokens": 24, "eos_token_id": [59]}
    # Lengths that say nothing of the prompts, and a budget far too large.
    found = generate(
        model, examples, graphs=CountedGraphs(ledger), budget=bw.MaxItems(100), lengths=[1] * 100,
        memory=MemoryMonitor(source=ledger), **options,
    )  # fmt: skip
    assert ledger.num_ooms == 0
    assert shapes.as_lists(found) == shapes.as_lists(generate(shapes.make("llama"), examples, graphs=False, **options))


class Recorded(transformers.LlamaForCausalLM):
    """Records the shapes that it reads."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
        self.config.seen.append(tuple(input_ids.shape))
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, **kwargs)


class WithoutPositions(transformers.LlamaForCausalLM):
    """Is told no positions, so that tokens are as far apart as their keys lie."""

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, **kwargs):
        self.config.seen.append(tuple(input_ids.shape))
        return super().forward(input_ids, attention_mask, None, past_key_values, **kwargs)


@pytest.mark.parametrize("kind", [Recorded, WithoutPositions])
def test_pieces_of_prompts_change_no_token(kind, monkeypatch):
    model, examples = shapes.make("llama"), [[12, *ids] for ids in shapes.prompts(40, longest=30)]
    monkeypatch.setattr(_decoding, "is_doubtful", lambda model: False)  # which is tried with two prompts
    model.__class__, seen = kind, []
    model.config.seen = seen
    memory = MemoryMonitor(source=FakeMemory(10**6))
    found = generate(model, examples, graphs=TapeGraphs(), max_new_tokens=20, memory=memory)
    widths = {width for _, width in seen if width > 1}
    # Shorter rows are read without the padding of longer ones, where the model is told positions.
    assert (len(widths) > 1) == (kind is Recorded)
    options = {"graphs": False, "max_new_tokens": 20, "budget": bw.MaxItems(40)}
    assert shapes.as_lists(found) == shapes.as_lists(generate(model, examples, **options))


@pytest.mark.parametrize("name", shapes.NAMES)
@pytest.mark.parametrize("graphs", [TapeGraphs, EagerGraphs], ids=lambda one: one.__name__)
def test_prompts_cut_where_that_saves_padding_give_the_same_tokens(name, graphs, monkeypatch):
    model, examples, read = shapes.make(name), shapes.prompts(40, longest=60), []
    rows_of = _reading.Batch.rows

    def noted(self, rows):
        found = rows_of(self, rows)
        read.append(tuple(found["input_ids"].shape))
        return found

    monkeypatch.setattr(_reading.Batch, "rows", noted)
    limits = [1 + place % 20 for place in range(40)]
    options = {"max_new_tokens": limits, "budget": bw.MaxItems(24)}
    generate(model, examples, graphs=graphs(), **options)
    whole, read[:] = list(read), []
    monkeypatch.setattr(_reading, "_OPERATIONS", 2.0 * 20 * 5000)  # about 20 tokens are worth a pass
    found = generate(model, examples, graphs=graphs(), **options)
    assert len(read) > len(whole) - 2
    assert sum(num * width for num, width in read) < 0.8 * sum(num * width for num, width in whole[2:])
    assert sorted(read, key=lambda one: -one[1]) == read
    assert shapes.as_lists(found) == shapes.as_lists(generate(model, examples, graphs=False, **options))


def test_rows_are_cut_where_it_saves_the_most():
    widths = np.array([90, 88, 40, 40, 12, 10])
    assert cuts(widths, 0, 6, worth=10_000) == []
    assert cuts(widths, 0, 6, worth=190) == [2]  # four rows of 50 fewer
    assert cuts(widths, 0, 6, worth=50) == [2, 4]
    assert cuts(np.array([7, 7, 7]), 0, 3, worth=1) == []
    assert cuts(widths[::-1], 0, 6, worth=1) == []


def test_a_pass_is_worth_more_tokens_of_a_smaller_model():
    """The encoder of a translator reads prompts, all of a decoder does; tables of tokens compute nothing."""
    small, large = shapes.make("llama"), shapes.make("llama", num_hidden_layers=4)
    assert worth_of(large) < worth_of(small) < worth_of(shapes.make("m2m100"))
    small.resize_token_embeddings(10 * shapes.NUM_TOKENS)
    assert worth_of(small.model) == worth_of(shapes.make("llama").model)
