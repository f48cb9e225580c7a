"""Prompt files, and the folder of a comparison, which a killed run continues.

Knows: JSON lines, and what a cut-off line looks like.  Does not know: what is measured.

The folder holds ``settings.json``, and ``records.jsonl`` with a line per prompt and temperature.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from specinfer.common.files import lock_settings, parse_json, read_json, storing
from specinfer.errors import InputError
from specinfer.prompts import read_rows

log = logging.getLogger(__name__)

SETTINGS, RECORDS = "settings.json", "records.jsonl"
FIELDS = {"set", "place", "temperature", "methods", "skipped"}  # of every record


def read_prompt_file(path: Path, split: str, count: int | None = None) -> list[tuple[str, str]]:
    """Return (id, prompt) of a file's first rows that belong to a split, or have none.

    Args:
        path: of JSON lines.
        split: rows of other splits are left out.
        count: rows at most; None is all.

    Raises:
        InputError: the file cannot be read, a line is not what it should be, or no row is left.
    """
    rows = [
        (str(row.get("id", number)), row["prompt"])
        for number, row in read_rows(path)
        if row.get("split", split) == split
    ]
    if not rows:
        raise InputError(f"{path} holds no prompts of split {split!r}: choose another --split or file")
    return rows[:count]


def read_folder(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return settings and records.  A last line that was cut off is left out, with a warning.

    Raises:
        InputError: the folder cannot be read, or holds no comparison.
    """
    settings = read_json(folder / SETTINGS)
    records, _ = _parse(folder / RECORDS)
    if not isinstance(settings, dict) or not settings or not records:
        raise InputError(f"{folder} holds no records of a comparison: run one into it first")
    return settings, records


def begin(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Begin a folder, or check that it may be continued.  Return its records, and drop a line that was cut off.

    The caller holds the folder (`locked`) until it has appended its last record.

    Raises:
        InputError: the folder cannot be written, or holds records of other settings, or without settings.
    """
    path = folder / RECORDS
    if os.path.exists(path) and not os.path.exists(folder / SETTINGS):
        raise InputError(f"{path} is not a comparison's ({SETTINGS} is missing beside it): choose another folder")
    records, size = _parse(path)
    lock_settings(folder / SETTINGS, settings, "repeat those, or choose another folder", empty=not records)
    with storing(path), path.open("a") as file:
        if file.tell() > size:
            file.truncate(size)
    return records


def append(folder: Path, record: dict[str, Any]) -> None:
    """Write one record so that it is on the disk when this returns.

    Raises:
        SpecinferError: for example, the disk is full.
    """
    path = folder / RECORDS
    with storing(path), path.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _parse(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a file, if there is one, and the number of bytes before a line that was cut off."""
    try:
        lines = path.read_bytes().splitlines(keepends=True) if os.path.exists(path) else []
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    parsed = [_parse_line(line) for line in lines]
    cut = bool(lines) and not lines[-1].endswith(b"\n")
    if None in parsed[: len(parsed) - cut]:
        raise InputError(f"{path}, line {parsed.index(None) + 1} is damaged, and was not cut off: remove that line")
    if cut:
        log.warning("%s: the last line was cut off, and its prompt counts as not measured", path)
        lines.pop()
    return [record for record in parsed if record], sum(map(len, lines))


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """Return a complete line's record, None for any other line."""
    try:
        row = parse_json(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and row.keys() >= FIELDS else None
