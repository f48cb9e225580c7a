"""Packages of compiled passes in the cache folder: found, made, shared, listed, removed.

Knows: where packages are kept, and which one belongs to a model on this machine.
Does not know: how passes are compiled or compared (`attention.compiled`).

A package holds code and no weights, so it belongs to an architecture: it is named by a digest of what the model is made
of, the versions of torch and transformers, and the kind of machine.  Fine-tuned weights use their ancestor's.
"""

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch

from specinfer.attention import TreeModel, resumed
from specinfer.attention.compiled import OPTIONS, RECORD, CompiledPass, check, make
from specinfer.attention.watch import architecture
from specinfer.common.files import cache_folder, parse_json, storing
from specinfer.errors import InputError, NotCompiled

FORMAT = 2  # of packages; raised when their inputs change
WIDTHS = (1, 2, 3, 5, 8, 9, 16, 17, 24, 33, 64, 65, 130, 512)  # nodes of the passes that a new package is compared in
MODES = ("auto", True, False)

_loaded: WeakKeyDictionary[Any, CompiledPass] = WeakKeyDictionary()  # by network: packed weights are had once
_lock = RLock()


def packages_folder() -> Path:
    """Where packages are kept: ``compiled`` in the cache folder."""
    return cache_folder() / "compiled"


def attach(model: TreeModel, aux_layers: Sequence[int], mode: bool | str) -> str:
    """Give a model its compiled passes, if there are some; return why it has none, or nothing.

    Args:
        model: runs plain until it is given passes.
        aux_layers: hidden states that its passes must hand out.
        mode: "auto" takes a package that is there, True makes one if there is none and says so on stderr, False takes
            none.

    Raises:
        InputError: another mode.
    """
    if mode not in MODES:
        raise InputError(f"compile={mode!r}: give True, False or 'auto'")
    if mode is False:
        return "not compiled, as asked"
    with _lock, resumed(model):
        try:
            model.compiled = _usable(model, aux_layers, anew=mode is True) or (
                _made(model, aux_layers) if mode is True else None
            )
            return "" if model.compiled else _advice()
        except NotCompiled as error:
            return str(error)
        except (OSError, RuntimeError) as error:  # a folder of somebody else's, no home
            return f"packages cannot be looked for ({error})"


def packages() -> list[dict[str, Any]]:
    """Return what is in the cache folder: name, model, layers, aux_layers, megabytes, of every package."""
    found = []
    for path in sorted(packages_folder().glob(f"*/{RECORD}")):
        try:
            record = parse_json(path.read_text())
            size = sum(file.stat().st_size for file in path.parent.iterdir()) / 1e6
            described = {"layers": len(record["layers"]), "aux_layers": record["aux_layers"], "MB": round(size, 1)}
            found.append({"package": path.parent.name, **described})
        except (OSError, ValueError, KeyError, TypeError):
            found.append({"package": path.parent.name, "layers": None, "aux_layers": None, "MB": None})
    return found


def remove_packages() -> int:
    """Remove every package, and what killed compilations left; return how many packages there were."""
    count = len(packages())
    with storing(packages_folder()), suppress(FileNotFoundError):
        shutil.rmtree(packages_folder())
    return count


def package_of(model: TreeModel) -> Path:
    """Return the folder that a model's package is in, or would be."""
    parts = [FORMAT, OPTIONS, torch.__version__, _version_of_transformers(), _machine(model), architecture(model.model)]
    digest = hashlib.sha256(json.dumps([*parts, str(model.dtype)]).encode()).hexdigest()
    return packages_folder() / f"{model.name}-{digest[:16]}"


def _usable(model: TreeModel, aux_layers: Sequence[int], anew: bool = False) -> CompiledPass | None:
    """Return the package's passes, None if there is none, or a damaged or wrong one that will be made anew.

    Raises:
        NotCompiled: there is one, but it is damaged, wrong, or hands out other hidden states; or the model is patched.
    """
    own = _loaded.get(model.model)
    if own is not None and set(aux_layers) <= set(own.aux_layers) and not own.refresh():
        return own
    folder = package_of(model)
    if not (folder / RECORD).is_file():
        return None
    try:
        own = CompiledPass(model, folder)
        if not set(aux_layers) <= set(own.aux_layers):
            raise NotCompiled("compiled for other drafts: run `specinfer compile` with these, too")
        if not (reason := own.refresh()):
            check(model, own)
    except NotCompiled:
        if anew:
            return None
        raise
    if reason:
        raise NotCompiled(reason)
    _loaded[model.model] = own
    return own


def _made(model: TreeModel, aux_layers: Sequence[int]) -> CompiledPass:
    """Make a package, compare it with the plain model, and put it where it will be found."""
    from filelock import FileLock

    if missing := missing_compiler():
        raise NotCompiled(missing)
    folder = package_of(model)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if (own := _usable(model, aux_layers, anew=True)) is not None:  # another process was faster
                return own
            _tell(f"compiling the passes of {model.name}: minutes, once")
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as making:
                whole = Path(making) / folder.name
                whole.mkdir()
                make(model, sorted({*aux_layers, *_earlier_aux_layers(folder)}), whole)
                own = CompiledPass(model, whole)
                if reason := own.refresh():
                    raise NotCompiled(reason)
                _tell(f"compiled; largest error against the plain model {check(model, own, WIDTHS):.1e}")
                shutil.rmtree(folder, ignore_errors=True)
                whole.rename(folder)
    except OSError as error:
        raise NotCompiled(f"packages cannot be kept in {folder.parent} ({error.strerror or error})") from error
    _loaded[model.model] = own
    return own


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _earlier_aux_layers(folder: Path) -> list[int]:
    """Return the aux_layers of a package that lacks some, so that the new one serves both."""
    try:
        return list(parse_json((folder / RECORD).read_text())["aux_layers"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _advice() -> str:
    if missing := missing_compiler():
        return missing
    return "not compiled yet: `specinfer compile` does it in minutes, once, and passes get faster"


def missing_compiler() -> str:
    """Return what to do if this machine has no C++ compiler, else nothing."""
    if any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")))):
        return ""
    return "no C++ compiler was found, which compiled passes need: install g++ (Debian: `apt install g++`) or clang"


def _version_of_transformers() -> str:
    import transformers

    return transformers.__version__


def _machine(model: TreeModel) -> list[str]:
    """Return what compiled code depends on: a processor's instructions, a GPU's kind."""
    if model.device.type == "cuda":
        return [torch.cuda.get_device_name(model.device), torch.version.cuda or ""]
    kinds = [platform.machine(), platform.system(), torch.backends.cpu.get_cpu_capability()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return [*kinds, next(line for line in lines if line.startswith(("flags", "Features")))]
    except (OSError, StopIteration):
        return kinds
