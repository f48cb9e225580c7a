"""Packages of compiled passes in the cache folder: found, made, shared, listed, removed.

Knows: where packages are kept, and which one belongs to a model on this machine.
Does not know: how passes are compiled or compared (`making`).

A package holds code and no weights, so it belongs to an architecture.  Its name is a digest of what the model is made
of, the versions of torch and transformers, and the kind of machine.  Fine-tuned models share the package of the base
model.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock
from weakref import WeakKeyDictionary

import torch
import transformers
from filelock import FileLock

from specinfer.attention import TreeModel, resumed
from specinfer.attention.compiler import kernels
from specinfer.attention.compiler.linear import FORMS, ROUNDED_STATES, forms
from specinfer.attention.compiler.making import check, computing, limit_of, make
from specinfer.attention.compiler.watch import architecture, machine
from specinfer.attention.forward import without_autocast
from specinfer.attention.packed import products
from specinfer.attention.packed.modules import is_packed
from specinfer.attention.passes.compiled import RECORD, CompiledPass
from specinfer.attention.torch_private import COMPILER_OPTIONS
from specinfer.attention.verdicts import verdict_file
from specinfer.common import native
from specinfer.common.files import cache_folder, parse_json, storing, write_json
from specinfer.common.records import Record
from specinfer.errors import InputError, NotCompiled

FORMAT = 10  # of packages; raised when their inputs change, or which models have them
WIDTHS = (1, 2, 3, 5, 8, 9, 16, 17, 24, 33, 64, 65, 130, 512)  # of the passes that check a new package, in nodes
MODES = ("auto", True, False)
UNREADABLE = (OSError, ValueError, KeyError, TypeError)  # what reading a damaged record raises

# by form and network, so weights are packed once
_loaded: dict[str, WeakKeyDictionary[torch.nn.Module, CompiledPass]] = {form: WeakKeyDictionary() for form in FORMS}
_lock = RLock()


def packages_folder() -> Path:
    """Return where packages are kept: ``compiled`` in the cache folder."""
    return cache_folder() / "compiled"


def offer(model: TreeModel, aux_layers: Sequence[int], mode: bool | str, rounded: bool = False) -> CompiledPass:
    """Return the compiled passes of a model.

    Args:
        model: whose passes they are.
        aux_layers: hidden states that they must return.
        mode: "auto" uses an existing package.  True makes one if there is none, and says so on stderr.  False uses
            none.
        rounded: whether its weights may be rounded where that is faster on this machine.

    Raises:
        InputError: the mode is none of these.
        NotCompiled: there are none, and why.
    """
    if mode not in MODES:
        raise InputError(f"compile={mode!r}: give True, False or 'auto'")
    if reason := "not compiled, as asked" if mode is False else _why_never(model):
        raise NotCompiled(reason)
    with _lock, without_autocast(model.device), resumed(model):
        try:
            found = forms([weight for weight in model.model.parameters() if weight.ndim == 2], rounded)
            may_fail = rounded or found[0] == ROUNDED_STATES  # and then it does so again
            known = found if may_fail or mode is not True else found[:1]
            compiled = _first(lambda form: _usable(model, form, aux_layers, anew=mode is True), known)
            if mode is True and compiled is None:
                compiled = _first(lambda form: _made(model, form, aux_layers), found)
        except (OSError, RuntimeError) as error:  # no access to the folder, no home
            raise NotCompiled(f"packages cannot be looked for ({error})") from error
    if compiled is None:
        advice = "not compiled yet: `specinfer compile`, for the same --target, takes minutes once and speeds them up"
        raise NotCompiled(missing_compiler() or advice)
    return compiled


def _why_never(model: TreeModel) -> str:
    """Return why a model cannot have compiled passes, or ""."""
    if reason := getattr(model.model, "never_compiled", ""):
        return str(reason)
    if model.stateful:
        return "it keeps states, which compiled passes cannot write"
    if model.ranks.size > 1:
        return f"its weights are spread over {model.ranks.size} processes"
    if model.dispatched:
        return "its hooks fetch weights or move inputs during a pass, which compiled passes do not"
    if is_packed(model.model) and products.library() is None:  # which compiled passes call
        return missing_compiler() or "products with its packed weights cannot be compiled"
    return ""


def _first(find: Callable[[str], CompiledPass | None], tried: Sequence[str]) -> CompiledPass | None:
    """Return the first passes found, with weights in one of these forms.

    Raises:
        NotCompiled: there are none, and the last search says why.
    """
    *others, last = tried
    for form in others:
        with suppress(NotCompiled):
            if (compiled := find(form)) is not None:
                return compiled
    return find(last)


def packages() -> list[Record]:
    """Return the packages in the cache folder.

    Returns:
        per package its name, that of the model that it was made for, what that is, number of layers, aux_layers, the
        largest error when it was made and the limit that it was held to (see `check`), megabytes.  None stands for
        what is not known: the package is damaged, or of an older version.
    """
    found: list[Record] = []
    for path in sorted(packages_folder().glob(f"*/{RECORD}")):
        found.append(dict.fromkeys(["package", "model", "is", "layers", "aux_layers", "error", "limit", "MB"]))
        found[-1] |= {"package": path.parent.name, "model": path.parent.name.rpartition("-")[0]}
        with suppress(*UNREADABLE):
            record = parse_json(path.read_text())
            size = sum(file.stat().st_size for file in path.parent.iterdir()) / 1e6
            is_head = any(variant["extra"] for variant in record["variants"])
            found[-1] |= {"layers": len(record["layers"]), "aux_layers": record["aux_layers"], "MB": round(size, 1)}
            found[-1] |= {"is": "draft head" if is_head else "language model", **record.get("made", {})}
    return found


def remove_packages() -> int:
    """Remove every package, and the remains of killed compilations; return how many packages there were."""
    count = len(packages())
    with storing(packages_folder()), suppress(FileNotFoundError):
        shutil.rmtree(packages_folder())
    return count


def package_of(model: TreeModel, form: str) -> Path:
    """Return the folder that a model's package is in, or would be, with weights in a form."""
    versions = [FORMAT, COMPILER_OPTIONS, torch.__version__, transformers.__version__]
    sources = [kernels.source()] if model.device.type == "cpu" else []
    parts = [*versions, machine(model.device), architecture(model.model), *sources, form, str(model.dtype)]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return packages_folder() / f"{model.name}-{digest[:16]}"


def _usable(model: TreeModel, form: str, aux_layers: Sequence[int], anew: bool = False) -> CompiledPass | None:
    """Return the passes of the model's package; None if there is none, or if it is unusable and will be made again.

    Raises:
        NotCompiled: the package is damaged, wrong, or returns other hidden states; or the model is patched.
    """
    compiled = _loaded[form].get(model.model)
    if compiled is not None and set(aux_layers) <= set(compiled.aux_layers) and not compiled.refresh():
        return compiled
    folder = package_of(model, form)
    if not (folder / RECORD).is_file():
        return None
    try:
        compiled = CompiledPass(model, folder, form)
        if not set(aux_layers) <= set(compiled.aux_layers):
            raise NotCompiled("compiled for other drafts: run `specinfer compile` with these as well")
        if not (reason := compiled.refresh()):
            _check_once(model, compiled, folder)
    except NotCompiled:
        if anew:
            return None
        raise
    if reason:
        raise NotCompiled(reason)
    _loaded[form][model.model] = compiled
    return compiled


def _check_once(model: TreeModel, compiled: CompiledPass, folder: Path) -> None:
    """Compare the passes of a package with the plain model, unless they were, by this code and with these weights.

    What was compared is kept beside the package, as the verdict of `check_model` is kept.  Weights are told apart by
    some entries of each.

    Raises:
        NotCompiled: they differ.
    """
    verdict = verdict_file(model.model)
    entries = hashlib.sha256(b"".join(part.cpu().numpy().tobytes() for part in compiled.sampled)).hexdigest()
    compared = verdict and folder / f"{verdict.stem}-{entries[:16]}"
    if compared is None or not compared.exists():
        check(model, compiled)
        if compared is not None:
            with suppress(OSError):  # a folder that may only be read
                compared.touch()


def _made(model: TreeModel, form: str, aux_layers: Sequence[int]) -> CompiledPass:
    """Make a package, compare it with the plain model, and move it to where it will be found."""
    folder = package_of(model, form)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if (compiled := _usable(model, form, aux_layers, anew=True)) is not None:  # another process made it
                return compiled
            if missing := missing_compiler():
                raise NotCompiled(missing)
            _tell(f"compiling the passes of {model.checkpoint}: minutes, once")
            with suppress(*UNREADABLE):  # so that the new package also serves the models of the old one
                aux_layers = [*aux_layers, *parse_json((folder / RECORD).read_text())["aux_layers"]]
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as temporary:
                made = Path(temporary) / folder.name
                made.mkdir()
                source = computing(model, form)
                make(source, form, sorted(set(aux_layers)), made, model.model)
                compiled = CompiledPass(source, made, form)
                if reason := compiled.refresh():
                    raise NotCompiled(reason)
                error, limit = check(source, compiled, WIDTHS), limit_of(source, form)
                found = f"off by {error:.1g} of their spread at most, below the limit of {limit:g}"
                _tell(f"compiled and checked: logits are the plain model's but for rounding ({found})")
                record = parse_json((made / RECORD).read_text())
                record["made"] = {"model": model.checkpoint, "error": error, "limit": limit}
                write_json(made / RECORD, record)
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
                if source is not model:
                    compiled = compiled.serving(model.model)
                    if reason := compiled.refresh():
                        raise NotCompiled(reason)
    except OSError as error:
        raise NotCompiled(f"packages cannot be kept in {folder.parent} ({error.strerror or error})") from error
    _loaded[form][model.model] = compiled
    return compiled


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


def missing_compiler() -> str:
    """Return what to do if this machine has no C++ compiler, else \"\"."""
    if native.compiler():
        return ""
    return "no C++ compiler was found, which compiled passes need: install g++ (Debian: `apt install g++`) or clang"
