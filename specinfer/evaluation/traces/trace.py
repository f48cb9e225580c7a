"""A trace: the distributions of target and drafts along texts, and the trees that the drafts would grow.

Knows: arrays and the folder that holds them.  Does not know: how models run, verification.

A trace is host data (numpy).  Along one text of n new tokens, D levels deep:

    position i   after i new tokens: the next step's root is the last of them
    (i, j)       the draft at position i, after it has also drafted the next j tokens of the text itself.  It is asked
                 for token i + j.  An EAGLE-style head reads its own states there, so this is not position i + j

A folder holds ``settings.json`` (what made it, and the format), ``records.jsonl``, a line per prompt, and one
``.safetensors`` file per text, written when the text is done.  The line has a digest of settings and file, so that what
is read is what was recorded.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from specinfer.common.files import expanded, locked, read_json, write_whole
from specinfer.common.records import SETTINGS, Record, Records
from specinfer.common.values import checked_count
from specinfer.common.versions import versions
from specinfer.decoder import SpeculativeDecoder
from specinfer.errors import InputError
from specinfer.evaluation.provenance import machine, models_of

FORMAT = 5
FIELDS = {"number"}  # of every record
LEASTS = {"nodes": 0, "depth": 1, "top": 1, "draws": 1, "max_new_tokens": 2}
TOP = 16  # candidates kept per node, also where whole distributions are kept

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]


class Sizes(NamedTuple):
    """How much is recorded: see `record`."""

    nodes: int  # of best-first trees
    depth: int
    top: int | None  # candidates and tokens of distributions; None = whole distributions
    draws: int
    max_new_tokens: int

    def checked(self) -> "Sizes":
        """Return these sizes as plain numbers; raise `InputError` for one that is unusable."""
        given = {name: size for name, size in self._asdict().items() if name != "top" or size is not None}
        advice = "leaves nothing to record"
        return self._replace(**{name: checked_count(name, size, LEASTS[name], advice) for name, size in given.items()})


@dataclass(frozen=True)
class Drafted:
    """The proposals that one draft would have made along one text.

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
        tests: (n, D, K + 1) c_1 ... c_(K+1) of draws with replacement (`closed_forms`); K = 0 when greedy.
        without_replacement: (n, D, K) the probability that token i + j was accepted among 1 ... K draws.
        accepted_without_replacement: (n, D, K) the probability that one of them is accepted, whichever token comes.
        best, best_without_replacement: (n, D, K) and (n, D, 2 at most) the largest probability that one of 1, 2, ...
            draws is accepted, over all rules that emit exactly the target's distribution (`transport`).
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
    accepted_without_replacement: Floats
    best: Floats
    best_without_replacement: Floats

    def candidates(self, coupled: bool = True) -> Ids:
        """Return the tokens that the draft ranks first, (n, D, k); if not coupled, by its distribution.  -1 = none."""
        return self.tokens if coupled else np.where(self.distribution_probs > 0, self.distribution_tokens, -1)


@dataclass(frozen=True)
class TraceText:
    """One text of the target, and the record along it.

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
        arrays |= {f"{i}.{name}": array for i, d in enumerate(self.drafted) for name, array in vars(d).items()}
        # safetensors would write a view with gaps wrong
        return save({name: np.ascontiguousarray(a) for name, a in arrays.items()}, {"seed": str(self.seed)})

    @classmethod
    def from_file(cls, path: Path) -> "TraceText":
        """Map a file of `to_bytes`: what is used of its arrays is in memory, and the system may drop it again."""
        columns: dict[str, dict[str, np.ndarray]] = {}  # by draft; "" are the text's
        with safe_open(path, "pt") as file:  # "np" would read the whole file
            for name in file.keys():  # noqa: SIM118 (no mapping)
                draft, _, column = name.rpartition(".")
                columns.setdefault(draft, {})[column] = file.get_tensor(name).numpy()
            seed = int(file.metadata()["seed"])
        text = columns.pop("")
        prompt_ids, token_ids = (text.pop(name).tolist() for name in ("prompt_ids", "token_ids"))
        drafted = tuple(Drafted(**columns[str(i)]) for i in range(len(columns)))
        return cls(prompt_ids=prompt_ids, token_ids=token_ids, seed=seed, drafted=drafted, **text)


@dataclass(frozen=True)
class Trace:
    """Texts of one target and the proposals of its drafts along them: see `record` and `replay`.

    Attributes:
        settings: what made them.
        texts: in the order of the prompts.
        refused: prompts that have no text, by number from 0, and why.
    """

    settings: Record
    texts: Sequence[TraceText]
    refused: Mapping[int, str] = field(default_factory=dict)

    @property
    def drafts(self) -> list[str]:
        """The drafts' names, in the order of `TraceText.drafted`."""
        return [draft["name"] for draft in self.settings["drafts"]]

    @property
    def by_run(self) -> set[int]:
        """The drafts, by index, whose proposals depend on more than the text: another run has others."""
        return {*self.settings.get("by_run", ())}

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
            InputError: no draft has the name or index, or several have the name.
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
        with locked(folder) as held:
            kept = TraceFolder(held, self.settings)
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
        folder = expanded(folder)
        settings = read_json(folder / SETTINGS)
        if not isinstance(settings, dict) or "format" not in settings:
            raise InputError(f"{folder} holds no trace: record one with `specinfer record`")
        if settings["format"] != FORMAT:
            raise InputError(
                f"{folder} holds a trace of format {json.dumps(settings['format']):.40}, and this version reads format "
                f"{FORMAT}: record it again, or use the version that wrote it"
            )
        for what, value in ({} if decoder is None else models_of(decoder)).items():
            if settings.get(what) != value:
                raise InputError(
                    f"{folder} is a trace of other models: its {what} is {json.dumps(settings.get(what))[:200]}, the "
                    f"decoder's {json.dumps(value)[:200]}"
                )
        kept = TraceFolder(folder, settings)
        texts = tuple(map(kept.read, kept.finished()))
        if not texts:
            raise InputError(f"{folder} holds a trace without any finished text: run the recording again")
        return cls(settings, texts, kept.refused())


class TraceFolder:
    """The finished texts of a folder.  Whoever writes holds the folder (`locked`).

    Args:
        folder: where they are.
        settings: what made them.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        self.folder, self.records = folder, Records(folder, FIELDS, "a trace")
        self.settings = json.dumps(dict(settings), sort_keys=True).encode()

    @cached_property
    def newest(self) -> dict[int, Record]:
        """The last record of each number.

        Raises:
            InputError: a record is damaged.
        """
        found = {record["number"]: record for record in self.records}
        if not all(isinstance(number, int) for number in found):
            raise InputError(f"{self.records.path} is damaged: a text has no number; record again into another folder")
        return found

    def path(self, number: int) -> Path:
        """Return where the text of a prompt is kept."""
        return self.folder / f"{number:05d}.safetensors"

    def finished(self) -> list[int]:
        """Return the numbers of prompts whose texts are there."""
        written = [number for number, record in self.newest.items() if "error" not in record]
        return sorted(number for number in written if self.path(number).exists())

    def refused(self) -> dict[int, str]:
        """Return why prompts have no text, by number."""
        return {number: record["error"] for number, record in self.newest.items() if "error" in record}

    def read(self, number: int) -> TraceText:
        """Return a finished text.

        Raises:
            InputError: its file cannot be read, or file or settings are not those that were written.
        """
        path = self.path(number)
        try:
            found = self._digest(path.read_bytes())
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        if found != self.newest[number].get("sha256"):
            raise InputError(f"{path} or {SETTINGS} is not as it was recorded: remove {path.name} and record it again")
        return TraceText.from_file(path)

    def add(self, number: int, text: TraceText) -> None:
        """Write one finished text, then its record."""
        data = text.to_bytes()
        write_whole(self.path(number), data)
        sizes = {"prompt_tokens": len(text.prompt_ids), "new_tokens": len(text.token_ids)}
        self._note({"number": number, "seed": text.seed, **sizes, "sha256": self._digest(data)})

    def refuse(self, number: int, reason: str) -> None:
        """Note why a prompt has no text."""
        self._note({"number": number, "error": reason})

    def _note(self, record: Record) -> None:
        self.records.append(record)
        self.newest[record["number"]] = record

    def _digest(self, data: bytes) -> str:
        return hashlib.sha256(self.settings + data).hexdigest()


def trace_settings(decoder: SpeculativeDecoder, sizes: Mapping[str, object], temperature: float) -> Record:
    """Return the settings that all texts of a trace share."""
    target = decoder.target
    name = str(getattr(target.model.config, "_name_or_path", "")) or target.name
    return {
        "format": FORMAT,
        "model": name.rstrip("/").split("/")[-1],
        **models_of(decoder),
        "by_run": [i for i, draft in enumerate(decoder.drafts) if draft.learns or not draft.by_text],
        **sizes,
        "temperature": temperature,
        **machine(target.device),
        **versions(),
    }
