"""The origin of a folder of results: models, tokens, arithmetic and machine, JSON-ready.

Knows: what identifies a model and a machine.  Does not know: what the results are.
"""

import hashlib
import os
import platform
from pathlib import Path

import torch

from specinfer.attention import TreeModel, value_of
from specinfer.common.records import Record
from specinfer.engine.draft import Draft
from specinfer.engine.sessions import Decoder
from specinfer.loading import tokenizer_fingerprint

SKETCH = 16  # entries of each weight that stand for it in a fingerprint


def models_of(decoder: Decoder) -> Record:
    """Return the identity of the target, its tokens, the drafts and the arithmetic."""
    target, tokenizer = decoder.target, decoder.tokenizer
    return {
        "target": {"class": target.name, "weights": _fingerprint(target.model)},
        "tokenizer": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "drafts": [_draft(draft) for draft in decoder.drafts],
        "dtype": str(target.dtype).removeprefix("torch."),
    }


def machine(device: torch.device) -> Record:
    """Return the identity of the machine."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _draft(draft: Draft) -> dict[str, object]:
    weights = _fingerprint(draft.model.model) if isinstance(draft.model, TreeModel) else None
    return {"name": draft.name, "weights": weights, **draft.identity()}


def _fingerprint(model: torch.nn.Module) -> str:
    """Return the SHA-256 of every weight's name, type, shape and a few of its entries."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        owner, _, entry = name.rpartition(".")
        flat = value_of(model.get_submodule(owner), entry).reshape(-1)
        sketch = flat[:: max(1, len(flat) // SKETCH)].double().cpu().numpy()
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode() + sketch.tobytes())
    return digest.hexdigest()[:32]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
