"""The KV cache: every kept row bit-equal to a plain gather, in place, within its capacity, and nothing leaks."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specinfer.attention import TreeCache
from specinfer.errors import CacheError

CPU = torch.device("cpu")
SHAPES = ((2, 3, 3), (2, 3, 3), (1, 4, 2), (2, 2, 5), (2, 3, 3))  # per layer: heads, key dim, value dim
MOVES = ((0, 2), (3, 5), (0, 1, 4), (), (1, 2, 3), (5,))


class Reference:
    """What a cache must hold: per layer and row, lists of key and value vectors, gathered the slow way."""

    def __init__(self, rows: int) -> None:
        self.committed: list[list[list[tuple[Tensor, Tensor]]]] = [[[] for _ in range(rows)] for _ in SHAPES]
        self.pending: list[list[list[tuple[Tensor, Tensor]]]] = [[[] for _ in range(rows)] for _ in SHAPES]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Add (rows, heads, T, dim) states as pending slots."""
        for row, slots in enumerate(self.pending[layer]):
            slots += [(keys[row, :, t].clone(), values[row, :, t].clone()) for t in range(keys.shape[2])]

    def keep(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Commit the pending slots named, drop the others, drop rows given None."""
        for layer in range(len(SHAPES)):
            rows = zip(self.committed[layer], self.pending[layer], paths, strict=True)
            self.committed[layer] = [old + [new[i] for i in path] for old, new, path in rows if path is not None]
            self.pending[layer] = [[] for _ in self.committed[layer]]

    def join(self, other: "Reference") -> None:
        """Take in the rows of another one."""
        for mine, theirs in ((self.committed, other.committed), (self.pending, other.pending)):
            for layer, rows in zip(mine, theirs, strict=True):
                layer += rows


def feed(cache: TreeCache, count: int, seed: int, reference: Reference | None = None) -> list[tuple[Tensor, Tensor]]:
    """Write `count` random slots a row into every layer as a pass does; return what attention would see."""
    generator = torch.Generator().manual_seed(seed)
    cache.stage([count] * cache.rows, count)
    seen = []
    with torch.inference_mode():
        for layer, (heads, *dims) in enumerate(SHAPES):
            keys, values = (torch.randn(cache.rows, heads, count, dim, generator=generator) for dim in dims)
            seen.append(cache.update(keys, values, layer))
            if reference is not None:
                reference.append(layer, keys, values)
    return seen


def assert_same(cache: TreeCache, reference: Reference, seen: Sequence[tuple[Tensor, Tensor]] | None = None) -> None:
    """Compare committed slots (and the pending ones that `seen` shows) bit by bit with the reference."""
    for layer in range(len(SHAPES)):
        views = seen[layer] if seen else cache.layers[layer].buffers
        for row in range(cache.rows):
            slots = reference.committed[layer][row] + (reference.pending[layer][row] if seen else [])
            for view, part in zip(views, zip(*slots, strict=True), strict=False):
                assert torch.equal(view[row, :, : len(slots)], torch.stack(part, 1))


def pointers(cache: TreeCache) -> list[int]:
    return [buffer.data_ptr() for layer in cache.layers for buffer in layer.buffers]


@st.composite
def rounds(draw: st.DrawFn) -> tuple[int, list[tuple[list[int], list[list[int] | None]]]]:
    """Rows, and per round the counts of several passes and one path (or None) per surviving row."""
    rows = alive = draw(st.integers(1, 4))
    script = []
    for _ in range(draw(st.integers(1, 5))):
        counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        slots = st.lists(st.integers(0, sum(counts) - 1), unique=True).map(sorted)
        paths = [draw(slots if draw(st.integers(0, 5)) else st.none()) for _ in range(alive)]
        script.append((counts, paths))
        alive = sum(path is not None for path in paths)
        if not alive:
            break
    return rows, script


@settings(deadline=None, max_examples=150)
@given(rounds(), st.integers(1, 60), st.sampled_from([1, 2, len(SHAPES)]))
def test_rows_stay_bit_equal_to_a_plain_gather(
    script: tuple[int, list[tuple[list[int], list[list[int] | None]]]], capacity: int, uniform_layers: int
) -> None:
    rows, steps = script
    cache, reference = TreeCache(rows, capacity, 60, uniform_layers), Reference(rows)
    for number, (counts, paths) in enumerate(steps):
        for index, count in enumerate(counts):
            seen = feed(cache, count, 10 * number + index, reference)
            assert_same(cache, reference, seen)
            cache.check_integrity()
        before = pointers(cache)
        cache.keep(paths)
        reference.keep(paths)
        assert pointers(cache) == before
        assert cache.lengths == [len(row) for row in reference.committed[0]]
        assert cache.rows == len(cache.lengths)
        assert not any(cache.pending)
        assert_same(cache, reference)
        cache.check_integrity()


@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_different_sizes_write_padding_where_nobody_looks(turned: bool) -> None:
    """Behind their own slots, even beyond the maximum, and the next pass writes there again."""
    cache, reference, sizes = TreeCache(2, 4, max_capacity=5), Reference(2), [(3, 1), (1, 3), (1, 0)]
    for seed, (first, second) in enumerate(sizes):
        width, generator = max(first, second), torch.Generator().manual_seed(seed)
        turn = [width - first, width - second] if turned else ()
        cache.stage([first, second], width, turn)
        for layer, (heads, *dims) in enumerate(SHAPES):
            keys, values = (torch.randn(2, heads, width, dim, generator=generator) for dim in dims)
            with torch.inference_mode():
                cache.update(keys, values, layer)
            for row, (size, begin) in enumerate(zip((first, second), turn or (0, 0), strict=True)):
                part = slice(begin, begin + size)
                pairs = zip(keys[row, :, part].unbind(1), values[row, :, part].unbind(1), strict=True)
                reference.pending[layer][row] += pairs
    assert cache.pending == [5, 4]
    cache.check_integrity()
    cache.keep([(0, 3, 4), (0, 1, 2, 3)])
    reference.keep([(0, 3, 4), (0, 1, 2, 3)])
    assert_same(cache, reference)
    with pytest.raises(CacheError, match="6 cache slots but the maximum is 5"):
        cache.stage([3, 0], 3)


def test_one_row_keeps_every_kind_of_path() -> None:
    cache, reference = TreeCache(1, 64), Reference(1)
    for seed, path in enumerate(MOVES):
        feed(cache, 6, seed, reference)
        cache.keep([path])
        reference.keep([path])
        assert_same(cache, reference)


def test_rows_that_stay_equal_and_rows_that_differ_are_written_alike() -> None:
    cache, reference = TreeCache(3, 32), Reference(3)
    script: list[list[tuple[int, ...]]] = [[(0, 2)] * 3, [(0, 2), (1,), ()], [(3,), (0,), (1, 2)], [(), (), (0,)]]
    for seed, paths in enumerate(script):
        feed(cache, 4, seed, reference)
        cache.keep(paths)
        reference.keep(paths)
        assert_same(cache, reference)


def test_all_rows_can_retire() -> None:
    cache = TreeCache(2, 8)
    feed(cache, 3, 0)
    cache.keep([None, None])
    cache.check_integrity()
    assert (cache.rows, cache.lengths, cache.get_seq_length()) == (0, [], 0)


def test_layers_of_one_shape_lie_side_by_side() -> None:
    cache = TreeCache(2, 8, uniform_layers=3)
    cache.stage([2] * cache.rows, 2)
    with torch.inference_mode():
        for layer in range(3):
            cache.update(torch.ones(2, 1, 2, 4), torch.ones(2, 1, 2, 4), layer)
    assert [len(stacks) for stacks in cache.stacks] == [1, 1]
    assert cache.nbytes == 3 * 2 * 2 * 8 * 4 * 4


def test_nothing_moves_below_capacity_and_doubling_copies_everything() -> None:
    cache, reference = TreeCache(2, 8, max_capacity=20), Reference(2)
    feed(cache, 4, 0, reference)
    before = pointers(cache)
    for paths in ([(0, 3), (1,)], [(2,), (0, 1)]):
        cache.keep(paths)
        reference.keep(paths)
        feed(cache, 3, 1, reference)
        assert pointers(cache) == before
        assert cache.capacity == 8
    feed(cache, 5, 2, reference)  # 3 committed + 3 + 5 pending > 8
    assert cache.capacity == 16
    assert all(new != old for new, old in zip(pointers(cache), before, strict=True))
    seen = feed(cache, 6, 3, reference)  # 17: twice 16 is more than the maximum
    assert cache.capacity == 20
    assert_same(cache, reference, seen)
    cache.check_integrity()


def test_a_cache_is_small_again_when_long_rows_have_left() -> None:
    """As others join.  What the rows hold is the same, bit by bit, and nothing moves while a row needs the room.

    The first that joins makes room for four times the rows.
    """
    cache, reference = TreeCache(2, 8, 200), Reference(2)
    feed(cache, 5, 1, reference)
    for owner in (cache, reference):
        owner.keep([range(5), range(3)])
    small, sizes = cache.nbytes, []
    for length, leaves in ((40, False), (6, True), (7, False)):
        other, more = TreeCache(1, length, 200), Reference(1)
        feed(other, length, length, more)
        for owner in (other, more):
            owner.keep([range(length)])
        cache.join(other)
        reference.join(more)
        assert_same(cache, reference)
        sizes.append((cache.capacity, cache.nbytes))
        feed(cache, 1, length, reference)
        for owner in (cache, reference):
            owner.keep([(0,), (0,), None, (0,)] if leaves else [(0,)] * len(reference.pending[0]))
        cache.check_integrity()
        assert_same(cache, reference)
    assert [capacity for capacity, _ in sizes] == [40, 80, 8]
    assert sizes[-1][1] == 4 * small
    assert sizes[0][1] > 5 * small


def test_a_cache_that_moves_as_others_join_has_room_for_them() -> None:
    """It is copied anyway; where their rows fit, nothing moves before the room is needed."""
    cache = TreeCache(1, 8, 200)
    feed(cache, 5, 1)
    cache.keep([range(5)])
    for room, capacity in ((30, 30), (60, 30)):
        other = TreeCache(1, 6, 200)
        other.first_capacity = room
        feed(other, 6, room)
        other.keep([range(6)])
        cache.join(other)
        assert cache.capacity == capacity
    before = pointers(cache)
    feed(cache, 24, 2)
    assert pointers(cache) == before
    feed(cache, 1, 3)
    assert cache.capacity == 60


def test_rows_that_a_graph_fed_beyond_the_batch_are_clean_when_others_join() -> None:
    """Masked slots count as 0 times their value, so no number that is none may stay there."""
    caches = [TreeCache(1, 8, 200, fixed=True) for _ in range(2)]
    for cache in caches:
        feed(cache, 5, 1)
        cache.keep([range(5)])
    mine, other = caches
    mine.make_rows(2)
    for stack in (*mine.stacks[0], *mine.stacks[1]):
        stack.data[:, 1] = torch.nan
    mine.join(other)
    assert mine.lengths == [5, 5]
    for stack in (*mine.stacks[0], *mine.stacks[1]):
        assert torch.equal(stack.data[:, 1], stack.data[:, 0])
        assert not stack.data[:, 1, :, 5:].any()


def test_capacity_grows_to_what_one_pass_needs() -> None:
    cache = TreeCache(1, 4, max_capacity=100)
    feed(cache, 30, 0)
    assert cache.capacity == 30


def test_beyond_the_maximum_is_an_error_that_changes_nothing() -> None:
    cache, reference = TreeCache(2, 4, max_capacity=10), Reference(2)
    feed(cache, 6, 0, reference)
    cache.keep([(0, 2, 4, 5), (1,)])
    reference.keep([(0, 2, 4, 5), (1,)])
    state = (cache.lengths, cache.pending, cache.capacity)
    with pytest.raises(CacheError, match="11 cache slots but the maximum is 10"):
        cache.stage([7] * cache.rows, 7)
    assert (cache.lengths, cache.pending, cache.capacity) == state
    assert_same(cache, reference)
    feed(cache, 6, 1)  # 4 + 6 fit exactly
    cache.check_integrity()


def test_without_a_maximum_the_capacity_is_the_maximum() -> None:
    cache = TreeCache(1, 4)
    assert cache.max_capacity == 4
    with pytest.raises(CacheError):
        cache.stage([5] * cache.rows, 5)


@pytest.mark.parametrize(("rows", "capacity"), [(0, 4), (-1, 4), (2, 0)])
def test_an_empty_cache_is_refused(rows: int, capacity: int) -> None:
    with pytest.raises(CacheError, match="at least one row and one slot"):
        TreeCache(rows, capacity)


@pytest.mark.parametrize("path", [(1, 0), (0, 0), (-1,), (0, 3), (3,), (2, 1, 2)])
def test_bad_paths_are_refused_and_change_nothing(path: tuple[int, ...]) -> None:
    cache, reference = TreeCache(2, 8), Reference(2)
    feed(cache, 3, 0, reference)
    before = [buffer.clone() for layer in cache.layers for buffer in layer.buffers]
    with pytest.raises(CacheError, match="row 1"):
        cache.keep([(0, 2), path])
    after = [buffer for layer in cache.layers for buffer in layer.buffers]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert (cache.lengths, cache.pending) == ([0, 0], [3, 3])


@pytest.mark.parametrize("paths", [[], [(0,)], [(0,), (0,), None]])
def test_one_path_a_row_is_needed(paths: list[tuple[int, ...] | None]) -> None:
    cache = TreeCache(2, 8)
    feed(cache, 3, 0)
    with pytest.raises(CacheError, match="one path"):
        cache.keep(paths)


def shrink_buffer(cache: TreeCache) -> None:
    cache.layers[1].values = cache.layers[1].buffers[1][:, :, :-1]


def drop_row(cache: TreeCache) -> None:
    cache.layers[2].keys = cache.layers[2].buffers[0][:1]


TAMPERINGS: dict[str, tuple[Callable[[TreeCache], Any], str]] = {
    "a length too many": (lambda cache: cache.lengths.append(0), "2 rows but lengths"),
    "a negative length": (lambda cache: cache.lengths.__setitem__(0, -1), "2 rows but lengths"),
    "negative pending slots": (lambda cache: setattr(cache, "pending", [0, -1]), r"-1\] pending"),
    "more used than there is": (lambda cache: cache.lengths.__setitem__(1, 99), "99 slots in use"),
    "pending beyond capacity": (lambda cache: setattr(cache, "pending", [8, 0]), "slots in use, capacity 8"),
    "another capacity than that of buffers": (lambda cache: setattr(cache, "capacity", 9), "expected 2\\+ rows of 9"),
    "beyond the maximum": (lambda cache: setattr(cache, "max_capacity", 1), "maximum 1"),
    "a short buffer": (shrink_buffer, "layer 1 holds"),
    "a missing row": (drop_row, "layer 2 holds"),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_integrity_notices_tampering(name: str) -> None:
    tamper, message = TAMPERINGS[name]
    cache = TreeCache(2, 8)
    feed(cache, 3, 0)
    cache.keep([(0, 2), (1,)])
    cache.check_integrity()
    tamper(cache)
    with pytest.raises(CacheError, match=message):
        cache.check_integrity()


@pytest.mark.parametrize("uniform_layers", [1, 3])  # so many have the first one's shape
def test_bytes_are_as_stated(uniform_layers: int) -> None:
    cache = TreeCache(3, 10, max_capacity=40, uniform_layers=uniform_layers)
    assert cache.nbytes == 0
    feed(cache, 2, 0)
    assert cache.nbytes == 4 * 3 * 10 * sum(heads * (key + value) for heads, key, value in SHAPES)
    feed(cache, 10, 0)
    assert cache.nbytes == 4 * 3 * 20 * sum(heads * (key + value) for heads, key, value in SHAPES)


def test_free_slots_are_zero_before_and_after_growth() -> None:
    for _ in range(20):  # memory that is likely to be handed out again
        torch.full((2, 2, 16, 3), float("nan"))
    cache = TreeCache(2, 16, max_capacity=64)
    feed(cache, 3, 0)
    cache.keep([(0, 1), None])
    feed(cache, 40, 1)
    for layer in cache.layers:
        for buffer in layer.buffers:
            assert torch.isfinite(buffer).all()
            assert (buffer[:, :, 42:] == 0).all()


def test_two_hundred_rounds_leave_memory_as_it_was() -> None:
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    cache = TreeCache(2, 512)
    for seed in range(200):
        feed(cache, 5, seed)
        cache.keep([(0, 3), (1, 2)] if seed % 2 else [(4,), (0, 2, 4)])
        if seed == 9:
            before = (tensors(), cache.nbytes, pointers(cache))
    assert (tensors(), cache.nbytes, pointers(cache)) == before
    cache.check_integrity()


def test_transformers_reads_lengths_and_sizes() -> None:
    cache = TreeCache(2, 16, max_capacity=32)
    feed(cache, 5, 0)
    cache.keep([(0, 1, 2), (0,)])
    assert cache.get_seq_length() == 3
    assert cache.layers[0].get_max_length() == 32
    cache.stage([4] * cache.rows, 4)
    assert cache.layers[0].get_mask_sizes(4) == (7, 0)
