"""Files that are complete or absent, and folders that one run at a time fills under recorded settings.

Knows: temporary names, locks, JSON, how a full disk is reported.  Does not know: what the files are for.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EDQUOT, ENOSPC
from itertools import chain
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from specinfer.errors import InputError, SpecinferError

LOCK, UNFINISHED = ".lock", f".{'[0-9a-f]' * 16}.new"  # in a folder that a run fills: names of both
DEEPEST = 50  # levels of JSON
LISTED = 60  # characters of a setting in a message
SAMPLES, SAMPLE_BYTES = 32, 1 << 15  # of a file of weights, in its digest
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")  # files of weights


def cache_folder() -> Path:
    """Return specinfer's cache folder: `$SPECINFER_CACHE`, else `~/.cache/specinfer`."""
    return Path(os.environ.get("SPECINFER_CACHE") or "~/.cache/specinfer").expanduser()


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn errors of writing into one line that names the path.

    Raises:
        SpecinferError: the disk is full.
        InputError: the path cannot be written for another reason.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk in words only
        if getattr(error, "errno", None) in (ENOSPC, EDQUOT) or "No space left" in str(error):
            advice = "make room and run the same command again; runs into a folder go on from what was finished"
            raise SpecinferError(f"the disk is full, {path} could not be written: {advice}") from error
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot write {path} ({reason}): choose a folder that can be written") from error


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with ~ expanded: shells leave it to programs after an equals sign."""
    return Path(os.path.expanduser(path))


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file, with ~ expanded; raise `InputError` for a name that no file can have."""
    with suppress(TypeError, ValueError, RuntimeError):  # the last if there is no home
        found = expanded(path)
        if found.name and b"\0" not in os.fsencode(found):
            return found
    raise InputError(f"{path!r:.60} is not the path of a file: give one")


def write_whole(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a file under a temporary name, then rename it: it is complete or absent, whenever the machine stops.

    Raises:
        SpecinferError, InputError: see `storing`; or no file can be called so.
    """
    path = checked_path(path)
    fresh = path.with_name(f".{token_hex(8)}.new")
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with fresh.open("xb") as file:  # a new file: not another run's, and not a link's target
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, path)
        except BaseException:
            fresh.unlink(missing_ok=True)  # half a file would keep the disk full
            raise
        sync(path.parent)


def sync(*paths: Path) -> None:
    """Wait until files, and the entries of folders, are on the disk, if the system can do that."""
    for path in paths:
        with suppress(OSError):
            opened = os.open(path, os.O_RDONLY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)


@contextmanager
def locked(folder: str | Path | None) -> Iterator[Path]:
    """Hold a folder during a run that fills it, and yield it; None is a temporary one.

    The system releases it when the process ends, however it ends.  Half-written files of killed runs are removed.

    Raises:
        InputError: another run holds the folder, or it cannot be written.
        SpecinferError: the disk is full.
    """
    if folder is None:
        with TemporaryDirectory() as temporary:
            yield Path(temporary)
        return
    folder = expanded(folder)
    lock = FileLock(folder / LOCK, timeout=0)
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise InputError(f"another run writes to {folder}: wait for it, or choose another folder") from None
    try:
        for unfinished in (*folder.glob(UNFINISHED), *folder.glob(f"*/{UNFINISHED}")):
            unfinished.unlink(missing_ok=True)
        yield folder
    finally:
        lock.release()


def write_json(path: str | os.PathLike[str], value: object) -> None:
    """Write a value as JSON: see `write_whole`."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Return the value that `write_json` wrote, or None if the file does not exist.

    Raises:
        InputError: the file is not JSON, or cannot be read.
    """
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path} ({error}): remove it, or choose another folder") from error


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; ValueError if it is not JSON, or nested deeper than anything we write."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level = [value]
    for _ in range(DEEPEST):
        lists = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [*chain(*lists)]
    if level:
        raise ValueError("nested too deep")
    return value


def lock_settings(path: Path, settings: Mapping[str, object], advice: str, empty: bool) -> None:
    """Record the settings under which a folder is filled, or check that they are the recorded ones.

    Args:
        path: of the record.
        settings: JSON-ready.
        advice: what to do if they differ.
        empty: nothing was made under the recorded settings yet, so others may replace them.

    Raises:
        InputError: the folder was begun with other settings; names them and gives the advice.
    """
    settings = json.loads(json.dumps(settings))
    found = read_json(path)
    if not isinstance(found, dict | None):
        raise InputError(f"{path} does not hold settings: {advice}")
    if found is None or (empty and found.keys() == settings.keys()):  # other keys: perhaps another program's file
        write_json(path, settings)
        return
    if changes := list(_differences("", found, settings)):
        raise InputError(f"{path.parent} was begun with other settings ({'; '.join(changes)}): {advice}")


def _differences(name: str, found: object, now: object) -> Iterator[str]:
    """Yield the fields in which two JSON values differ, each with both values."""
    if isinstance(found, list) and isinstance(now, list) and len(found) == len(now) and dict in map(type, found):
        found, now = dict(enumerate(found)), dict(enumerate(now))
    if isinstance(found, dict) and isinstance(now, dict):
        for key in {**now, **found}:
            yield from _differences(f"{name}.{key}".lstrip("."), found.get(key), now.get(key))
    elif found != now:
        yield f"{name} was {_short(found)}, now {_short(now)}"


def weights_digest(folder: Path) -> str:
    """Return a model folder's name and a digest of its weights: of each file, its size and samples of its bytes.

    Raises:
        InputError: a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted(path for kind in WEIGHTS for path in folder.glob(kind)):
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:  # a draft's first bytes may be its target's, which never change
                for sample in range(SAMPLES):
                    file.seek(size * sample // SAMPLES)
                    digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): is the model's folder complete?") from error
    return f"{folder.resolve().name} {digest.hexdigest()[:16]}"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= LISTED else f"{text[: LISTED - 3]}..."
