"""A folder of settings and of records, JSON lines from which an interrupted run resumes.

Knows: how a line gets to the disk, what a cut-off line looks like.  Does not know: what is recorded.

The folder holds ``settings.json`` and ``records.jsonl``.
"""

import json
import logging
import os
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, TypeAlias

from specinfer.common.files import lock_settings, parse_json, read_json, storing
from specinfer.errors import InputError

log = logging.getLogger(__name__)

Record: TypeAlias = dict[str, Any]  # an object of JSON: settings, a line, or a part of either
SETTINGS, RECORDS = "settings.json", "records.jsonl"
FINISHED = [f"{inside}{name}" for inside in ("", "*/", "*/*/") for name in (RECORDS, "*.safetensors")]


class Records:
    """The records of one folder: iterate over those on the disk, a line at a time.

    Args:
        folder: whose they are.
        fields: that every record has.
        what: they are of, in messages: "a comparison".
    """

    def __init__(self, folder: Path, fields: Set[str], what: str) -> None:
        self.folder, self.fields, self.what = folder, fields, what
        self.path = folder / RECORDS

    def read(self) -> tuple[Record, list[Record]]:
        """Return settings and records.  A last line that was cut off is left out, with a warning.

        Raises:
            InputError: the folder cannot be read, or holds no records.
        """
        settings, records = read_json(self.folder / SETTINGS), list(self)
        if not isinstance(settings, dict) or not settings or not records:
            raise InputError(f"{self.folder} holds no records of {self.what}: run one into it first")
        return settings, records

    def begin(self, settings: Record) -> None:
        """Begin the folder, or check that it may be continued, and drop a line that was cut off.

        The caller holds the folder (`locked`) until it has appended its last record.

        Raises:
            InputError: the folder cannot be written, or holds records of other settings, or without settings.
        """
        if os.path.exists(self.path) and not os.path.exists(self.folder / SETTINGS):
            beside = f"{SETTINGS} is missing beside it"
            raise InputError(f"{self.path} is not of {self.what} ({beside}): choose another folder")
        empty = not sum(1 for _ in self)  # reads all: no line is damaged
        lock_settings(self.folder / SETTINGS, settings, "repeat those, or choose another folder", empty)
        with storing(self.path), self.path.open("a") as file:
            file.truncate(sum(len(line) for line in self._lines() if line.endswith(b"\n")))

    def append(self, record: Record) -> None:
        """Write one record so that it is on the disk when this returns.

        Raises:
            SpecinferError: for example, the disk is full.
        """
        with storing(self.path), self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def __iter__(self) -> Iterator[Record]:
        """Yield the records.  A last line that was cut off is left out, with a warning.

        Raises:
            InputError: the file cannot be read, or another line is damaged.
        """
        for number, line in enumerate(self._lines(), 1):
            if not line.endswith(b"\n"):
                log.warning("%s: the last line was cut off, and counts as not there", self.path)
                return
            try:
                record = parse_json(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or not record.keys() >= self.fields:
                raise InputError(f"{self.path}, line {number} is damaged, and not only cut off: remove that line")
            yield record

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines, if there are any."""
        try:
            with self.path.open("rb") as file:
                yield from file
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}") from error


def holds_results(folder: Path) -> bool:
    """Return whether runs left a record, a text or a checkpoint in a folder or in the folders in it."""
    found = (path for pattern in FINISHED for path in folder.glob(pattern))
    return any(path.stat().st_size for path in found)
