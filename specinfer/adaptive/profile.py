"""What adaptive trees have learnt: shared by texts, saved as JSON, and read back.

Knows: costs and acceptance, field by field.  Does not know: how they are learnt, or what is decided by them.
"""

from collections import defaultdict
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any

from specinfer.adaptive.acceptance import DEPTHS, Acceptance, Rate
from specinfer.adaptive.cost_model import Costs, Seconds
from specinfer.common.files import parse_json
from specinfer.errors import InputError
from specinfer.tree.token_tree import MOST_DRAFTS

KIND, VERSION = "what adaptive trees learnt", 2
MOST = 1e9  # no count and no number of seconds is larger
ADVICE = "save a new one with Auto.save, or leave the profile out"


class Damaged(Exception):
    """A field of a profile is damaged; the text says which and why."""


class Profile:
    """What is learnt about a machine, a target and its drafts.

    Attributes:
        drafts: how many there are.
        costs: what steps cost.
        acceptance: which tokens are accepted, greedy (False) and coupled (True).
        idle: by draft and number of binary digits of the rows, for drafts that are idle among many rows, how many steps
            they were, and how many they wait; it is not saved.
    """

    def __init__(self) -> None:
        self.drafts, self.costs = 0, Costs()
        self.acceptance: defaultdict[bool, Acceptance] = defaultdict(Acceptance)
        self.idle: dict[tuple[int, int], tuple[int, int]] = {}

    def to_json(self) -> dict[str, Any]:
        """Return it JSON-ready; `read` takes it back."""
        costs = self.costs
        return {
            "kind": KIND,
            "version": VERSION,
            "drafts": self.drafts,
            "trees": [costs.trees.base, costs.trees.slope],
            "plain": [
                [rows, plain.value, costs.tokens.get(rows, 0.0), costs.spent.get(rows, 0.0)]
                for rows, plain in costs.plain.items()
            ],
            "levels": [[draft, level.value] for draft, level in costs.levels.items()],
            "accepted": [
                [int(coupled), kind, *key, rate.accepted, rate.expected]
                for coupled, learnt in self.acceptance.items()
                for kind, rates in enumerate((learnt.edges, learnt.families))
                for key, rate in rates.items()
            ],
        }

    @classmethod
    def read(cls, profile: dict[str, Any] | str | PathLike[str]) -> "Profile":
        """Return a profile from its JSON, or from the file at a path.

        Raises:
            InputError: the file cannot be read; or it is no profile, of another version, or damaged: says where.
        """
        if not isinstance(profile, dict):
            try:
                found = parse_json(Path(profile).read_text(encoding="utf-8"))
            except (OSError, ValueError, TypeError) as error:
                raise InputError(f"cannot read the profile {profile!s:.200} ({error!s:.100}): {ADVICE}") from None
            profile = found if isinstance(found, dict) else {}
        try:
            return cls._restored(profile)
        except (Damaged, RecursionError) as error:
            raise InputError(f"this profile cannot be used ({error!s:.120}): {ADVICE}") from None

    @classmethod
    def _restored(cls, profile: dict[str, Any]) -> "Profile":
        version = profile.get("version")
        if profile.get("kind") != KIND or version != VERSION or isinstance(version, bool):
            raise Damaged(f"it does not say that it is {KIND!r}, version {VERSION}")
        learnt = cls()
        learnt.drafts = _count(profile.get("drafts"), "drafts", MOST_DRAFTS)
        trees = learnt.costs.trees
        ((trees.base, trees.slope),) = _rows([profile.get("trees")], "trees", 2)
        trees.count, trees.largest, learnt.costs.cheap = 3, inf, inf  # the line is given, for all sizes
        for rows, plain, tokens, spent in _rows(profile.get("plain"), "plain", 4):
            batch = _count(rows, "plain", MOST)
            learnt.costs.plain[batch] = _average(plain)
            learnt.costs.tokens[batch], learnt.costs.spent[batch] = tokens, spent
        if not learnt.costs.plain:
            raise Damaged("'plain' is empty")
        for draft, level in _rows(profile.get("levels"), "levels", 2):
            learnt.costs.levels[_count(draft, "levels", max(learnt.drafts - 1, 0))] = _average(level)
        for coupled, kind, who, depth, accepted, expected in _rows(profile.get("accepted"), "accepted", 6):
            found = learnt.acceptance[bool(_count(coupled, "accepted", 1))]
            rates = found.families if _count(kind, "accepted", 1) else found.edges
            rate = rates[_count(who, "accepted", 2**learnt.drafts), _count(depth, "accepted", DEPTHS)] = Rate()
            rate.accepted, rate.expected = accepted, max(expected, 1e-9)
        return learnt


def _average(value: float) -> Seconds:
    average = Seconds()
    average.add(value)
    return average


def _count(value: Any, name: str, most: float) -> int:
    """Return a whole number within its bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most or value != int(value):
        raise Damaged(f"{name!r} has something else than whole numbers from 0 to {most:g}")
    return int(value)


def _rows(value: Any, name: str, width: int) -> list[list[Any]]:
    """Return a list of lists of that length, of finite numbers that are not negative."""
    if not isinstance(value, list):
        raise Damaged(f"{name!r} is no list")
    for row in value:
        if not isinstance(row, list) or len(row) != width:
            raise Damaged(f"{name!r} has an entry that is no list of {width}")
        for number in row:
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= MOST:
                raise Damaged(f"{name!r} has something else than numbers from 0 to {MOST:g}")
    return list(value)
