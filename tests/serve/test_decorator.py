"""batched: on functions, coroutine functions and methods."""

import asyncio
import gc
import pickle
import weakref

import pytest

from batchwright.errors import ArgumentError
from batchwright.serve import Batcher, Closed, batched


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def test_a_function_of_a_list_becomes_one_of_an_item():
    @batched(max_items=8, length_of=len)
    async def shout(texts):
        """Say it louder."""
        return [text.upper() for text in texts]

    async def main():
        assert await asyncio.gather(shout("a"), shout("b", deadline_ms=1000, priority=1)) == ["A", "B"]
        assert await shout.map(["c", "d"]) == ["C", "D"]
        await shout.drain()
        with pytest.raises(Closed):
            await shout("e")

    run(main())
    assert (shout.__name__, shout.__doc__) == ("shout", "Say it louder.")
    assert shout.stats().num_answered == 4


def test_it_needs_no_options():
    @batched
    def double(numbers):
        return [2 * number for number in numbers]

    assert double.sync(4) == 8
    assert run(double(5)) == 10
    run(double.close())


def test_wrong_options_are_refused_where_they_stand():
    with pytest.raises(ArgumentError, match="max_items"):
        batched(max_items=0)(list)


class Model:
    def __init__(self, factor):
        self.factor = factor
        self.sizes = []

    @batched(max_items=4)
    def scale(self, numbers):
        self.sizes.append(len(numbers))
        return [self.factor * number for number in numbers]

    @batched
    async def slowly(self, numbers):
        await asyncio.sleep(0)
        return [self.factor * number for number in numbers]


def test_every_object_has_a_batcher_of_its_own():
    two, three = Model(2), Model(3)

    async def main():
        assert await asyncio.gather(two.scale(1), three.scale(1), two.slowly(5)) == [2, 3, 10]

    run(main())
    assert two.scale is two.scale
    assert two.scale.batcher is not three.scale.batcher
    two.scale.configure(max_items=2)
    assert (two.scale.batcher.settings.max_items, three.scale.batcher.settings.max_items) == (2, 4)


def test_a_coroutine_method_is_known_as_one():
    async def main():
        with pytest.raises(ArgumentError, match="await submit"):
            Model(2).slowly.sync(1)

    run(main())


def test_an_object_with_a_batched_method_can_be_forgotten():
    model = Model(2)
    assert model.scale.sync(3) == 6
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def double(numbers):
    return [2 * number for number in numbers]


def test_it_travels_to_another_process_without_its_threads():
    function = batched(double, max_items=3)
    function.sync(1)
    again = pickle.loads(pickle.dumps(function))
    assert again.sync(21) == 42
    assert again.batcher.settings.max_items == 3
    assert isinstance(again.batcher, Batcher)


def test_a_batched_function_is_one_line():
    @batched(max_items=8, length_of=len, max_tokens=4096, deadline_ms=50)
    def shout(texts):
        return [text.upper() for text in texts]

    inside = "shout, policy='adaptive', max_items=8, deadline_ms=50.0, max_tokens=4096"
    prefix = "test_a_batched_function_is_one_line.<locals>."
    assert repr(shout) == f"BatchedFunction(Batcher({prefix}{inside}))"
    assert repr(shout.batcher) == f"Batcher({prefix}{inside})"
    shout.batcher.close_sync()
    assert repr(shout.batcher) == f"Batcher({prefix}{inside}, closed)"


def test_a_batcher_of_an_object_is_named_after_its_class():
    class Model:
        def __call__(self, items):
            return items

    batcher = Batcher(Model())
    assert repr(batcher).endswith("Model, policy='adaptive', max_items=64)")
    batcher.close_sync()
