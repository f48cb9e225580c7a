"""Prompt files, and the records of a comparison, one per prompt and temperature.

Knows: splits, the fields of a record.  Does not know: what is measured, how records are kept.
"""

from pathlib import Path

from specinfer.common.records import Records
from specinfer.errors import InputError
from specinfer.prompts import OnePrompt, read_objects

FIELDS = {"set", "place", "temperature"}  # of every record


def records_of(folder: Path) -> Records:
    """Return the records of a comparison's folder."""
    return Records(folder, FIELDS, "a comparison")


def read_prompt_file(path: Path, split: str, count: int = 0) -> list[tuple[str, OnePrompt]]:
    """Return (id, prompt) of a file's first rows that belong to a split, or have none.

    Whether a prompt can be used is found when it is its turn.

    Args:
        path: of JSON lines.
        split: rows of other splits are left out.
        count: rows at most; 0 is all.

    Raises:
        InputError: the file cannot be read, a line is no object, or no row is left.
    """
    rows = [
        (str(row.get("id", number)), row.get("prompt", ""))
        for number, row in read_objects(path)
        if row.get("split", split) == split
    ]
    if not rows:
        raise InputError(f"{path} holds no prompts of split {split!r}: choose another --split or file")
    return rows[: count or None]
