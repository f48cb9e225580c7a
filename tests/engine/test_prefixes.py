"""Prefixes: what is found is what a search through all of them finds."""

from concurrent.futures import ThreadPoolExecutor
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from specinfer.engine.prefixes import LEAST, Cached, Prefix, Prefixes

KEYS = ("one", False), ("other", True)
CACHE = SimpleNamespace(nbytes=8)


def ids_of(random: Random) -> np.ndarray:
    """Return ids that often begin alike: blocks of a few kinds, cut anywhere; large ones and 0 among them."""
    blocks = [random.choice([0, 1, 255, 256, 2**31]) for _ in range(random.randint(1, 5))]
    ids = [token for block in blocks for token in [block] * LEAST]
    return np.array(ids[: random.randint(1, len(ids))], np.int64)


def drawn(random: Random) -> Prefix:
    """Return a prefix, some of which a draft has read."""
    ids = ids_of(random)
    drafts = [Cached(ids[: random.randint(0, len(ids))], CACHE, owner="draft")] * random.randint(0, 1)
    return Prefix(random.choice(KEYS), [Cached(ids, CACHE), *drafts], first=random.choice([0, len(ids)]))


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_is_found_among_neighbours(seed: int) -> None:
    """And those that a prefix replaces, and one that replaces it, as prefixes come and go."""
    random, prefixes, held = Random(seed), Prefixes(), list[Prefix]()
    for _ in range(60):
        prefix = drawn(random)
        assert {*prefixes.replaced(prefix)} == {each for each in held if prefix.replaces(each)}
        found = prefixes.replacing(prefix)
        assert (found is not None) == any(each.replaces(prefix) for each in held)
        assert found is None or found.replaces(prefix)
        prefixes.add(prefix)
        held.append(prefix)
        if random.random() < 0.3:
            prefixes.remove(held.pop(random.randrange(len(held))))
        for owners in ([], ["draft"]):
            key, ids = random.choice(KEYS), ids_of(random)
            lengths = [each.reach(each.caches[0].common(ids), owners) for each in held if each.key == key]
            found, length = prefixes.longest(key, ids, owners)
            assert length == max([0, *(length for length in lengths if length >= LEAST)])
            assert (
                found is None
                if not length
                else found.key == key and found.reach(found.caches[0].common(ids), owners) == length
            )
    assert [*prefixes] == held
    assert len(prefixes) == len(held)


def test_the_least_recently_used_comes_first() -> None:
    random, prefixes = Random(0), Prefixes()
    held = [drawn(random) for _ in range(3)]
    for prefix in held:
        prefixes.add(prefix)
    prefixes.use(held[0])
    prefixes.use(drawn(random))  # another store's
    assert [*prefixes] == [held[1], held[2], held[0]]


def test_a_text_is_compared_with_few_of_many() -> None:
    """Thousands begin alike, as with a system prompt: the nearest two are enough."""
    compared = 0

    class Counted(Cached):
        """Counts comparisons."""

        def common(self, ids: np.ndarray) -> int:
            nonlocal compared
            compared += 1
            return super().common(ids)

    prefixes, system = Prefixes(), [*range(LEAST)]
    for number in range(2000):
        ids = np.array([*system, number % 50, number], np.int64)
        prefixes.add(Prefix(KEYS[0], [Counted(ids, CACHE)]))
    new = Prefix(KEYS[0], [Cached(np.array([*system, 7, 5000], np.int64), CACHE)])
    assert prefixes.longest(KEYS[0], new.ids)[1] == LEAST + 1
    assert prefixes.replacing(new) is None
    assert not prefixes.replaced(new)
    assert compared < 20


def test_threads_share_them() -> None:
    """Each finds its own while others add and drop theirs, and one is dropped by two."""

    def come_and_go(seed: int) -> None:
        random = Random(seed)
        for _ in range(100):
            prefix = drawn(random)
            prefixes.add(prefix)
            assert prefixes.longest(prefix.key, prefix.ids).length == len(prefix.ids) or len(prefix.ids) < LEAST
            assert sum(each.nbytes for each in prefixes) >= CACHE.nbytes
            for each in (prefix, shared.pop() if shared and random.random() < 0.3 else prefix):
                prefixes.remove(each)

    prefixes, shared = Prefixes(), [drawn(Random(9)) for _ in range(50)]
    for each in shared:
        prefixes.add(each)
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(come_and_go, range(8)):
            pass
    assert {*prefixes} == {*shared}
