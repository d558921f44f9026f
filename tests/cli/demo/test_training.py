import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from batchwright.cli.demo.records import QUICK  # noqa: E402
from batchwright.cli.demo.training import (  # noqa: E402
    END,
    RARE,
    START,
    Corpus,
    collate,
    encode,
    lengths_of,
    load_corpus,
    loss_sum,
    make_arms,
    make_model,
    rate_factor,
    train_arm,
    train_as_long,
    valid_batches,
    validate,
)
from batchwright.errors import ArgumentError  # noqa: E402

SMALL = replace(QUICK, max_length=64, max_tokens=256, width=16, num_heads=2, num_checks=2, vocabulary_size=20)


def make_corpus(num=40):
    rng = np.random.default_rng(0)
    lengths = [64, *np.clip(rng.lognormal(2, 1, num - 1), 2, 64).astype(int)]
    examples = [rng.integers(4, 20, length + 1) for length in lengths]
    return Corpus(train=examples, valid=examples[:6], vocabulary=tuple(map(str, range(20))))


def test_unknown_tokens_are_rare_and_the_end_is_marked():
    assert encode(["a", "z"], {"a": 7}, 10).tolist() == [START, 7, RARE, END]


def test_a_long_function_is_cut_to_what_the_model_reads_and_one_more():
    ids = encode(["a"] * 50, {"a": 7}, 10)
    assert ids.tolist() == [START] + [7] * 10
    assert lengths_of([ids]).tolist() == [10]


def test_the_standard_library_gives_a_heavy_tailed_corpus():
    settings = replace(QUICK, num_train=200, max_length=512)
    corpus = load_corpus(settings)
    lengths = lengths_of(corpus.train)
    assert (len(corpus.train), len(corpus.valid), len(corpus.vocabulary)) == (200, 16, 500)
    assert lengths.max() > 3 * lengths.mean()
    assert max(ids.max() for ids in corpus.train + corpus.valid) < 500


def test_the_corpus_is_the_same_every_time():
    first, second = load_corpus(QUICK), load_corpus(QUICK)
    assert all((a == b).all() for a, b in zip(first.train, second.train, strict=True))


def test_a_file_that_is_no_python_is_passed_over(tmp_path):
    (tmp_path / "a.py").write_text("def broken(:\n")
    for i in range(12):
        (tmp_path / f"b{i}.py").write_text("def f(x):\n    return x\n" * 10)
    corpus = load_corpus(replace(QUICK, num_train=20, num_valid=5), root=tmp_path)
    assert (len(corpus.train), len(corpus.valid)) == (20, 5)


def test_a_folder_without_python_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="needs at least 2 Python files, found 0"):
        load_corpus(QUICK, root=tmp_path)


def test_padding_does_not_change_the_loss():
    model = make_model(SMALL, 20)
    short, long = torch.randint(4, 20, (5,)), torch.randint(4, 20, (30,))
    together, count = loss_sum(model, collate([short.numpy(), long.numpy()]))
    alone = [loss_sum(model, ids[None]) for ids in (short, long)]
    # A text of n ids has n - 1 tokens to predict.
    assert count == 4 + 29
    assert together.item() == pytest.approx(sum(total.item() for total, _ in alone), rel=1e-5)


def test_the_model_does_not_see_the_future():
    model = make_model(SMALL, 20)
    ids = torch.randint(4, 20, (1, 20))
    changed = ids.clone()
    changed[0, 10:] = 4
    assert torch.equal(model(ids)[0, :10], model(changed)[0, :10])


def test_an_untrained_model_knows_nothing():
    corpus = make_corpus()
    # Weights are small at the start, so each of the 20 tokens is about as likely.
    assert validate(make_model(SMALL, 20), valid_batches(corpus, SMALL)) == pytest.approx(math.log(20), abs=0.1)


def test_every_arm_sees_every_example_once_within_the_budget():
    corpus = make_corpus()
    arms = make_arms(corpus.train, SMALL)
    real = int(lengths_of(corpus.train).sum())
    for arm in arms:
        batches = list(arm.loader)
        assert len(batches) == len(arm.loader)
        assert sum(len(batch) for batch in batches) == 40
        assert sum(int((batch[:, 1:] != 0).sum()) for batch in batches) == real
        assert max(batch[:, 1:].numel() for batch in batches) <= SMALL.max_tokens


def test_the_last_arm_makes_no_fewer_updates_than_the_first():
    first, _, full, small = make_arms(make_corpus(200).train, replace(SMALL, max_tokens=640))
    assert len(first.loader) == 20  # 640 padded tokens hold 10 of the longest, 64
    assert len(full.loader) < len(first.loader) <= len(small.loader)


def test_training_lowers_the_loss_and_counts_what_it_did():
    corpus = make_corpus(200)
    settings = replace(SMALL, base_rate=1e-2)
    result = train_arm(make_arms(corpus.train, settings)[0], corpus, settings)
    assert [check.num_examples for check in result.checks] == [100, 200]
    assert result.loss < math.log(20)
    assert result.num_tokens == lengths_of(corpus.train).sum()
    assert result.padded_tokens == sum(items * length for items, length in result.shapes)
    assert 0 < result.padding < 1


def test_the_learning_rate_follows_the_root_of_the_tokens():
    corpus = make_corpus()
    arm = make_arms(corpus.train, SMALL)[0]
    tokens = lengths_of(corpus.train).sum() / len(arm.loader)
    assert train_arm(arm, corpus, SMALL).rate == pytest.approx(SMALL.base_rate * math.sqrt(tokens / 1000))


def test_the_learning_rate_rises_then_falls():
    factors = [rate_factor(step, 50) for step in range(50)]
    # A fifth of 50 steps is the rise; a tenth of the rate is left at the end.
    assert factors[9] == 1.0
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] == pytest.approx(0.1)


def test_a_longer_run_reads_the_examples_again_and_ends_its_schedule():
    corpus = make_corpus(200)
    epoch = train_arm(make_arms(corpus.train, SMALL)[1], corpus, SMALL)
    longer = train_arm(make_arms(corpus.train, SMALL)[1], corpus, SMALL, num_updates=2 * epoch.num_steps)
    assert longer.num_steps == 2 * epoch.num_steps
    assert longer.num_tokens == 2 * epoch.num_tokens
    assert longer.checks[-1].num_examples == 400
    assert len(longer.checks) == SMALL.num_checks
    assert longer.rate == epoch.rate


def test_what_trains_as_long_makes_as_many_updates_as_fit_into_the_seconds():
    corpus = make_corpus(80)
    results = [train_arm(arm, corpus, SMALL) for arm in make_arms(corpus.train, SMALL)]
    timed = [replace(result, seconds=seconds) for result, seconds in zip(results, (9.0, 3.0, 1.0, 0.0), strict=True)]
    grouped, planned = train_as_long(corpus, SMALL, timed)
    assert grouped.num_steps == 3 * results[1].num_steps
    assert planned.num_steps == 8 * results[3].num_steps  # never more than eight epochs
