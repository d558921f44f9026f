"""States of samplers, of regrouped loaders and of streams."""

from functools import partial
from itertools import islice

import torch
from torch.utils.data import DataLoader, RandomSampler

import batchwright as bw
from batchwright import size
from batchwright.integrations.dynabatch import DynaBatchSampler

from .cases import Case, without_words

NUM = 60
LENGTHS = [1 + (37 * i + 11 * i * i) % 60 for i in range(NUM)]
PAIRS = [(length, 1 + (29 * i + 5 * i * i) % 40) for i, length in enumerate(LENGTHS)]
MEMORY = bw.MemoryModel.from_json(
    '{"kind": "batchwright.MemoryModel", "version": 1, "num_axes": 1, "margin": 0.1, '
    '"coefficients": {"1": 1000.0, "b": 0.0, "b*L0": 8.0, "b*L0^2": 0.25}}'
)


def squares(num_items, lengths):
    return num_items * (lengths**2).sum(axis=1)


# BatchSampler


SAMPLERS = {
    "window": (LENGTHS, bw.MaxTokens(240), {}),
    "small windows": (LENGTHS, bw.MaxTokens(240), {"grouping": bw.WindowSort(batches_per_window=2), "seed": 7}),
    "in order": (LENGTHS, bw.MaxTokens(240), {"grouping": bw.InOrder()}),
    "sorted": (LENGTHS, bw.MaxTokens(240), {"grouping": bw.Sorted()}),
    "sorted, not shuffled": (LENGTHS, bw.MaxItems(7), {"grouping": bw.Sorted(), "shuffle": False}),
    "buckets": (LENGTHS, bw.MaxTokens(240), {"grouping": bw.Buckets(4)}),
    "buckets by items": (LENGTHS, bw.MaxItems(6), {"grouping": bw.Buckets(3), "pad_multiple_of": 8}),
    "packed": (LENGTHS, bw.MaxTokens(192), {"grouping": bw.Packed(64)}),
    "packed by rows": (LENGTHS, bw.MaxItems(2), {"grouping": bw.Packed(80), "seed": 3}),
    "both": (LENGTHS, bw.MaxTokens(240) & bw.MaxItems(5), {}),
    "cost": (LENGTHS, bw.MaxCost(squares, 9000), {}),
    "bytes": (LENGTHS, MEMORY.budget(6000), {}),
    "prior": (LENGTHS, bw.MemoryModel.pretrained("train").budget(reference=(6, 40), fraction=0.9), {}),
    "two axes": (PAIRS, bw.MaxTokens(300), {}),
    "two axes, sorted": (PAIRS, bw.MaxTokens(300), {"grouping": bw.Sorted()}),
    "two axes, buckets": (PAIRS, bw.MaxTokens(300), {"grouping": bw.Buckets((3, 2))}),
    "two axes, few buckets": (PAIRS, bw.MaxTokens(300), {"grouping": bw.Buckets(5), "pad_multiple_of": 4}),
    "pow2": (LENGTHS, bw.MaxTokens(240), {"size_ladder": "pow2", "pad_multiple_of": 8, "oversize": "alone"}),
    "pow2x3": (LENGTHS, bw.MaxTokens(400), {"size_ladder": "pow2x3", "keep_first": 2}),
    "multiples": (LENGTHS, bw.MaxTokens(240), {"size_multiple_of": 2, "drop_last": True}),
    "dropped": (LENGTHS, bw.MaxTokens(50), {"oversize": "drop", "remainder": "drop"}),
    "truncated": (LENGTHS, bw.MaxTokens(50), {"oversize": "truncate", "balance_over": 2}),
    "balanced by cost": (LENGTHS, bw.MaxTokens(240), {"balance_over": 4, "cost": squares}),
}


def make_sampler(lengths, budget, options, rank=0, world_size=1):
    return bw.BatchSampler(lengths, budget, rank=rank, world_size=world_size, **options)


def save_sampler(make, *, world_size, epoch=1, num_steps=2):
    sampler = make(rank=world_size - 1, world_size=world_size)
    sampler.set_epoch(epoch)
    for _ in islice(sampler, num_steps):
        pass
    return sampler.state_dict()


def save_tracked(make):
    sampler = make()
    received = sampler.track(prefetch(sampler, 3))
    for _ in range(2):
        next(received)
    return sampler.state_dict()


def prefetch(batches, num):
    """Yield what an iterable gives, read some items ahead as workers do."""
    waiting = []
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > num:
            yield waiting.pop(0)
    yield from waiting


def save_finished(make):
    sampler = make()
    list(sampler)
    return sampler.state_dict()


def follow(make, state, world_sizes=(1, 2)):
    """Return the rest of the epoch and the beginning of the next, on every rank of some world sizes."""
    return {str(num): [_follow(make(rank=rank, world_size=num), state) for rank in range(num)] for num in world_sizes}


def _follow(sampler, state):
    sampler.load_state_dict(state)
    kept = without_words(sampler.state_dict()) == without_words(state)
    return {"kept": kept, "length": len(sampler), "rest": list(sampler), "next": list(islice(sampler, 2))}


def sampler_cases():
    for name, settings in SAMPLERS.items():
        make = partial(make_sampler, *settings)
        for num in (1, 2):
            yield Case(f"sampler: {name}, {num}", partial(save_sampler, make, world_size=num), partial(follow, make))
    make = partial(make_sampler, *SAMPLERS["window"])
    more = {
        "new": lambda: make().state_dict(),
        "set_epoch": lambda: save_sampler(make, world_size=1, epoch=5, num_steps=0),
        "tracked": lambda: save_tracked(make),
        "finished": lambda: save_finished(make),
        "before the last": lambda: save_sampler(make, world_size=2, num_steps=len(make(world_size=2)) - 1),
    }
    for name, save in more.items():
        yield Case(f"sampler: {name}", save, partial(follow, make))
    three = partial(follow, make, world_sizes=(3,))
    yield Case("sampler: three ranks", lambda: save_sampler(make, world_size=2, num_steps=1), three)


# ResizableBatchSampler and its controller


CURRICULUM = size.Curriculum(LENGTHS, start_fraction=0.4, full_at=3)
RESIZABLE = {
    "plain": {},
    "in order": {"shuffle": False},
    "lengths": {"lengths": LENGTHS, "budget": bw.MaxTokens(240), "seed": 5},
    "pairs": {"lengths": PAIRS, "budget": bw.MaxTokens(300) & bw.MaxItems(6)},
    "curriculum": {"curriculum": CURRICULUM},
    "curriculum with lengths": {"curriculum": CURRICULUM, "lengths": LENGTHS, "budget": bw.MaxTokens(240)},
}


def make_controller():
    return bw.BatchSizeController(size.linear(3, 2, per="step"), min_size=2, max_size=11)


def make_resizable(options, rank=0, world_size=1):
    return bw.ResizableBatchSampler(NUM, make_controller(), rank=rank, world_size=world_size, **options)


def run(sampler, num):
    """Return some batches of one epoch; the controller observes each."""
    batches, controller = [], sampler.controller
    for batch in islice(sampler, num):
        batches.append(batch)
        controller.observe(batch_size=controller.size)
    return batches


def save_resizable(make, *, world_size, epoch=1, num_steps=2):
    sampler = make(rank=world_size - 1, world_size=world_size)
    sampler.set_epoch(epoch)
    run(sampler, num_steps)
    return {"sampler": sampler.state_dict(), "controller": sampler.controller.state_dict()}


def follow_resizable(make, world_sizes, state):
    return {str(num): [_follow_resizable(make(rank=rank, world_size=num), state) for rank in range(num)]
            for num in world_sizes}  # fmt: skip


def _follow_resizable(sampler, state):
    sampler.load_state_dict(state["sampler"])
    sampler.controller.load_state_dict(state["controller"])
    kept = sampler.state_dict() == state["sampler"]
    return {"kept": kept, "rest": run(sampler, None), "next": run(sampler, 2), "size": sampler.controller.size}


def resizable_cases():
    for name, options in RESIZABLE.items():
        make = partial(make_resizable, options)
        for num in (1, 2):
            save = partial(save_resizable, make, world_size=num)
            yield Case(f"resizable: {name}, {num}", save, partial(follow_resizable, make, (1, 2)))
    make = partial(make_resizable, {})
    yield Case("resizable: new", partial(save_resizable, make, world_size=1, epoch=0, num_steps=0),
               partial(follow_resizable, make, (1, 3)))  # fmt: skip


# regroup


class Chunks:
    """Lists of examples of one rank, in an order that belongs to the epoch."""

    def __init__(self, rank, world_size):
        self.examples = range(rank, 50, world_size)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        turned = [*self.examples[self.epoch :], *self.examples[: self.epoch]]
        return (turned[start : start + 4] for start in range(0, len(turned), 4))


def make_chunked(rank=0, world_size=1, **options):
    return bw.regroup(Chunks(rank, world_size), make_controller(), rank=rank, world_size=world_size, **options)


def make_drawn(rank=0, world_size=1):
    sampler = RandomSampler(range(50), generator=torch.Generator().manual_seed(3))
    return bw.regroup(DataLoader(range(50), batch_size=4, sampler=sampler, collate_fn=list), make_controller())


def make_planned(rank=0, world_size=1):
    sampler = make_sampler(*SAMPLERS["window"])
    return bw.regroup(DataLoader(range(NUM), batch_sampler=sampler, collate_fn=list), make_controller())


def regroup_cases():
    makers = {"list": make_chunked, "drop_last": partial(make_chunked, drop_last=True), "planned": make_planned}
    for name, make in makers.items():
        yield Case(
            f"regroup: {name}", partial(save_resizable, make, world_size=1), partial(follow_resizable, make, (1,))
        )
    two = partial(follow_resizable, make_chunked, (2,))
    yield Case("regroup: two ranks", partial(save_resizable, make_chunked, world_size=2), two)
    drawn = partial(save_resizable, make_drawn, world_size=1, epoch=0)
    yield Case("regroup: drawn", drawn, partial(follow_resizable, make_drawn, (1,)))


# StreamBatcher


class Stateful:
    """A source that knows its place."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < NUM:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


STREAMS = {
    "window": (range(NUM), {"grouping": bw.WindowSort(batches_per_window=2)}),
    "packed": (range(NUM), {"grouping": bw.Packed(64), "seed": 4}),
    "buckets": (range(NUM), {"grouping": bw.Buckets(3), "pad_multiple_of": 8}),
    "dropped": (range(NUM), {"budget": bw.MaxTokens(50), "oversize": "drop", "size_multiple_of": 2}),
    "in order": (range(NUM), {"grouping": bw.InOrder(), "shuffle": False}),
}


def make_stream(source, options):
    settings = {"budget": bw.MaxTokens(240), "buffer_size": 25, **options}
    return bw.StreamBatcher(source, length_of=LENGTHS.__getitem__, **settings)


def make_pairs():
    return bw.StreamBatcher(range(NUM), length_of=PAIRS.__getitem__, budget=bw.MaxTokens(300), buffer_size=25)


def save_stream(make, num=6):
    stream = make()
    for _ in range(num):
        next(iter(stream))
    return stream.state_dict()


def go_on_stream(make, state):
    stream = make()
    stream.load_state_dict(state)
    kept = stream.state_dict() == state
    return {"kept": kept, "rest": list(stream), "next": list(islice(stream, 2)), "epoch": stream.epoch}


def stream_cases():
    makers = {name: partial(make_stream, *settings) for name, settings in STREAMS.items()}
    makers |= {"stateful": lambda: make_stream(Stateful(), {}), "two axes": make_pairs}
    for name, make in makers.items():
        yield Case(f"stream: {name}", partial(save_stream, make), partial(go_on_stream, make))


# dynabatch


DYNABATCH = {
    "plain": {},
    "shuffled": {"shuffle": True, "shuffle_seed": 5},
    "friendly": {"shuffle": True, "friendly_batch_size": True, "threshold": 0.9},
    "train": {"shuffle": True, "task": "train", "drop_last": True, "keep_batch_size_even": True},
}


def make_dynabatch(options, rank=0, world_size=1):
    words, characters = [max(1, length // 2) for length in LENGTHS], [4 * length for length in LENGTHS]
    return DynaBatchSampler(LENGTHS, words, characters, 4, rank=rank, world_size=world_size, **options)


def dynabatch_cases():
    for name, options in DYNABATCH.items():
        make = partial(make_dynabatch, options)
        for num in (1, 2):
            save = partial(save_sampler, make, world_size=num)
            yield Case(f"dynabatch: {name}, {num}", save, partial(follow, make))


CASES = [*sampler_cases(), *resizable_cases(), *regroup_cases(), *stream_cases(), *dynabatch_cases()]
