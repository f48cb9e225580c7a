"""Verdicts of `check_model` in the cache folder, so that a command need not check again what the last one checked.

Knows: for which other models a verdict holds, where it is kept.
Does not know: how a model is checked.

A verdict is about code, not about weights: it holds for all models of an architecture on one kind of machine, for one
version of torch, of transformers and of this package.  It is kept only where all of that code is theirs: no hooks, no
patches, no modules or attention from elsewhere, one process.
"""

import hashlib
import json
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

import torch
import transformers
from torch import nn

from specinfer.attention.compiler.watch import altered, architecture, attentions, machine
from specinfer.common.files import cache_folder, read_json, write_json
from specinfer.errors import SpecinferError

LEAST = 10_000_000  # parameters: smaller models are checked in no time
KNOWN = ("torch", "transformers")  # whose code has versions


class Support(StrEnum):
    """What a model can be used for."""

    EXACT = "exact"
    CHAIN_ONLY = "chain only"
    UNSUPPORTED = "unsupported"


Verdict = tuple[Support, str, float]  # with the reason, and the largest error


def verdict_file(model: nn.Module) -> Path | None:
    """Return the file that a model's verdict is in, or would be; None if it may not be kept."""
    if sum(weight.numel() for weight in model.parameters()) < LEAST or altered(model):
        return None
    functions = attentions(model)
    code = [part for module in model.modules() for part in (type(module), module.forward)]
    if not all(getattr(part, "__module__", "").split(".")[0] in KNOWN for part in (*code, *functions.values())):
        return None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None
    sources = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(__file__).parent.rglob("*.py"))]
    parts = [sources, torch.__version__, transformers.__version__, machine(next(model.parameters()).device)]
    whole = [*parts, str(model.dtype), [*functions], architecture(model)]
    digest = hashlib.sha256(json.dumps(whole).encode()).hexdigest()
    with suppress(RuntimeError):  # no home
        return cache_folder() / "checked" / f"{type(model).__name__}-{digest[:16]}.json"
    return None


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
