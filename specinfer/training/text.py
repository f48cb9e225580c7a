"""The text that drafts learn from: the target's own and given text, with the target's state that chose each token.

Knows: prompt files, the engine, shards.  Does not know: what is trained on them.

The engine hands the target's hidden states to drafts as it decodes, so a draft that proposes nothing and keeps what it
is handed records them at no extra pass.  A finished batch is a shard, `text/00012.safetensors`, of texts end to end:
``ids`` int32 (N,), ``states`` (N, K, H) in the target's dtype, the K aux_states states of the target that chose each
token (zeros for a text's first, which none chose), and per text ``lengths``, ``prompt_lengths`` (0: the text was given)
and ``temperatures`` (1 where the text was given: a draft learns the target's distribution as it is).
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from math import inf
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from specinfer.attention import TreeModel, running
from specinfer.common.files import lock_settings, write_whole
from specinfer.decoder import SpeculativeDecoder
from specinfer.drafts.base import DraftContext
from specinfer.drafts.head import target_fingerprint
from specinfer.engine.gumbel import key
from specinfer.engine.sampling import whole_distribution
from specinfer.engine.stopping import Stopping
from specinfer.errors import InputError
from specinfer.prompts import check_ids, encode, read_lines, read_rows
from specinfer.training.data import LONGEST
from specinfer.tree import Chain

BATCH = 64  # texts per shard
PIECE = 512  # tokens of given text that are read together
AUX_LAYERS = (0.4, 0.73, 1.0)  # depths of the target whose states are kept, the last being its output
TEXT = 4  # noise stream of the texts' seeds; 1 to 3 are `noise`'s

Progress = Callable[[int, int, dict[str, Any]], None]  # texts done, texts in all, figures


class Prompt(NamedTuple):
    """A prompt (or a document) and where it stands."""

    text: str
    file: str
    line: int

    @property
    def place(self) -> str:
        """``file, line n``."""
        return f"{self.file}, line {self.line}"


@dataclass(frozen=True)
class TextSettings:
    """What the target writes."""

    samples: int | None = None  # texts; None: one per prompt
    new_tokens: int = 144
    temperatures: tuple[float, ...] = (
        0.0,
        0.7,
        1.0,
    )  # take turns over prompts; the whole distribution: no top-k, no top-p
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("new_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name}={value} makes no text: give at least {least}")
        if not self.temperatures or not all(0 <= temperature < inf for temperature in self.temperatures):
            raise InputError(f"temperatures={self.temperatures}: give numbers of at least 0, such as 0,0.7,1")


class TextJob(NamedTuple):
    """One text to make: a prompt to continue, or given text to read (``seed`` is None)."""

    ids: list[int]
    temperature: float
    seed: int | None


# ---- what to write ----


def read_prompts(files: Sequence[Path]) -> list[Prompt]:
    """Read prompts: JSON lines with "prompt" (of rows with "split", only "train"), or .txt with one prompt a line.

    Raises:
        InputError: a file that cannot be read, a row that is no prompt, an empty prompt, or none at all; by file and
            line.
    """
    found = []
    for file in files:
        if Path(file).suffix == ".txt":
            rows = [(number, line) for number, line in read_lines(file) if line.strip()]
        else:
            rows = [(number, row["prompt"]) for number, row in read_rows(file) if row.get("split", "train") == "train"]
        found += [Prompt(text, str(file), number) for number, text in rows]
    if not found:
        raise InputError(f'no prompts to train on in {", ".join(map(str, files)) or "no file"}: give rows of "train"')
    return found


def read_documents(files: Sequence[Path]) -> list[Prompt]:
    """Read text files: documents are blocks between blank lines, or lines where there are no blank ones.

    Raises:
        InputError: a file that cannot be read or holds no text.
    """
    found: list[Prompt] = []
    for file in files:
        groups = groupby(read_lines(file), lambda numbered: bool(numbered[1].strip()))
        blocks = [list(group) for filled, group in groups if filled]
        if not blocks:
            raise InputError(f"{file} holds no text")
        if len(blocks) == 1:  # no blank lines but at the ends
            blocks = [[numbered] for numbered in blocks[0]]
        for block in blocks:
            found.append(Prompt("\n".join(line for _, line in block), str(file), block[0][0]))
    return found


def plan_text(
    target: TreeModel, tokenizer: Any, prompts: Sequence[Prompt], documents: Sequence[Prompt], settings: TextSettings
) -> list[list[TextJob]]:
    """Return the batches to make, always the same for the same arguments; no model runs.

    The k-th text of a prompt has the k-th temperature from the prompt's own on; greedy text is made once a prompt.
    Batches are of one temperature and of similar length, in random order, so that any part of them is a fair sample.

    Raises:
        InputError: no tokenizer, a prompt that is too long for the target, or more texts than there can be.
    """
    if tokenizer is None:
        raise InputError("the target has no tokenizer: text cannot be made without one")
    limit = target.position_limit()
    room = min((limit or inf) - settings.new_tokens, LONGEST - 1)  # texts are learnt from that far
    rows = [encode(prompt.text, tokenizer).rows[0] for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        if len(row) > room:
            raise InputError(
                f"{prompt.place}: {len(row)} prompt tokens + {settings.new_tokens} new ones exceed the target's "
                f"context of {limit}, or the {LONGEST} tokens of a text that are learnt from: shorten the prompt"
            )
    size = int(min(PIECE, limit or PIECE))
    read = [list(tokenizer(document.text)["input_ids"]) for document in documents]
    pieces = [ids[start : start + size] for ids in read for start in range(0, len(ids), size)]
    check_ids([*rows, *pieces], target.vocab_size)
    jobs = _own_jobs(rows, settings) if rows else []
    batches = _batches(jobs) + _batches([TextJob(piece, 1.0, None) for piece in pieces if len(piece) > 1])
    Random(settings.seed).shuffle(batches)
    return batches


def _own_jobs(rows: Sequence[list[int]], settings: TextSettings) -> list[TextJob]:
    temperatures = settings.temperatures
    warm = [temperature for temperature in temperatures if temperature > 0]
    samples = settings.samples or len(rows)
    if not warm and samples > len(rows):
        raise InputError(
            f"{samples} texts of {len(rows)} prompts cannot differ at temperature 0: add a temperature above 0, or ask "
            "for fewer"
        )
    jobs = []
    for number in range(samples):
        turn, place = divmod(number, len(rows))
        choices = temperatures if turn < len(temperatures) and warm else warm or temperatures
        own = key(settings.seed, TEXT, number)
        jobs.append(TextJob(rows[place], choices[(place + turn) % len(choices)], own))
    return jobs


def _batches(jobs: Sequence[TextJob]) -> list[list[TextJob]]:
    order = sorted(jobs, key=lambda job: (job.temperature, len(job.ids)))
    groups = [list(group) for _, group in groupby(order, lambda job: job.temperature)]
    return [group[start : start + BATCH] for group in groups for start in range(0, len(group), BATCH)]


# ---- writing it ----


def default_aux_layers(model: Any) -> tuple[int, ...]:
    """Return the hidden states that are kept: of an early, a late and the last layer, as transformers counts."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return tuple(sorted({max(1, round(share * layers)) for share in AUX_LAYERS}))


def lock_text_settings(
    model: Any,
    tokenizer: Any,
    folder: Path,
    batches: Sequence[Sequence[TextJob]],
    aux_layers: Sequence[int],
    settings: Any,
) -> None:
    """Pin a folder to the text that is made in it.

    Raises:
        InputError: the folder holds text of another target or other settings, or cannot be written.
    """
    manifest = {
        "target": target_fingerprint(model, tokenizer),
        "dtype": str(model.dtype).removeprefix("torch."),
        "aux_layers": aux_layers,
        "distribution": "whole",
        **asdict(settings),
        "batches": len(batches),
        "texts": hashlib.sha256(json.dumps(batches).encode()).hexdigest(),  # prompts, given text, temperatures, seeds
    }
    empty = not any(folder.glob("*.safetensors"))
    lock_settings(folder / "manifest.json", manifest, "take the old settings, or choose another --out", empty)


def write_text(
    model: Any,
    tokenizer: Any,
    batches: Sequence[Sequence[TextJob]],
    folder: Path,
    aux_layers: Sequence[int],
    new_tokens: int,
    progress: Progress = lambda *_: None,
) -> list[Path]:
    """Make every batch that is not there yet; return all shards, in the batches' order.

    Raises:
        SpecinferError: the disk is full; finished shards stay.
        InputError: the folder cannot be written.
    """
    recorder = Recorder(aux_layers)
    decoder = SpeculativeDecoder(model, tokenizer, [recorder], tree=Chain(0))
    shards = [folder / f"{number:05}.safetensors" for number in range(len(batches))]
    done, total, tokens = 0, sum(map(len, batches)), 0
    for shard, batch in zip(shards, batches, strict=True):
        if not shard.exists():
            own = batch[0].seed is not None
            ids, states = _continue(decoder, recorder, batch, new_tokens) if own else _follow(decoder, recorder, batch)
            write_whole(shard, _packed(batch, ids, states))
        done, tokens = done + len(batch), tokens + count([shard])[1]
        progress(done, total, {"tokens": tokens})
    return shards


def count(shards: Sequence[Path]) -> tuple[int, int]:
    """Return how many texts and tokens shards hold.

    Raises:
        InputError: one is damaged.
    """
    lengths = []
    for shard in shards:
        try:
            with safe_open(shard, "pt") as file:
                lengths += file.get_tensor("lengths").tolist()
        except (OSError, SafetensorError) as error:
            raise InputError(f"{shard} is damaged ({error}): remove it, and its text is made again") from error
    return len(lengths), sum(lengths)


def _continue(
    decoder: SpeculativeDecoder, recorder: "Recorder", batch: Sequence[TextJob], new_tokens: int
) -> tuple[list[list[int]], list[Tensor]]:
    """Let the target continue prompts; return ids and states of whole texts."""
    prompts, seeds = [job.ids for job in batch], [job.seed or 0 for job in batch]
    run = decoder.open(prompts, max_new_tokens=new_tokens, seed=seeds, **whole_distribution(batch[0].temperature))
    for row in run.rows:
        row.stopping = StopOneLater(row.stopping)
    run.finish()
    return [row.ids[:-1] for row in run.rows], recorder.take()


def _follow(
    decoder: SpeculativeDecoder, recorder: "Recorder", batch: Sequence[TextJob]
) -> tuple[list[list[int]], list[Tensor]]:
    """Let the target read given text; return ids and states."""
    ids = [job.ids for job in batch]
    session = decoder.target.session(len(ids), max(map(len, ids)), aux_layers=recorder.aux_layers)
    with running(decoder.target):
        states = session.prefill([row[:-1] for row in ids])
    return ids, [row for row in states if row is not None]


def _packed(batch: Sequence[TextJob], ids: Sequence[Sequence[int]], states: Sequence[Tensor]) -> bytes:
    """Return a shard; ``states`` are of each text's tokens but the first, which gets zeros."""
    columns = {
        "ids": torch.tensor([token for row in ids for token in row], dtype=torch.int32),
        "lengths": torch.tensor([len(row) for row in ids], dtype=torch.int32),
        "prompt_lengths": torch.tensor([0 if job.seed is None else len(job.ids) for job in batch], dtype=torch.int32),
        "temperatures": torch.tensor([job.temperature for job in batch]),
        "states": torch.cat([part for row in states for part in (torch.zeros_like(row[:1]), row)]).cpu(),
    }
    return save(columns, {"format": "pt"})


class StopOneLater(Stopping):
    """Ends a row one token late: its last token is committed, too, and the state that chose it handed out."""

    def __init__(self, stopping: Stopping) -> None:
        self.on_time, self.budget, self.ended = stopping, stopping.budget + 1, ""

    def begin(self) -> None:
        """Start the clock."""
        self.on_time.begin()

    def reason(self, ids: Sequence[int], new_tokens: int) -> str | None:
        """Return why the text ended with the last id but one."""
        ended, self.ended = self.ended, self.on_time.reason(ids, new_tokens) or ""
        return ended or None


class Recorder:
    """A draft that proposes nothing and keeps the target's states.

    Args:
        aux_layers: which, ascending.
    """

    name = "recorder"

    def __init__(self, aux_layers: Sequence[int]) -> None:
        self.aux_layers = tuple(aux_layers)
        self.rows: list[list[Tensor]] = []

    def open(self, context: DraftContext) -> "RecorderSession":
        """Start with the states of the rows' prompts."""
        self.rows = [[] if states is None else [states] for states in context.states]
        return RecorderSession(self.rows)

    def take(self) -> list[Tensor]:
        """Return the states of every row of the last run, (n - 1, K, H) for n tokens, and forget them."""
        rows, self.rows = self.rows, []
        return [torch.cat(row) for row in rows]


class RecorderSession:
    """The rows that are still active."""

    passes, seconds, prefill_seconds = 0, 0.0, 0.0

    def __init__(self, rows: Sequence[list[Tensor]]) -> None:
        self.active = list(rows)

    def propose(self, policy: Any, max_depth: int) -> list[Any]:
        """Never asked: trees have no nodes."""
        raise NotImplementedError

    def commit(self, tokens: Sequence[Sequence[int] | None], states: Sequence[Tensor | None] = ()) -> None:
        """Keep the states that chose what was committed."""
        for row, own in zip(self.active, states, strict=True):
            row += [] if own is None else [own]
        self.active = [row for row, new in zip(self.active, tokens, strict=True) if new is not None]
