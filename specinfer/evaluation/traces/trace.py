"""A trace: what the target's and the drafts' distributions were along texts, and the trees that the drafts would grow.

Knows: arrays and the folder that holds them.  Does not know: how models run, verification.

A trace is host data (numpy).  Along one text of n new tokens, D levels deep:

    position i   after i new tokens: the next step's root is the last of them
    (i, j)       the draft at position i, after it has also drafted the next j tokens of the text itself.  It is asked
                 for token i + j.  An EAGLE-style head reads its own states there, so this is not position i + j

A folder holds ``settings.json`` (what made it, and the format), ``records.jsonl``, a line per prompt, and one
``.safetensors`` file per text, written when the text is done.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from specinfer.common.files import locked, read_json, write_whole
from specinfer.common.records import SETTINGS, Records
from specinfer.common.values import checked_count, checked_temperature
from specinfer.common.versions import versions
from specinfer.decoder import SpeculativeDecoder
from specinfer.errors import InputError
from specinfer.evaluation.provenance import machine, models_of

FORMAT = 3
FIELDS = {"number"}  # of every record
KEPT = 256  # texts of a folder that stay in memory
LEASTS = {"nodes": 0, "depth": 1, "top": 1, "draws": 1, "max_new_tokens": 2}  # whole numbers that reading needs
SHAPE = {"drafts", "temperature", *LEASTS}
ROUNDING = 1e-4  # of probabilities
TREE = ("first", "tree_tokens", "tree_parents", "tree_scores")
TOP = 16  # candidates kept per node, also where whole distributions are kept

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Column = tuple[tuple[int | None, ...], float, float]  # shape (None: any size), least and greatest value


class Sizes(NamedTuple):
    """How much is recorded: see `record`."""

    nodes: int  # of best-first trees
    depth: int
    top: int | None  # candidates and tokens of distributions; None = whole distributions
    draws: int
    max_new_tokens: int

    @classmethod
    def checked(cls, sizes: Mapping[str, Any], advice: str = "") -> "Sizes":
        """Return the sizes among other settings; raise `InputError` for one that is unusable."""
        given = {name: sizes[name] for name in LEASTS if name != "top" or sizes["top"] is not None}
        found: dict[str, Any] = {name: checked_count(name, size, LEASTS[name], advice) for name, size in given.items()}
        return cls(**{"top": None} | found)


@dataclass(frozen=True)
class Drafted:
    """What one draft would have proposed along one text.

    Attributes:
        first: (n + 1,) where each position's tree begins in the three columns below.
        tree_tokens, tree_parents, tree_scores: every node of any best-first tree of at most the recorded nodes and
            depth, best first.  A parent is a number within the position, where the root is node 0 and not among them;
            a score is the log-probability of the path.
        tokens, log_probs: (n, D, k) the draft's first choices for token i + j and their log-probabilities, best first;
            when sampling, by the noise shared with the target.  Token -1 = none.
        distribution_tokens, distribution_probs: (n, D, k) the likeliest tokens of its distribution q without that
            noise.  The other tokens share the rest.  k = V for whole distributions, 0 when greedy.
        probability: (n, D) q of token i + j.
        tests: (n, D, K) c_1 ... c_K of draws with replacement (`acceptance`); K = 0 when greedy.
        without_replacement: (n, D, K) the probability that token i + j was accepted among 1 ... K draws.
    """

    first: Ids
    tree_tokens: Ids
    tree_parents: Ids
    tree_scores: Floats
    tokens: Ids
    log_probs: Floats
    distribution_tokens: Ids
    distribution_probs: Floats
    probability: Floats
    tests: Floats
    without_replacement: Floats

    @classmethod
    def blank(cls, n: int, depth: int, top: int, kept: int, draws: int) -> "Drafted":
        """Return columns to be filled, which hold their least values, and no trees; ``kept`` is k of distributions."""
        columns = _drafted_columns(n, depth, top, kept, draws, inf)
        arrays = {name: np.full([size or 0 for size in c[0]], c[1], _dtype(name)) for name, c in columns.items()}
        return cls(**arrays)

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns as files hold them: their nodes count from 0, so the root is -1."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"tree_parents": self.tree_parents - 1}

    @classmethod
    def read(cls, columns: Mapping[str, Any]) -> "Drafted":
        """Return what `columns` wrote."""
        return cls(**{**columns, "tree_parents": columns["tree_parents"] + 1})

    def candidates(self, coupled: bool = True) -> Ids:
        """Return the tokens that the draft ranks first, (n, D, k); if not coupled, by its distribution.  -1 = none."""
        return self.tokens if coupled else np.where(self.distribution_probs > 0, self.distribution_tokens, -1)


@dataclass(frozen=True)
class TraceText:
    """One text of the target, and what was recorded along it.

    Attributes:
        prompt_ids, token_ids: the prompt, and the n new tokens.
        seed: of the noise that chose them, when sampling.
        target_tokens, target_probs: (n, k) the likeliest tokens of the target's distribution p.
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

    def root(self, position: int) -> int:
        """Return the token that the step at a position begins with."""
        return self.token_ids[position - 1] if position else self.prompt_ids[-1]

    def ranks(self, draft: int, coupled: bool = True) -> np.ndarray:
        """Return the rank of token i + j among a draft's `candidates`, (n, D), from 0; -1 = it is not among them."""
        tokens = self.drafted[draft].candidates(coupled)
        depth = tokens.shape[1]
        hit = tokens == sliding_window_view([*self.token_ids, *[-2] * (depth - 1)], depth)[:, :, None]
        return np.where(hit.any(2), hit.argmax(2), -1)

    def to_bytes(self) -> bytes:
        """Return the text as a safetensors file."""
        arrays = {name: getattr(self, name) for name in ("target_tokens", "target_probs", "probability")}
        arrays |= {name: np.array(getattr(self, name), np.int32) for name in ("prompt_ids", "token_ids")}
        arrays |= {f"{i}.{name}": array for i, d in enumerate(self.drafted) for name, array in d.columns().items()}
        # safetensors would write a view with gaps wrong
        return save({name: np.ascontiguousarray(a) for name, a in arrays.items()}, {"seed": str(self.seed)})

    @classmethod
    def from_file(cls, path: Path, settings: Mapping[str, Any], vocab_size: int | None = None) -> "TraceText":
        """Read what `to_bytes` made.

        Args:
            path: of the file.
            settings: of the trace, checked.
            vocab_size: of the target, if it is at hand.

        Raises:
            InputError: the file is damaged, or no text of such a trace.
        """
        try:
            with safe_open(path, "np") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
                seed = int(file.metadata()["seed"])
            _check_arrays(arrays, settings, vocab_size or np.iinfo(np.int32).max)
            drafted = tuple(
                Drafted.read({f.name: arrays.pop(f"{i}.{f.name}") for f in fields(Drafted)})
                for i in range(len(settings["drafts"]))
            )
            ids = {name: arrays.pop(name).tolist() for name in ("prompt_ids", "token_ids")}
            return cls(seed=seed, drafted=drafted, **ids, **arrays)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{path} is no text of this trace ({reason}): remove it and record it again") from error


class StoredTexts(Sequence[TraceText]):
    """Texts in files, each read when it is asked for; a few of them stay in memory."""

    def __init__(self, paths: Sequence[Path], settings: Mapping[str, Any], vocab_size: int | None) -> None:
        self.paths, self.settings, self.vocab_size = paths, settings, vocab_size
        self.kept: dict[int, TraceText] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return StoredTexts(self.paths[index], self.settings, self.vocab_size)
        number = range(len(self))[index]
        if number not in self.kept:
            if len(self.kept) == KEPT:
                del self.kept[next(iter(self.kept))]
            self.kept[number] = TraceText.from_file(self.paths[number], self.settings, self.vocab_size)
        return self.kept[number]


@dataclass(frozen=True)
class Trace:
    """Texts of one target and what its drafts would have proposed along them: see `record` and `replay`.

    Attributes:
        settings: what made them.
        texts: in the order of the prompts.
        refused: prompts that have no text, by number from 0, and why.
    """

    settings: Mapping[str, Any]
    texts: Sequence[TraceText]
    refused: Mapping[int, str] = field(default_factory=dict)

    @property
    def drafts(self) -> list[str]:
        """The drafts' names, in the order of `TraceText.drafted`."""
        return [draft["name"] for draft in self.settings["drafts"]]

    @property
    def sampling(self) -> bool:
        """Whether the texts were sampled; otherwise they are greedy."""
        return bool(self.settings["temperature"])

    @property
    def tokens(self) -> int:
        """The new tokens of all texts."""
        return sum(len(text.token_ids) for text in self.texts)

    def __repr__(self) -> str:
        how = f"T = {self.settings['temperature']:g}" if self.sampling else "greedy"
        refused = f"{len(self.refused)} prompts refused, " if self.refused else ""
        sizes = f"{len(self.texts)} texts, {self.tokens} tokens"
        return f"Trace({sizes}, {refused}{how}, drafts {', '.join(self.drafts)})"

    def draft(self, draft: int | str) -> int:
        """Return a draft's index, given its name or that index, which may be written in digits.

        Raises:
            InputError: there is no such draft, or several.
        """
        names = self.drafts
        if names.count(draft) > 1:  # type: ignore[arg-type]  # a number is no name
            raise InputError(f"the trace has several drafts called {draft!r}: name one by its index, from 0")
        if draft in names:
            return names.index(str(draft))
        index = int(draft) if str(draft).isdecimal() else len(names)
        if index >= len(names):
            raise InputError(f"the trace has no draft {draft!r}: it has {', '.join(names)} (0 to {len(names) - 1})")
        return index

    def asked(self, text: TraceText) -> np.ndarray:
        """Return where a draft was asked for token i + j, (n, D): not for the last one that the budget allows."""
        n, budget = len(text.token_ids), self.settings["max_new_tokens"]
        return np.arange(n)[:, None] + np.arange(self.settings["depth"]) < min(n, budget - 1)

    def save(self, folder: str | Path) -> None:
        """Write the trace; texts that the folder holds beyond these are left alone.

        Raises:
            InputError: the folder holds a trace of other settings, another run writes to it, or it cannot be written.
        """
        with locked(folder):
            kept = TraceFolder(Path(folder))
            kept.records.begin(dict(self.settings))
            for number, reason in self.refused.items():
                kept.refuse(number, reason)
            numbers = (number for number in count() if number not in self.refused)
            for number, text in zip(numbers, self.texts, strict=False):
                kept.add(number, text)

    @classmethod
    def load(cls, folder: str | Path, decoder: SpeculativeDecoder | None = None) -> "Trace":
        """Read a trace, complete or as far as it was recorded.

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
                f"{folder} holds a trace of format {json.dumps(settings['format']):.40}, and this version reads format "
                f"{FORMAT}: record it again, or use the version that wrote it"
            )
        _check_settings(folder / SETTINGS, settings)
        if decoder is not None:
            check_models(folder, settings, decoder)
        kept = TraceFolder(folder)
        paths = [kept.path(number) for number in kept.finished()]
        if not paths:
            raise InputError(f"{folder} holds a trace without any finished text: run the recording again")
        texts = StoredTexts(paths, settings, None if decoder is None else decoder.target.vocab_size)
        for _ in texts:  # reads each: none is damaged
            pass
        return cls(settings, texts, kept.refused())


class TraceFolder:
    """The finished texts of a folder.  Whoever writes holds the folder (`locked`)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.records = folder, Records(folder, FIELDS, "a trace")

    def path(self, number: int) -> Path:
        """Return where the text of a prompt is kept."""
        return self.folder / f"{number:05d}.safetensors"

    def finished(self) -> list[int]:
        """Return the numbers of prompts whose texts are there."""
        written = [number for number, record in self._newest().items() if "error" not in record]
        return sorted(number for number in written if self.path(number).exists())

    def refused(self) -> dict[int, str]:
        """Return why prompts have no text, by number."""
        return {number: record["error"] for number, record in self._newest().items() if "error" in record}

    def _newest(self) -> dict[int, dict[str, Any]]:
        """Return the last record of each number."""
        found = {record["number"]: record for record in self.records}
        if not all(isinstance(number, int) for number in found):
            raise InputError(f"{self.records.path} is damaged: a number is none; record again into another folder")
        return found

    def add(self, number: int, text: TraceText) -> None:
        """Write one finished text, then its record."""
        write_whole(self.path(number), text.to_bytes())
        sizes = {"prompt_tokens": len(text.prompt_ids), "new_tokens": len(text.token_ids)}
        self.records.append({"number": number, "seed": text.seed, **sizes})

    def refuse(self, number: int, reason: str) -> None:
        """Note why a prompt has no text."""
        self.records.append({"number": number, "error": reason})


# ---- is it a complete trace? ----


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise `InputError` for settings that no recording wrote."""

    drafts = settings.get("drafts")
    try:
        if missing := SHAPE - settings.keys():
            raise InputError(f"{', '.join(sorted(missing))} is missing")
        Sizes.checked(settings)
        checked_temperature(settings["temperature"])
        if not isinstance(drafts, list) or not drafts:
            raise InputError("drafts is no list of drafts")
        if not all(isinstance(draft, dict) and isinstance(draft.get("name"), str) for draft in drafts):
            raise InputError("a draft has no name")
    except InputError as error:
        raise InputError(f"{path} is damaged: {error}; record it again") from None


def _drafted_columns(n: int, depth: int, top: int, kept: int | None, draws: int, last: float) -> dict[str, Column]:
    """Return the columns of `Drafted` for n tokens, and a vocabulary that ends with token ``last``."""
    most = 1 + ROUNDING
    return {
        "first": ((n + 1,), 0, inf),
        "tree_tokens": ((None,), 0, last),
        "tree_parents": ((None,), -1, inf),
        "tree_scores": ((None,), -inf, ROUNDING),
        "tokens": ((n, depth, top), -1, last),
        "log_probs": ((n, depth, top), -inf, 0),
        "distribution_tokens": ((n, depth, kept), 0, last),
        "distribution_probs": ((n, depth, kept), 0, most),
        "probability": ((n, depth), 0, most),
        "tests": ((n, depth, draws), 0, draws + ROUNDING),
        "without_replacement": ((n, depth, draws), 0, most),
    }


def _dtype(name: str) -> Any:
    return np.int32 if name.endswith(("ids", "tokens", "first", "parents")) else np.float32


def _check_arrays(arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any], vocab_size: int) -> None:
    """Raise `ValueError` or `KeyError` for columns that no recording with these settings wrote."""
    n, last, drafts = arrays["token_ids"].size, vocab_size - 1, range(len(settings["drafts"]))
    columns: dict[str, Column] = {
        "prompt_ids": ((None,), 0, last),
        "token_ids": ((None,), 0, last),
        "target_tokens": ((n, None), 0, last),
        "target_probs": ((n, None), 0, 1 + ROUNDING),
        "probability": ((n,), 0, 1 + ROUNDING),
    }
    draws = settings["draws"] if settings["temperature"] else 0
    per_draft = _drafted_columns(n, settings["depth"], settings["top"] or TOP, None, draws, last)
    columns |= {f"{draft}.{name}": column for draft in drafts for name, column in per_draft.items()}
    for name, (shape, least, greatest) in columns.items():
        array = arrays[name]
        fits = array.ndim == len(shape) and all(w in (None, s) for w, s in zip(shape, array.shape, strict=True))
        if array.dtype != _dtype(name) or not fits:
            raise ValueError(f"{name} has shape {array.shape} and type {array.dtype}")
        if not ((array >= least) & (array <= greatest)).all():
            raise ValueError(f"{name} is not within {least:g} and {greatest:g}")
    if not arrays["prompt_ids"].size or not 0 < n <= settings["max_new_tokens"]:
        raise ValueError(f"{arrays['prompt_ids'].size} tokens of a prompt, and {n} after it")
    if not arrays["probability"].all():
        raise ValueError("a token of the text has probability 0")
    for name in ("target", *(f"{draft}.distribution" for draft in drafts)):
        if arrays[f"{name}_tokens"].shape != arrays[f"{name}_probs"].shape:
            raise ValueError(f"{name}_tokens and {name}_probs differ in shape")
    for draft in drafts:
        _check_trees(settings["nodes"], *(arrays[f"{draft}.{name}"] for name in TREE))


def _check_trees(most: int, first: Ids, tokens: Ids, parents: Ids, scores: Floats) -> None:
    """Raise `ValueError` for columns that are not recorded trees, or not in order."""
    sizes = np.diff(first)
    if not len(tokens) == len(parents) == len(scores) == first[-1] or first[0] or (sizes < 0).any():
        raise ValueError("its trees are not as long as they should be")
    if len(tokens) and not most:
        raise ValueError("it holds trees, and none were to be recorded")
    position = np.repeat(np.arange(len(sizes)), sizes)
    if (parents >= np.arange(len(tokens)) - first[position]).any():
        raise ValueError("a node stands before its parent")
    if len(np.unique(np.stack([position, parents, tokens]), axis=1).T) < len(tokens):
        raise ValueError("two nodes with one parent have one token")
    if ((np.diff(scores) > 0) & (np.diff(position) == 0)).any():
        raise ValueError("a better node stands after a worse one")


# ---- which models a trace is of ----


def check_models(folder: Path, settings: Mapping[str, Any], decoder: SpeculativeDecoder) -> None:
    """Refuse a trace of other models.

    Raises:
        InputError: names the model that differs.
    """
    found = models_of(decoder)
    for what, value in found.items():
        if settings.get(what) != value:
            raise InputError(
                f"{folder} is a trace of other models: its {what} is {json.dumps(settings.get(what))[:200]}, the "
                f"decoder's {json.dumps(value)[:200]}"
            )


def trace_settings(decoder: SpeculativeDecoder, sizes: Mapping[str, Any], temperature: float) -> dict[str, Any]:
    """Return what all texts of a trace have in common."""
    target = decoder.target
    name = str(getattr(target.model.config, "_name_or_path", "")) or target.name
    return {
        "format": FORMAT,
        "model": name.rstrip("/").split("/")[-1],
        **models_of(decoder),
        **sizes,
        "temperature": temperature,
        **machine(target.device),
        **versions(),
    }
