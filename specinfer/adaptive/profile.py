"""What adaptive trees have learnt: shared by texts, saved as JSON, and read back.

Knows: costs and acceptance, field by field.  Does not know: how they are learnt, what is decided from them.
"""

from collections import defaultdict
from math import inf
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, MsgspecError, Struct, convert, json

from specinfer.adaptive.experience import DEPTHS, Acceptance, Costs, DraftRecord, Rate, Seconds
from specinfer.common.values import plain
from specinfer.errors import InputError
from specinfer.tree.token_tree import MOST_DRAFTS

KIND, VERSION = "what adaptive trees learnt", 3
MOST = 1_000_000_000  # no count and no number of seconds is larger
Number = Annotated[float, Meta(ge=0, le=MOST)]
Count = Annotated[int, Meta(ge=0, le=MOST)]
Flag = Annotated[int, Meta(ge=0, le=1)]
Depth = Annotated[int, Meta(ge=0, le=DEPTHS)]
ADVICE = "save a new one with Auto.save, or leave the profile out"


class Saved(Struct):
    """A profile as JSON: see `Profile.to_json`."""

    kind: str
    version: int
    drafts: Annotated[int, Meta(ge=0, le=MOST_DRAFTS)]
    trees: tuple[Number, Number]
    plain: Annotated[list[tuple[Count, Number, Number]], Meta(min_length=1)]
    levels: list[tuple[Count, Number]]
    accepted: list[tuple[Flag, Flag, Count, Depth, Number, Number]]


class Profile:
    """What is learnt about a machine, a target and its drafts.

    Attributes:
        drafts: how many there are.
        costs: what steps cost.
        acceptance: which tokens are accepted, greedy (False) and coupled (True).
        records: by number of drafts and of the rows' binary digits, what each draft gained among many rows; not saved.
    """

    def __init__(self) -> None:
        self.drafts, self.costs = 0, Costs()
        self.acceptance: defaultdict[bool, Acceptance] = defaultdict(Acceptance)
        self.records: dict[tuple[int, int], list[DraftRecord]] = {}

    def to_json(self) -> dict[str, Any]:
        """Return it JSON-ready; `read` takes it back."""
        costs = self.costs
        return {
            "kind": KIND,
            "version": VERSION,
            "drafts": self.drafts,
            "trees": [costs.trees.base, costs.trees.slope],
            "plain": [
                [rows, plain.value, costs.earned[rows].value if rows in costs.earned else 0.0]
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
        name = "this profile" if isinstance(profile, dict) else f"the profile {profile!s:.200}"
        try:
            if isinstance(profile, dict):
                return cls._restored(convert(plain(profile), Saved))
            return cls._restored(json.decode(Path(profile).read_bytes(), type=Saved))
        except (OSError, TypeError, ValueError, RecursionError, MsgspecError) as error:
            raise InputError(f"{name} cannot be used ({error!s:.120}): {ADVICE}") from None

    @classmethod
    def _restored(cls, saved: "Saved") -> "Profile":
        """Raise `ValueError` for another version, or for drafts that do not exist."""
        if (saved.kind, saved.version) != (KIND, VERSION):
            raise ValueError(f"it does not say that it is {KIND!r}, version {VERSION}")
        if any(draft >= saved.drafts for draft, _ in saved.levels):
            raise ValueError(f"levels names other drafts than the first {saved.drafts}")
        if any(who >= 2 << saved.drafts for _, _, who, *_ in saved.accepted):  # a grammar's id follows theirs
            raise ValueError(f"accepted names other drafts than the first {saved.drafts}")
        learnt = cls()
        learnt.drafts = saved.drafts
        trees = learnt.costs.trees
        trees.base, trees.slope = saved.trees
        trees.count, trees.largest = 3, inf  # the line is given, for all sizes
        for rows, seconds, earned in saved.plain:
            learnt.costs.plain[rows] = _average(seconds)
            learnt.costs.earn(rows, earned, seconds)
        for draft, level in saved.levels:
            learnt.costs.levels[draft] = _average(level)
        for coupled, kind, who, depth, accepted, expected in saved.accepted:
            found = learnt.acceptance[bool(coupled)]
            rate = (found.families if kind else found.edges)[who, depth] = Rate()
            rate.accepted, rate.expected = accepted, max(expected, 1e-9)
        return learnt


def _average(value: float) -> Seconds:
    average = Seconds()
    average.add(value)
    return average
