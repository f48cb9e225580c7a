"""A folder of settings and of records, JSON lines that a killed run continues.

Knows: how a line gets to the disk, what a cut-off line looks like.  Does not know: what is recorded.

The folder holds ``settings.json`` and ``records.jsonl``.
"""

import json
import logging
import os
from collections.abc import Set
from pathlib import Path
from typing import Any

from specinfer.common.files import lock_settings, parse_json, read_json, storing
from specinfer.errors import InputError

log = logging.getLogger(__name__)

SETTINGS, RECORDS = "settings.json", "records.jsonl"


class Records:
    """The records of one folder.

    Args:
        folder: whose they are.
        fields: that every record has.
        what: they are of, in messages: "a comparison".
    """

    def __init__(self, folder: Path, fields: Set[str], what: str) -> None:
        self.folder, self.fields, self.what = folder, fields, what
        self.path = folder / RECORDS

    def read(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return settings and records.  A last line that was cut off is left out, with a warning.

        Raises:
            InputError: the folder cannot be read, or holds no records.
        """
        settings = read_json(self.folder / SETTINGS)
        records, _ = self._parse()
        if not isinstance(settings, dict) or not settings or not records:
            raise InputError(f"{self.folder} holds no records of {self.what}: run one into it first")
        return settings, records

    def begin(self, settings: dict[str, Any]) -> list[dict[str, Any]]:
        """Begin the folder, or check that it may be continued.  Return its records, and drop a line that was cut off.

        The caller holds the folder (`locked`) until it has appended its last record.

        Raises:
            InputError: the folder cannot be written, or holds records of other settings, or without settings.
        """
        if os.path.exists(self.path) and not os.path.exists(self.folder / SETTINGS):
            beside = f"{SETTINGS} is missing beside it"
            raise InputError(f"{self.path} is not {self.what}'s ({beside}): choose another folder")
        records, size = self._parse()
        lock_settings(self.folder / SETTINGS, settings, "repeat those, or choose another folder", empty=not records)
        with storing(self.path), self.path.open("a") as file:
            if file.tell() > size:
                file.truncate(size)
        return records

    def append(self, record: dict[str, Any]) -> None:
        """Write one record so that it is on the disk when this returns.

        Raises:
            SpecinferError: for example, the disk is full.
        """
        with storing(self.path), self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _parse(self) -> tuple[list[dict[str, Any]], int]:
        """Return the records, if there are any, and the number of bytes before a line that was cut off."""
        try:
            lines = self.path.read_bytes().splitlines(keepends=True) if os.path.exists(self.path) else []
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}") from error
        parsed = [self._parse_line(line) for line in lines]
        cut = bool(lines) and not lines[-1].endswith(b"\n")
        if None in parsed[: len(parsed) - cut]:
            where = f"{self.path}, line {parsed.index(None) + 1}"
            raise InputError(f"{where} is damaged, and was not cut off: remove that line")
        if cut:
            log.warning("%s: the last line was cut off, and counts as not there", self.path)
            lines.pop()
        return [record for record in parsed if record], sum(map(len, lines))

    def _parse_line(self, line: bytes) -> dict[str, Any] | None:
        """Return a complete line's record, None for any other line."""
        try:
            row = parse_json(line) if line.endswith(b"\n") else None
        except ValueError:
            return None
        return row if isinstance(row, dict) and row.keys() >= self.fields else None
