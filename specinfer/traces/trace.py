"""A trace: what the target's and the drafts' distributions were along texts, and the trees that the drafts would grow.

Knows: arrays and the folder that holds them.  Does not know: models at work, verification.

A trace is host data (numpy).  Along one text of n new tokens, D levels deep:

    position i   after i new tokens: the next step's root is the last of them
    (i, j)       the draft at position i, after it has also drafted the next j tokens of the text itself (a feature head
                 reads its own states there, so this is not position i + j); it is asked for token i + j

A folder holds ``trace.json`` (settings, format) and one ``.safetensors`` file per text, written when the text is done.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from specinfer.attention import TreeModel
from specinfer.decoder import SpeculativeDecoder
from specinfer.errors import InputError
from specinfer.files import pin, read_json, write_whole
from specinfer.heads import tokenizer_fingerprint

FORMAT = 1
SETTINGS = "trace.json"
SHAPE = {"drafts", "depth", "nodes", "top", "draws", "max_new_tokens", "temperature"}  # settings that reading needs
SKETCH = 16  # entries of each weight that stand for it in a fingerprint

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Drafted:
    """What one draft would have proposed along one text.

    Attributes:
        first: (n + 1,) where each position's tree begins in the three columns below.
        tree_tokens, tree_parents, tree_scores: every node of a best-first tree of at most the recorded nodes and of
            any depth up to D, best first: parent (-1 = the root) within the position, log-probability of the path.
        tokens, log_probs: (n, D, k) the draft's first choices for token i + j and their log-probabilities, best first;
            when sampling, by the noise shared with the target.  Token -1 = none.
        law_tokens, law_probs: (n, D, k) the likeliest tokens of its law q without that noise; what they lack to 1 is
            the others'.  k = V if whole laws were asked for, 0 when greedy, as in the next ones but `probability`.
        probability: (n, D) q of token i + j.
        tests: (n, D, K) c_1 ... c_K of draws with replacement (`acceptance`).
        without_replacement: (n, D, K) the probability that token i + j was accepted among 1 ... K draws.
    """

    first: Ids
    tree_tokens: Ids
    tree_parents: Ids
    tree_scores: Floats
    tokens: Ids
    log_probs: Floats
    law_tokens: Ids
    law_probs: Floats
    probability: Floats
    tests: Floats
    without_replacement: Floats


@dataclass(frozen=True)
class Text:
    """One text of the target, and what was recorded along it.

    Attributes:
        prompt_ids, token_ids: the prompt, and the n new tokens.
        seed: of the noise that chose them, when sampling.
        target_tokens, target_probs: (n, k) the likeliest tokens of the target's law p.
        probability: (n,) p of each token of the text.
        drafted: one per draft.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    seed: int
    target_tokens: Ids
    target_probs: Floats
    probability: Floats
    drafted: tuple[Drafted, ...]

    def root(self, place: int) -> int:
        """Return the token that the step at a position begins with."""
        return self.token_ids[place - 1] if place else self.prompt_ids[-1]

    def ranks(self, draft: int) -> np.ndarray:
        """Return the place of token i + j among a draft's candidates, (n, D); -1 = it is not among them."""
        tokens = self.drafted[draft].tokens  # (n, D, k)
        n, depth = tokens.shape[:2]
        padded = np.array([*self.token_ids, *[-2] * depth])
        hit = tokens == padded[np.arange(n)[:, None] + np.arange(depth)][:, :, None]
        return np.where(hit.any(2), hit.argmax(2), -1)

    def to_bytes(self) -> bytes:
        """Return the text as a safetensors file."""
        arrays = {name: getattr(self, name) for name in ("target_tokens", "target_probs", "probability")}
        arrays |= {name: np.array(getattr(self, name), np.int32) for name in ("prompt_ids", "token_ids")}
        arrays |= {f"{i}.{f.name}": getattr(d, f.name) for i, d in enumerate(self.drafted) for f in fields(Drafted)}
        # a view with gaps would be written wrong
        return save({name: np.ascontiguousarray(a) for name, a in arrays.items()}, {"seed": str(self.seed)})

    @classmethod
    def from_file(cls, path: Path, drafts: int) -> "Text":
        """Read what `to_bytes` made.

        Raises:
            InputError: the file is damaged, or no text of a trace.
        """
        try:
            with safe_open(path, "np") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
                seed = int(file.metadata()["seed"])
            own = [Drafted(**{f.name: arrays.pop(f"{i}.{f.name}") for f in fields(Drafted)}) for i in range(drafts)]
            ids = {name: arrays.pop(name).tolist() for name in ("prompt_ids", "token_ids")}
            return cls(seed=seed, drafted=tuple(own), **ids, **arrays)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} is no text of a trace ({error}): remove it and record it again") from error


@dataclass(frozen=True)
class Trace:
    """Texts of one target and what its drafts would have proposed along them: see `record` and `replay`."""

    settings: Mapping[str, Any]
    texts: tuple[Text, ...]

    @property
    def drafts(self) -> list[str]:
        """The drafts' names, in the order of `Text.drafted`."""
        return [draft["name"] for draft in self.settings["drafts"]]

    @property
    def sampling(self) -> bool:
        """Whether the texts were sampled; otherwise they are greedy."""
        return bool(self.settings["temperature"])

    def __repr__(self) -> str:
        tokens = sum(len(text.token_ids) for text in self.texts)
        how = f"T = {self.settings['temperature']:g}" if self.sampling else "greedy"
        return f"Trace({len(self.texts)} texts, {tokens} tokens, {how}, drafts {', '.join(self.drafts)})"

    def draft(self, draft: int | str) -> int:
        """Return a draft's place, given that or its name.

        Raises:
            InputError: there is no such draft, or several.
        """
        names = self.drafts
        if names.count(draft) > 1:  # type: ignore[arg-type]  # a number is no name
            raise InputError(f"the trace has several drafts called {draft!r}: name one by its place, from 0")
        if draft in names:
            return names.index(str(draft))
        if not isinstance(draft, int) or not 0 <= draft < len(names):
            raise InputError(f"the trace has no draft {draft!r}: it has {', '.join(names)} (0 to {len(names) - 1})")
        return draft

    def asked(self, text: Text) -> np.ndarray:
        """Return where a draft was asked for token i + j, (n, D): not for the last one that the budget allows."""
        n, budget = len(text.token_ids), self.settings["max_new_tokens"]
        return np.arange(n)[:, None] + np.arange(self.settings["depth"]) < min(n, budget - 1)

    def save(self, folder: str | Path) -> None:
        """Write the trace; texts that the folder holds beyond these are left alone.

        Raises:
            InputError: the folder holds a trace of other settings, or cannot be written.
        """
        begin(Path(folder), self.settings)
        for number, text in enumerate(self.texts):
            write_text(Path(folder), number, text)

    @classmethod
    def load(cls, folder: str | Path, decoder: SpeculativeDecoder | None = None) -> "Trace":
        """Read a trace, whole or as far as it was recorded.

        Args:
            folder: of `save` or `record`.
            decoder: if given, the trace must be of its target and drafts.

        Raises:
            InputError: there is no trace, it is damaged, of another format version, or of other models.
        """
        folder = Path(folder)
        settings = read_json(folder / SETTINGS)
        if not isinstance(settings, dict) or "format" not in settings:
            raise InputError(f"{folder} holds no trace: record one with `specinfer record`")
        if settings["format"] != FORMAT:
            raise InputError(
                f"{folder} holds a trace of format {settings['format']}, and this version reads format {FORMAT}: "
                "record it again, or use the version that wrote it"
            )
        if missing := SHAPE - settings.keys():
            raise InputError(
                f"{folder / SETTINGS} is damaged: {', '.join(sorted(missing))} is missing; record it again"
            )
        if decoder is not None:
            check_models(folder, settings, decoder)
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise InputError(f"{folder} holds a trace without any finished text: run the recording again")
        return cls(settings, tuple(Text.from_file(path, len(settings["drafts"])) for path in paths))


def begin(folder: Path, settings: Mapping[str, Any]) -> None:
    """Pin a folder to settings.

    Raises:
        InputError: it holds a trace of other settings, or cannot be written.
    """
    empty = not any(folder.glob("*.safetensors"))
    pin(folder / SETTINGS, settings, "repeat those, or choose another folder", empty)


def write_text(folder: Path, number: int, text: Text) -> None:
    """Write one finished text."""
    write_whole(folder / f"{number:05d}.safetensors", text.to_bytes())


def read_text(folder: Path, number: int, prompt_ids: list[int], seed: int, drafts: int) -> Text | None:
    """Return a finished text, None if it is not there.

    Raises:
        InputError: it is damaged, or of another prompt or seed.
    """
    path = folder / f"{number:05d}.safetensors"
    if not path.exists():
        return None
    text = Text.from_file(path, drafts)
    if (text.prompt_ids, text.seed) != (prompt_ids, seed):
        raise InputError(f"{path} is of another prompt or seed: give the same prompts, or choose another folder")
    return text


# ---- which models a trace is of ----


def check_models(folder: Path, settings: Mapping[str, Any], decoder: SpeculativeDecoder) -> None:
    """Refuse a trace of other models.

    Raises:
        InputError: names the model that differs.
    """
    found = model_settings(decoder)
    for what, value in found.items():
        if settings.get(what) != value:
            raise InputError(
                f"{folder} is a trace of other models: its {what} is {json.dumps(settings.get(what))[:200]}, the "
                f"decoder's {json.dumps(value)[:200]}"
            )


def model_settings(decoder: SpeculativeDecoder) -> dict[str, Any]:
    """Return what identifies the target, its tokens, the drafts and the arithmetic."""
    target, tokenizer = decoder.target, decoder.tokenizer
    return {
        "target": {"class": target.name, "weights": _fingerprint(target.model)},
        "tokenizer": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "drafts": [_draft_settings(draft) for draft in decoder.drafts],
        "dtype": str(target.dtype).removeprefix("torch."),
    }


def model_name(model: TreeModel) -> str:
    """Return what a model is called, without the folders before it."""
    full = str(getattr(model.model.config, "_name_or_path", "")) or model.name
    return full.rstrip("/").split("/")[-1]


def versions() -> dict[str, str]:
    """Return the versions that arithmetic may depend on."""
    return {name: version(name) for name in ("specinfer", "torch", "transformers")}


def _draft_settings(draft: Any) -> dict[str, Any]:
    model = getattr(draft, "model", None)
    weights = _fingerprint(model.model) if isinstance(model, TreeModel) else None
    own = {"max_ngram": draft.max_ngram} if hasattr(draft, "max_ngram") else {}
    return {"name": draft.name, "weights": weights, **own}


def _fingerprint(model: torch.nn.Module) -> str:
    """Return the SHA-256 of every weight's name, type, shape and a few of its entries."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        flat = weight.detach().reshape(-1)
        sketch = flat[:: max(1, len(flat) // SKETCH)].double().cpu().numpy()
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode() + sketch.tobytes())
    return digest.hexdigest()[:32]
