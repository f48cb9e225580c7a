"""What adaptive trees have learnt, as JSON and back.

Knows: costs, calibration and ranks, field by field.  Does not know: how they are learnt, or what is chosen by them.
"""

from math import isfinite
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specinfer.adaptive.acceptance import DEPTHS, Calibration, Habits, Ranks
from specinfer.adaptive.cost_model import Hinge
from specinfer.common.files import parse_json
from specinfer.errors import InputError
from specinfer.tree.token_tree import MOST_DRAFTS

if TYPE_CHECKING:
    from specinfer.adaptive.policy import Auto

KIND, VERSION = "what adaptive trees learnt", 1
MOST = 1e9  # no count and no number of seconds is larger


class Damaged(Exception):
    """A field of a profile that is none; its text says which and why."""


def to_json(auto: "Auto") -> dict[str, Any]:
    """Return costs, calibration and ranks, JSON-ready."""
    lines = {draft: line for draft, line in auto.asking.items() if line.count}
    return {
        "kind": KIND,
        "version": VERSION,
        "drafts": auto.counts.drafts,
        "trees": _line(auto.line),
        "plain": [
            [rows, pace.plain.at(0), pace.tokens, pace.spent] for rows, pace in auto.paces.items() if pace.plain.count
        ],
        "levels": [[draft, *_line(line)] for draft, line in lines.items()],
        "learnt": [[coupled, *_habits(habits)] for coupled, habits in auto.learnt.items()],
    }


def read(profile: dict[str, Any] | str | PathLike[str]) -> dict[str, Any]:
    """Return a profile, from its file if it is a path.

    Raises:
        InputError: the file cannot be read, or is not JSON.
    """
    if isinstance(profile, dict):
        return profile
    try:
        found = parse_json(Path(profile).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"cannot read the profile {profile!s:.200} ({error!s:.100}): {ADVICE}") from None
    return found if isinstance(found, dict) else {}


ADVICE = "save a new one with Auto.save, or leave the profile out"


def restore(auto: "Auto", profile: dict[str, Any]) -> int:
    """Give an object without experience what a profile holds; return the number of drafts that it is for.

    Raises:
        InputError: it is no profile, of another version, or damaged: says where.
    """
    try:
        version = profile.get("version")
        if profile.get("kind") != KIND or version != VERSION or isinstance(version, bool):
            raise Damaged(f"it does not say that it is {KIND!r}, version {VERSION}")
        drafts = int(_number(profile.get("drafts"), "drafts", MOST_DRAFTS, whole=True))
        auto.line = _hinge(profile.get("trees"), "trees", auto.line)
        for rows, plain, tokens, spent in _rows(profile.get("plain"), "plain", 4):
            pace = auto.paces[int(_number(rows, "plain", MOST, whole=True))]
            pace.plain = _hinge([_number(plain, "plain", MOST), 0.0, 0], "plain", pace.plain)
            pace.tokens, pace.spent = _number(tokens, "plain", MOST), _number(spent, "plain", MOST)
        if not auto.paces:
            raise Damaged("'plain' is empty")
        for draft, *line in _rows(profile.get("levels"), "levels", 4):
            place = int(_number(draft, "levels", max(drafts - 1, 0), whole=True))
            auto.asking[place] = _hinge(line, "levels", auto.asking[place])
        for coupled, accepted, ranks in _rows(profile.get("learnt"), "learnt", 3):
            if not isinstance(coupled, bool):
                raise Damaged("'learnt' has something else than true or false")
            auto.learnt[coupled] = _restored(accepted, ranks, drafts)
    except (Damaged, RecursionError) as error:
        raise InputError(f"this profile cannot be used ({error!s:.120}): {ADVICE}") from None
    return drafts


def _line(line: Hinge) -> list[float]:
    return [line.level * line.base, line.level * line.slope, line.knee]


def _hinge(value: Any, name: str, line: Hinge) -> Hinge:
    """Give a line its base, slope and knee."""
    (numbers,) = _rows([value], name, 3)
    line.base, line.slope, knee = (_number(number, name, MOST) for number in numbers)
    line.knee, line.count = int(knee), 3
    return line


def _habits(habits: Habits) -> list[Any]:
    unit = habits.calibration.unit
    accepted = [
        [mask, depth, place, expected / unit, right / unit]
        for mask, own in habits.calibration.counts.items()
        for depth, bins in enumerate(own)
        for place, (expected, right) in enumerate(bins)
        if expected
    ]
    return [accepted, [[draft, ranks.counts, ranks.rates] for draft, ranks in habits.ranks.items()]]


def _restored(accepted: Any, ranks: Any, drafts: int) -> Habits:
    habits = Habits()
    bounds = ((1 << drafts) - 1, DEPTHS - 1, len(Calibration.CENTRES) - 1)
    for *place, expected, right in _rows(accepted, "accepted", 5):
        where = [int(_number(n, "accepted", most, whole=True)) for n, most in zip(place, bounds, strict=True)]
        figures = [_number(expected, "accepted", MOST), _number(right, "accepted", MOST)]
        habits.calibration.counts[where[0]][where[1]][where[2]] = figures
    for draft, counts, rates in _rows(ranks, "ranks", 3):
        rank = habits.ranks[int(_number(draft, "ranks", max(drafts - 1, 0), whole=True))]
        rank.counts = [int(_number(n, "ranks", MOST, least=1, whole=True)) for n in _list(counts, "ranks")]
        rank.rates = [[_number(n, "ranks", 1.0) for n in row] for row in _rows(rates, "ranks", Ranks.WIDTH)]
        if not len(rank.counts) == len(rank.rates) == DEPTHS:
            raise Damaged(f"'ranks' needs {DEPTHS} depths")
    return habits


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise Damaged(f"{name!r} is no list")
    return value


def _rows(value: Any, name: str, width: int) -> list[list[Any]]:
    """Return a list of lists of that length."""
    for row in _list(value, name):
        if not isinstance(row, list) or len(row) != width:
            raise Damaged(f"{name!r} has an entry that is no list of {width}")
    return list(value)


def _number(value: Any, name: str, most: float, least: float = 0, whole: bool = False) -> float:
    """Return a finite number within its bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise Damaged(f"{name!r} has something else than numbers from {least:g} to {most:g}")
    if not isfinite(value) or (whole and value != int(value)):
        raise Damaged(f"{name!r} has something else than whole numbers")
    return value
