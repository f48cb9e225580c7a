"""Verdicts of `check_model` in the cache folder, so that a command need not check again what the last one checked.

Knows: for which other models a verdict holds, where it is kept.
Does not know: how a model is checked.

A verdict is about code, not about weights: it holds for all models of an architecture on one kind of machine, for one
version of torch, of transformers and of this package.  Packed weights are multiplied by other code for each format, so
theirs holds for models of the same formats.  It is kept only where all of that code is theirs: no hooks, no patches, no
modules or attention from elsewhere, one process.
"""

import hashlib
import json
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

import torch
import transformers
from torch import nn

from specinfer.attention.compiler.watch import altered, architecture, attentions, machine, named_tensors
from specinfer.attention.packed import products
from specinfer.attention.packed.layout import kind_of
from specinfer.attention.packed.modules import holds_packed, is_packed
from specinfer.common.files import cache_folder, read_json, write_json
from specinfer.errors import SpecinferError

LEAST = 20_000_000  # bytes of weights: smaller models are checked in no time
KNOWN = "torch", "transformers", __package__  # whose code has versions, or is hashed
HASHED = ".py", ".cpp", ".h"


class Support(StrEnum):
    """What a model can be used for."""

    EXACT = "exact"
    CHAIN_ONLY = "chain only"
    UNSUPPORTED = "unsupported"


Verdict = tuple[Support, str, float]  # with the reason, and the largest error


def verdict_file(model: nn.Module) -> Path | None:
    """Return the file that a model's verdict is in, or would be; None if it may not be kept."""
    weights = [weight for _, weight in named_tensors(model)]
    if sum(weight.nbytes for weight in weights) < LEAST or altered(model):
        return None
    functions = attentions(model)
    code = [part for module in model.modules() for part in (type(module), module.forward)]
    if not all(_is_known(getattr(part, "__module__", "")) for part in (*code, *functions.values())):
        return None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None
    files = sorted(path for path in Path(__file__).parent.rglob("*") if path.suffix in HASHED)
    sources = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    parts: list[object] = [sources, torch.__version__, transformers.__version__, machine(weights[0].device)]
    parts += [str(model.dtype), [*functions], architecture(model)]
    if is_packed(model):
        formats = {kind_of(weight) for weight in weights if holds_packed(weight)}
        parts += [sorted(formats), products.library() is not None]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    with suppress(RuntimeError):  # no home
        return cache_folder() / "checked" / f"{type(model).__name__}-{digest[:16]}.json"
    return None


def _is_known(module: str) -> bool:
    """Whether code is of a module whose changes are seen."""
    return any(f"{module}.".startswith(f"{name}.") for name in KNOWN)


def read_verdict(file: Path) -> Verdict | None:
    """Return the verdict in a file, None if there is none."""
    with suppress(SpecinferError, ValueError, TypeError):
        support, reason, error = read_json(file)
        return Support(support), str(reason), float(error)
    return None


def write_verdict(file: Path, verdict: Verdict) -> None:
    """Write a verdict, if the folder is writable."""
    with suppress(SpecinferError):
        write_json(file, list(verdict))
