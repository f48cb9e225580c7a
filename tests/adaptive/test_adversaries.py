"""Drafts made to be rejected: whatever they do, `auto` is hardly slower than plain decoding (docs/auto.md)."""

from itertools import count

import numpy as np
import pytest
from world import GOOD, World

from specinfer.adaptive.experience import ALLOWANCE, REMEMBERED, STAKE

TOKENS = 512
RIGHT = np.log([0.96, *[0.01] * 4, *[1e-9] * 5])  # the target's token is 0
WRONG = RIGHT[::-1].copy()
SIZES = (1, 2, 4, 8, 16, 24, 32, 1000)  # tokens of a pass, and its milliseconds: docs/performance.md, 135M, bfloat16
FETCHES = (12.7, 12.6, 12.8, 13.3, 15.2, 17.9, 19.9, 262.0)
MULTIPLIES = [6 + 1.7 * size for size in SIZES]  # where every token of a pass costs
MACHINES = {"fetches": FETCHES, "multiplies": MULTIPLIES}


class Sure(World):
    """A target that is greedy, with an adversary: whether drafts are right in the next step."""

    def __init__(self, machine, rows=1, drafts=1):
        super().__init__([WRONG] * drafts, lambda n: np.interp(rows * (n + 1), SIZES, machine) / 1e3, 0.003, rows)

    def verify(self, tree):
        """Return accepted nodes and emitted tokens."""
        node, path = tree.child(0, 0), []
        while node is not None:
            path.append(node)
            node = tree.child(node, 0)
        return path, [0] * (len(path) + 1)

    def loss(self, adversary):
        """Return what a text cost beyond plain decoding, in its seconds; below 0 it was faster."""
        emitted, started = self.rows * TOKENS, len(self.emitted)
        self.policy.start(len(self.distributions), coupled=False, rows=self.rows)
        while sum(self.emitted[started:]) < emitted:
            self.distributions = [RIGHT if adversary(self) else WRONG] * len(self.distributions)
            self.run(1)
        plain = self.target(0) * sum(self.emitted[started:]) / self.rows
        return sum(self.seconds[started:]) / plain - 1


def never(world):
    """Sure of itself, and always wrong."""
    return False


def until_trusted(steps):
    """Right until it was asked so many times, then wrong until it is idle, and so on."""
    state = {"right": 0}

    def adversary(world):
        (record, *_) = world.policy.records
        state["right"] = 0 if record.idle else state["right"] + 1
        return state["right"] <= steps

    return adversary


def in_turns(right, wrong):
    """Right so many steps of those that ask, then wrong so many."""
    steps = count()
    return lambda world: next(steps) % (right + wrong) < right if world.policy.asked else True


ADVERSARIES = {
    "never right": lambda: never,
    "until trusted": lambda: until_trusted(2),
    "until it is large": lambda: until_trusted(8),
    "1 of 3": lambda: in_turns(1, 2),
    "1 of 9": lambda: in_turns(1, 8),
    "4 of 24": lambda: in_turns(4, 20),
}


@pytest.mark.parametrize(("machine", "rows", "adversary"), [
    (machine, rows, adversary)
    for turn, adversary in enumerate(ADVERSARIES)
    for machine, rows in zip([*MACHINES, *MACHINES][turn % 2 :], (1, 4, 16), strict=False)
])  # fmt: skip
def test_no_draft_makes_decoding_slower_by_more_than_3_percent(machine, rows, adversary):
    """In the first text of a decoder, which knows no costs yet, and in later ones."""
    world = Sure(MACHINES[machine], rows)
    assert world.loss(ADVERSARIES[adversary]()) < 0.03
    assert world.loss(ADVERSARIES[adversary]()) < 0.02


def test_several_drafts_lose_no_more_than_one():
    losses = [Sure(FETCHES, drafts=drafts).loss(never) for drafts in (1, 3)]
    assert losses[1] < 0.03
    assert losses[1] < 1.5 * losses[0]


@pytest.mark.parametrize("rows", [1, 16])
def test_the_bound_of_the_docs_holds(rows):
    """Of a text after the first one, but for its dearest step: a stake and the allowance, over the root of the rows."""
    world = Sure(MULTIPLIES, rows)
    world.loss(never)
    known, before = world.policy.learnt.records.get((1, rows.bit_length())), len(world.seconds)
    stake = STAKE[1] if known is None else max(0.0, known[0].credit)
    lost = TOKENS * world.loss(never)
    allowed = ALLOWANCE * (REMEMBERED**0.5 + (TOKENS - REMEMBERED) / (2 * REMEMBERED**0.5))
    dearest = max(world.seconds[before:]) / world.target(0) - 1
    assert 0 < lost <= (stake + allowed) / rows**0.5 + dearest


def test_rows_that_come_and_go_give_no_new_stakes():
    """In a server, the number of rows changes all the time."""
    world = Sure(FETCHES, 2)
    asked = []
    for step in range(600):
        world.rows = 1 + step // 4 % 2
        asked.append(world.run(1).asked(0, 1))
    assert sum(asked[300:]) < 20


@pytest.mark.parametrize(("machine", "rows"), [
    *(("fetches", rows) for rows in (1, 2, 4, 8, 16, 32)), *(("multiplies", rows) for rows in (1, 8, 32)),
])  # fmt: skip
def test_no_number_of_rows_is_slower_than_plain_decoding(machine, rows):
    """With a draft that knows the target's distribution; up to 8 rows it is faster where weights are fetched."""
    milliseconds = MACHINES[machine]
    world = World([GOOD], lambda n: np.interp(rows * (n + 1), SIZES, milliseconds) / 1e3, 0.003, rows).run(TOKENS)
    assert world.speed(TOKENS) > 0.97  # no cost is known yet
    assert world.run(TOKENS).speed(TOKENS) > 0.99
    if machine == "fetches" and rows <= 8:
        assert world.speed(TOKENS) > 1.1
