"""What a batch of whole groups is."""

from itertools import chain


def flat(batch):
    return list(chain.from_iterable(batch)) if batch and isinstance(batch[0], list) else batch


def assert_whole_groups(batches, ids):
    """Every batch holds all members of each of its groups, once."""
    members = {}
    for example, label in enumerate(ids):
        members.setdefault(label, []).append(example)
    for batch in batches:
        held = flat(batch)
        assert sorted(held) == sorted(chain.from_iterable(members[label] for label in {ids[one] for one in held}))
