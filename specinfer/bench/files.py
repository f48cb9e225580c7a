"""Prompt files, and the benchmark's own file, which a killed run continues.

Knows: JSON lines, what a cut-off line looks like.  Does not know: what is measured.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from specinfer.errors import InputError

log = logging.getLogger(__name__)


def read_prompts(path: Path, split: str) -> list[tuple[str, str]]:
    """Return (id, prompt) of a file's rows that belong to a split, or say none.

    Raises:
        InputError: the file cannot be read, a line is not what it should be, or nothing is left.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # text may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read prompts from {path}: {error}") from error
    rows = [
        (str(row.get("id", number)), row["prompt"])
        for number, line in enumerate(lines, 1)
        if line.strip() and (row := _prompt_row(path, number, line)).get("split", split) == split
    ]
    if not rows:
        raise InputError(f"{path} holds no prompts of split {split!r}: choose another --split or file")
    return rows


def _prompt_row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {number} is not JSON: {error}") from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError(f'{path}, line {number} has no "prompt" with text in it: each line must be an object with one')
    return row


def read_results(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return settings and records of a file; a last line that was cut off is left out, with a warning.

    Raises:
        InputError: the file cannot be read, or is no file of `bench`.
    """
    settings, records, _ = _parse(out)
    if not settings:
        raise InputError(f"{out} holds no results yet: run the benchmark first")
    return settings, records


def _parse(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Return settings ({} if the first line was cut off), records, and how many bytes of the file are whole."""
    try:
        lines = out.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise InputError(f"cannot read {out}: {error.strerror}") from error
    parsed = [_parse_line(line) for line in lines]
    first = parsed[0] if parsed else None
    cut_header = len(lines) == 1 and first is None and b'{"settings": '.startswith(lines[0][:13])
    if not cut_header and not (first and "settings" in first):
        raise InputError(f"{out} was not written by specinfer bench: choose another file")
    if None in parsed[:-1]:
        raise InputError(f"{out}, line {parsed.index(None) + 1} is damaged, and not the last: remove it")
    if parsed[-1] is None:
        log.warning("%s: the last line was cut off, and its prompt counts as not measured", out)
        lines.pop()
    settings, records = (first or {}).get("settings", {}), [record for record in parsed[1:] if record]
    return settings, records, sum(map(len, lines))


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """Return a whole line's object, None for any other line."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def begin(out: Path, settings: dict[str, Any]) -> set[tuple[str, int, float]]:
    """Begin the file, or check that it may be continued and drop a last line that was cut off.

    Returns:
        What is done: (set, place, temperature).

    Raises:
        InputError: the file cannot be written, is no file of `bench`, or holds a run with other settings.
    """
    found, records, whole = _parse(out) if out.exists() and out.stat().st_size else ({}, [], 0)
    different = [name for name in {**found, **settings} if found and found.get(name) != settings.get(name)]
    if different:
        told = "; ".join(f"{name} was {found.get(name)}, is {settings.get(name)}" for name in different)
        raise InputError(f"{out} holds a run with other settings ({told}): repeat those, or choose another file")
    with opened(out) as file:
        file.truncate(whole)
        if not found:
            append(file, {"settings": settings})
    return {(record["set"], record["place"], record["temperature"]) for record in records}


def opened(out: Path) -> Any:
    """Open a file to append to.

    Raises:
        InputError: it cannot be written.
    """
    try:
        return out.open("a")
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from error


def append(file: Any, row: dict[str, Any]) -> None:
    """Write one line so that it is on the disk when this returns.

    Raises:
        InputError: the disk is full, say.
    """
    try:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise InputError(
            f"cannot write {file.name}: {error.strerror}; it keeps what was finished, and the same command goes on"
        ) from error
