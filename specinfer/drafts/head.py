"""The EAGLE-style head: a draft of a decoder layer or two that reads the target's hidden states.

Knows: which hidden states of the target it reads, which tokens it may propose, which target it belongs to.
Does not know: how trees grow, verification, how it was trained (`distill`).

A language model as a draft must read the context itself.  A head uses the hidden states of the target, which has just
read it (EAGLE, arXiv 2401.15077; states of several layers, EAGLE-3, arXiv 2503.01840).  The head's input at position i
is a pair: the target's state that chose token i + 1, and the embedding of token i + 1.  Below the root the target has
no states yet, and the head uses its own.  Embedding and output matrix are the target's, the latter cut to the rows of
the head's vocabulary (FR-Spec, arXiv 2502.14856), so a head's file is small.
"""

from copy import copy
from math import inf
from pathlib import Path
from threading import Lock
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specinfer.attention import TreeModel, device_of, embedded
from specinfer.attention.torch_private import writes
from specinfer.common.files import expanded, parse_json, write_json, write_whole
from specinfer.common.records import Record
from specinfer.drafts.head_network import HeadNetwork
from specinfer.drafts.language_model import HeadDraftSession
from specinfer.drafts.published.layers import network_config
from specinfer.drafts.published.network import attached_model, check_readable
from specinfer.engine.draft import Draft, DraftContext
from specinfer.errors import ModelError, TokenizerMismatch, one_line
from specinfer.loading import tokenizer_fingerprint

MODEL_TYPE = "specinfer_eagle_head"  # in config.json
SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"),
    *("max_position_embeddings", "vocab_size"),
)
HEAD_FIELDS = (*SIZES, "sliding_window", "rms_norm_eps", "aux_layers")
FINGERPRINT = {"tokenizer", "layers", "hidden_size", "vocab_size", "sketch"}
SKETCH_ROWS, SKETCH_WIDTH = 32, 8  # embedding rows in a target's fingerprint, and entries of each
LARGEST = 1 << 24  # of any size in a head's configuration
SAME_TARGET = 0.9  # least cosine of two fingerprints: coarsely quantised weights stay above, others are far below

# by target and head: compiled passes belong to a network, so there is one copy for each pair
_copies: WeakKeyDictionary[object, WeakKeyDictionary[HeadNetwork, tuple[list[object], HeadNetwork]]] = (
    WeakKeyDictionary()
)
_binding = Lock()


class HeadDraft(Draft):
    """An EAGLE-style head as a draft.

    Attached to a target it runs on a copy of the head, which all decoders of that target share.  The head stays as it
    is.

    Args:
        head: the trained head.
        fingerprint: of the target it was trained for (`target_fingerprint`) and of its tokenizer.
        name: in results.
        inverse_temperature: of its distribution against the target's noise (`DraftRows.ranked`).
    """

    may_wait = True

    def __init__(
        self, head: HeadNetwork, fingerprint: Record, name: str = "head", inverse_temperature: float = 1.0
    ) -> None:
        self.head, self.fingerprint, self.name = head.eval(), fingerprint, name
        self.inverse_temperature = inverse_temperature
        self.aux_layers: tuple[int, ...] = tuple(head.config.aux_layers)
        self.model: TreeModel | None = None

    @classmethod
    def load(cls, folder: str | Path) -> "HeadDraft":
        """Read a head from a folder that `save` wrote.

        Raises:
            ModelError: the folder holds no EAGLE-style head.
        """
        folder = expanded(folder)
        record = read_config(folder)
        try:
            weights = load_file(folder / "model.safetensors")
            _check_sizes(record, weights)
            with torch.device("meta"):  # no memory is taken before the sizes are known to fit
                head = HeadNetwork(network_config(**record["head"]), weights["token_ids"].long())
            types = {name: weight.dtype for name, weight in head.state_dict().items()}
            head.load_state_dict({name: w.to(types.get(name, w.dtype)) for name, w in weights.items()}, assign=True)
            return cls(head, record["fingerprint"], record["name"], float(record.get("inverse_temperature", 1.0)))
        except Exception as error:  # a damaged file may raise anything
            raise _unreadable(folder, error) from error

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, in bfloat16, without the borrowed matrices.

        Raises:
            SpecinferError, InputError: the disk is full, or the folder cannot be written.
        """
        record = {
            "model_type": MODEL_TYPE,
            "name": self.name,
            "inverse_temperature": self.inverse_temperature,
            "head": {name: getattr(self.head.config, name, None) for name in HEAD_FIELDS},
            "fingerprint": self.fingerprint,
        }
        trained = {name: w for name, w in self.head.state_dict().items() if not name.startswith("output.")}
        kinds = {name: torch.bfloat16 if w.is_floating_point() else torch.int32 for name, w in trained.items()}
        weights = {name: w.to(kinds[name]).contiguous() for name, w in trained.items()}
        write_whole(folder / "model.safetensors", save(weights, {"format": "pt"}))
        write_json(folder / "config.json", record)

    def attach(self, target: TreeModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Self:
        """Return this draft with the target's matrices borrowed.

        Raises:
            TokenizerMismatch: trained for other tokens.
            ModelError: trained for another target.
            UnsupportedModel: the target hands out no hidden states.
        """
        check_readable(self.name, target)
        check_fingerprint(self.name, self.fingerprint, target.model, tokenizer)
        attached = copy(self)
        attached.model = TreeModel(_bound(self.head, target.model))
        return attached

    def open(self, context: DraftContext) -> HeadDraftSession:
        """Start drafting for a batch of rows."""
        return HeadDraftSession(attached_model(self), self.aux_layers, context, self.inverse_temperature)


def _bound(head: HeadNetwork, target: PreTrainedModel) -> HeadNetwork:
    """Return a copy of a head that is bound to a target; it is made again if the head has changed."""
    stamp = [device_of(target), target.dtype, *((w.data_ptr(), writes(w)) for w in head.parameters())]
    with _binding:
        copies = _copies.setdefault(target, WeakKeyDictionary())
        earlier, network = copies.get(head, (None, head))
        network = network.bind(target) if earlier == stamp else head.bound(target)
        copies[head] = stamp, network
    return network


def read_config(folder: Path) -> Record:
    """Return what ``config.json`` says of a head.

    Raises:
        ModelError: there is no such file, or it is not a head's.
    """
    try:
        record: Record = parse_json((folder / "config.json").read_text(encoding="utf-8"))
        if record.get("model_type") != MODEL_TYPE:
            raise ValueError(f"its model_type is {record.get('model_type')!r}, not {MODEL_TYPE!r}")
        if missing := FINGERPRINT - set(record["fingerprint"]):
            raise ValueError(f"its fingerprint lacks {', '.join(sorted(missing))}")
        sketch = _as_sketch(record["fingerprint"]["sketch"])
        if sketch.shape != (SKETCH_ROWS * SKETCH_WIDTH,) or not sketch.isfinite().all():
            raise ValueError("its fingerprint's sketch is damaged")
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise _unreadable(folder, error) from error
    return record


def _check_sizes(record: Record, weights: dict[str, Tensor]) -> None:
    """Raise `ValueError`, or what a value of a wrong type raises, for a head that differs from the one that was saved.

    Args:
        record: of ``config.json``.
        weights: of the file.
    """
    head, target = record["head"], record["fingerprint"]
    wrong = [name for name in SIZES if not (type(head[name]) is int and 0 < head[name] < LARGEST)]
    window = head.get("sliding_window")
    wrong += [] if window is None or (type(window) is int and 0 < window < LARGEST) else ["sliding_window"]
    wrong += [] if 0 < head["rms_norm_eps"] < 1 else ["rms_norm_eps"]
    if wrong:
        raise ValueError(f"its {wrong[0]} is {head[wrong[0]]!r:.40}")
    layers, most = head["aux_layers"], target["layers"]
    if not layers or not all(type(layer) is int and 0 <= layer <= most for layer in layers):
        raise ValueError(f"its aux_layers are {layers!r:.40}, of a target with {most!r:.40} layers")
    if head["num_hidden_layers"] != len({name.split(".")[1] for name in weights if name.startswith("layers.")}):
        raise ValueError(f"its file does not hold {head['num_hidden_layers']} layers")
    ids = weights["token_ids"].long()
    if ids.shape != (head["vocab_size"],) or ids[0] < 0 or ids[-1] >= target["vocab_size"] or (ids.diff() <= 0).any():
        raise ValueError("its token_ids are not ascending ids of the target")
    name, inverse_temperature = record["name"], record.get("inverse_temperature", 1.0)
    if not isinstance(name, str) or not 0 < float(inverse_temperature) < inf:
        raise ValueError(f"its name is {name!r:.40}, its inverse_temperature {inverse_temperature!r:.40}")
    if bad := [name for name, weight in weights.items() if not weight.isfinite().all()]:
        raise ValueError(f"its {bad[0]} holds numbers that are not finite")


def _unreadable(folder: Path, error: Exception) -> ModelError:
    return ModelError(f"cannot load an EAGLE-style head from {folder}: {one_line(error)}")


# ---- which target a head belongs to ----


def target_fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Record:
    """Describe a target: versions of one model have almost the same fingerprint, other models have another one.

    The sketch holds a few entries of the embedding matrix.  Copies in another precision (a quantised file, say) have
    nearly the same entries; the cosine of two sketches shows it (`SAME_TARGET`).
    """
    sketch = " ".join(f"{value:.4g}" for value in _sketch(model).tolist())
    return {"tokenizer": tokenizer_fingerprint(tokenizer), **_sizes(model), "sketch": sketch}


def check_fingerprint(
    name: str, wanted: Record, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Refuse a draft that was trained for another target.

    Raises:
        TokenizerMismatch: for other tokens.
        ModelError: for a target of other size or weights.
    """
    advice = "train one for this target with `specinfer distill`, or choose another draft"
    if tokenizer is not None and tokenizer_fingerprint(tokenizer) != wanted["tokenizer"]:
        raise TokenizerMismatch(f"draft {name} was trained for a target with other tokens: {advice}")
    for what, found in _sizes(model).items():
        if found != wanted[what]:
            raise ModelError(f"draft {name} was trained for a target with {what} {wanted[what]}, not {found}: {advice}")
    if functional.cosine_similarity(_as_sketch(wanted["sketch"]), _sketch(model), dim=0) < SAME_TARGET:
        raise ModelError(f"draft {name} was trained for other weights than this target's: {advice}")


def _as_sketch(text: str) -> Tensor:
    """Return a fingerprint's sketch as numbers."""
    return torch.tensor([float(value) for value in text.split()], dtype=torch.float32, device="cpu")


def _sizes(model: PreTrainedModel) -> dict[str, int]:
    config = model.config.get_text_config(decoder=True)
    vocab_size = model.get_input_embeddings().num_embeddings
    return {"layers": config.num_hidden_layers, "hidden_size": config.hidden_size, "vocab_size": vocab_size}


def _sketch(model: Any) -> Tensor:
    """Return a few entries of the embedding matrix, float32."""
    embedding = model.get_input_embeddings()
    last = embedding.num_embeddings - 1
    ids = torch.linspace(0, last, SKETCH_ROWS, dtype=torch.float32, device="cpu").long()
    return embedded(embedding, ids.to(device_of(model)))[:, :SKETCH_WIDTH].float().cpu().flatten()
