"""batched: on functions, coroutine functions and methods."""

import asyncio
import copy
import dataclasses
import gc
import pickle
import threading
import types
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
    assert two.scale == two.scale
    assert two.scale.batcher is two.scale.batcher
    assert two.scale.batcher is not three.scale.batcher
    assert two.scale != three.scale
    assert len({two.scale, two.scale, three.scale}) == 2
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


def test_whoever_holds_a_bound_function_keeps_its_object():
    assert run(Model(4).scale(2)) == 8
    scale = Model(5).scale
    gc.collect()
    assert list(scale.map([1, 2])) == [5, 10]
    assert list(Model(6).scale.map([1, 2])) == [6, 12]


class Plus(Model):
    """Overrides a batched method by one that asks its parent, with single items and with a list."""

    @batched
    def scale(self, numbers):
        return [super(Plus, self).scale.sync(number) + 1 for number in numbers]

    @batched
    async def slowly(self, numbers):
        return [number + 1 for number in await super().slowly.__wrapped__(numbers)]

    async def once(self, number):
        return await super().scale(number)


def test_an_override_reaches_the_method_of_its_parent():
    plus = Plus(10)

    async def main():
        return await asyncio.gather(plus.scale(1), plus.slowly(2), plus.once(3), Model.scale(plus, 4))

    assert run(main()) == [11, 21, 30, 40]
    assert Model.scale.sync(plus, 5) == 50
    # The override and what it overrides have a batcher each.
    assert plus.scale.stats().num_answered == 1
    assert sum(plus.sizes) == Model.scale.__get__(plus).stats().num_answered == 4


class Slotted:
    __slots__ = ("factor",)

    @batched
    def scale(self, numbers):
        return numbers


class Pair(tuple):
    @batched
    def scale(self, numbers):
        return numbers


def test_slots_are_served_where_the_batcher_can_go_with_the_object():
    class Slots:
        __slots__ = ("__weakref__", "factor")

        def __init__(self, factor):
            self.factor = factor

        @batched
        def scale(self, numbers):
            return [self.factor * number for number in numbers]

    two, three = Slots(2), Slots(3)
    assert (two.scale.sync(5), three.scale.sync(5)) == (10, 15)
    gone = weakref.ref(two)
    del two
    assert gone() is None


@pytest.mark.parametrize("kind", [Slotted, Pair])
def test_an_object_without_weak_references_is_refused_with_what_to_do(kind):
    with pytest.raises(ArgumentError, match=f"cannot be batched on a {kind.__name__}.*Add '__weakref__' to __slots__"):
        kind().scale.sync(1)


class Classes:
    factor = 2

    @batched
    @classmethod
    def outer(cls, numbers):
        return [cls.factor * number for number in numbers]

    @batched
    @staticmethod
    def static_outer(numbers):
        return [number + 1 for number in numbers]

    @staticmethod
    @batched
    def static_inner(numbers):
        return [number + 1 for number in numbers]

    @classmethod
    @batched
    def inner(cls, numbers):
        return [cls.factor * number for number in numbers]

    listed = batched(list)
    bound = batched(Model(7).scale.__wrapped__)


class Fives(Classes):
    factor = 5


def test_a_class_method_has_one_batcher_per_class():
    assert [owner.outer.sync(3) for owner in (Classes, Classes(), Fives, Fives())] == [6, 6, 15, 15]
    assert Classes.outer.batcher is Classes().outer.batcher
    assert Classes.outer.batcher is not Fives.outer.batcher


@pytest.mark.parametrize("name", ["static_outer", "static_inner"])
def test_a_static_method_has_one_batcher(name):
    found = [getattr(owner, name) for owner in (Classes, Classes(), Fives, Fives())]
    assert [function.sync(3) for function in found] == [4, 4, 4, 4]
    assert len({function.batcher for function in found}) == 1


def test_a_class_method_above_batched_works_where_python_hands_on_the_class():
    # Python 3.10 to 3.12 do; later ones call with the class in front, and what is not a call is refused.
    if isinstance(Classes.inner, types.MethodType):
        assert run(Fives.inner(3)) == 15
        with pytest.raises(ArgumentError, match="write @batched above @classmethod"):
            Fives.inner.sync(3)
    else:
        assert (Classes.inner.sync(3), Fives.inner.sync(3)) == (6, 15)


def test_later_pythons_hand_on_the_class_in_front():
    method = types.MethodType(vars(Model)["scale"], Model(3))
    assert run(method(3)) == 9
    with pytest.raises(ArgumentError, match="write @batched above @classmethod"):
        method.sync(3)


class Keeper:
    """An object that can be called, and that has names of its own."""

    def __init__(self):
        self._run, self.map, self.stats, self.batcher = (lambda items: ["wrong"] * len(items)), {}, 7, None

    def __call__(self, items):
        return [2 * item for item in items]


def test_what_an_object_keeps_does_not_stand_in_the_place_of_what_is_batched():
    batched_object = batched(Keeper())
    assert batched_object.sync(3) == 6
    assert list(batched_object.map([1, 2])) == [2, 4]
    assert batched_object.stats().num_answered == 3


def test_what_python_does_not_bind_is_not_bound():
    assert (Classes().listed.sync(3), Classes().bound.sync(3)) == (3, 21)


def test_a_method_without_its_object_and_too_many_items_are_refused():
    with pytest.raises(ArgumentError, match=r"Model\.scale needs more than a list of items.*call it on its object"):
        Model.scale.sync(1)
    with pytest.raises(ArgumentError, match="takes one item, got 2"):
        Model(1).scale.sync(1, 2)


def test_a_function_of_two_arguments_is_refused_with_what_to_write():
    @batched(max_items=4)
    def add(first, second):
        return first + second

    with pytest.raises(
        ArgumentError, match=r"add takes more than a list of items, .* one item, .*add\(\(first, second"
    ):
        add.sync("a", "b")


def test_background_work_of_a_method_waits_for_its_object():
    class Scaled:
        @batched(background=[[1, 2]])
        def scale(self, numbers):
            return [3 * number for number in numbers]

    scaled = Scaled()
    assert Scaled.scale.stats().num_calls == 0
    assert scaled.scale.sync(4) == 12
    run(scaled.scale.close())


@dataclasses.dataclass
class Config:
    factor: int

    @batched
    def scale(self, numbers):
        return [self.factor * number for number in numbers]


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))],
    ids=["copy", "deep", "pickle"],
)
def test_a_copy_of_an_object_has_a_batcher_of_its_own(again):
    config = Config(2)
    assert config.scale.sync(3) == 6
    other = again(config)
    assert other == config
    other.factor = 10
    assert (other.scale.sync(3), config.scale.sync(3)) == (30, 6)


def test_a_bound_function_is_pickled_with_its_object():
    config = Config(3)
    assert pickle.loads(pickle.dumps(config.scale)).sync(2) == 6
    assert copy.deepcopy({"object": config, "function": config.scale})["function"].sync(2) == 6
    with pytest.raises(pickle.PicklingError, match="is overridden"):
        pickle.dumps(Model.scale.__get__(Plus(1)))


def test_many_threads_at_the_first_look_find_one_batcher():
    model, start, found = Model(2), threading.Barrier(8), []

    def look():
        start.wait(30)
        found.append(model.scale.batcher)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8
    assert len(set(found)) == 1


def double(numbers):
    return [2 * number for number in numbers]


@batched(max_items=5)
def decorated(numbers):
    return numbers


def test_a_function_under_the_decorator_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert pickle.loads(pickle.dumps(Classes.static_outer)) is Classes.static_outer


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
