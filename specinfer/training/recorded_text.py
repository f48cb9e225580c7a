"""The text that drafts learn from: the target's own and given text, with the hidden states that chose each token.

Knows: prompt files, the engine, shards.  Does not know: what is trained on them.

The engine hands the target's hidden states to drafts as it decodes.  A draft that proposes nothing and keeps these
states records them without an extra pass.  A finished batch is a shard, ``text/00012.safetensors``, which holds texts
one after the other: ``ids`` int32 (N,); ``states`` (N, K, H) in the target's dtype, the K auxiliary hidden states that
chose each token (zeros for a text's first token); and per text ``lengths``, ``prompt_lengths`` (0 for given text) and
``temperatures`` (1 for given text: a draft learns the target's distribution as it is).
"""

import hashlib
import json
from collections.abc import Sequence
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
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specinfer.attention import TreeModel
from specinfer.calls.run import Run
from specinfer.common.files import lock_settings, write_whole
from specinfer.common.progress import Progress
from specinfer.decoder import SpeculativeDecoder
from specinfer.drafts.head import target_fingerprint
from specinfer.engine.draft import Committed, Draft, DraftContext, DraftSession, Scored, States
from specinfer.engine.gumbel import TRAINING, key
from specinfer.engine.options import Options
from specinfer.engine.sampling import whole_distribution
from specinfer.engine.sequence import Stopping
from specinfer.errors import InputError
from specinfer.prompts import check_ids, encode, read_lines, read_rows
from specinfer.training.data import LONGEST
from specinfer.tree import Chain

BATCH = 64  # texts per shard
PIECE = 512  # tokens of given text that are read together
AUX_DEPTHS = (0.4, 0.73, 1.0)  # of the layers whose states are kept, as shares of all; 1 is the target's output


class TrainingPrompt(NamedTuple):
    """A prompt (or a document) and where it was read."""

    text: str
    file: str
    line: int


@dataclass(frozen=True)
class TextSettings:
    """The target's texts: at each temperature from the whole distribution, without top-k and top-p."""

    samples: int | None = None  # texts; None: one per prompt
    new_tokens: int = 144
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)  # prompts take them in turn
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("samples", self.samples), ("new_tokens", self.new_tokens)):
            if value is not None and value < 1:
                raise InputError(f"{name}={value} makes no text: give at least 1")
        if not self.temperatures or not all(0 <= temperature < inf for temperature in self.temperatures):
            raise InputError(f"temperatures={self.temperatures}: give numbers of at least 0, like 0,0.7,1")


class TextJob(NamedTuple):
    """One text to make: a prompt to continue, or given text to read (``seed`` is None)."""

    ids: list[int]
    temperature: float
    seed: int | None


TextBatch = list[TextJob]  # of one temperature, and all continued or all given


# ---- texts to write ----


def read_prompts(files: Sequence[Path]) -> list[TrainingPrompt]:
    """Read prompts: JSON lines with "prompt" (of rows with "split", only "train"), or .txt with one prompt a line.

    Raises:
        InputError: a file cannot be read, a row has no prompt or an empty one, or there is no prompt at all; the
            message names file and line.
    """
    prompts = []
    for file in files:
        if Path(file).suffix == ".txt":
            rows = [(number, line) for number, line in read_lines(file) if line.strip()]
        else:
            rows = [(number, row["prompt"]) for number, row in read_rows(file) if row.get("split", "train") == "train"]
        prompts += [TrainingPrompt(text, str(file), number) for number, text in rows]
    if not prompts:
        raise InputError(f'no prompts to train on in {", ".join(map(str, files)) or "no file"}: give rows of "train"')
    return prompts


def read_documents(files: Sequence[Path]) -> list[TrainingPrompt]:
    """Read text files: documents are blocks between blank lines, or lines in a file that is one block.

    Raises:
        InputError: a file cannot be read or holds no text.
    """
    documents: list[TrainingPrompt] = []
    for file in files:
        groups = groupby(read_lines(file), lambda numbered: bool(numbered[1].strip()))
        blocks = [list(group) for filled, group in groups if filled]
        if not blocks:
            raise InputError(f"{file} holds no text")
        if len(blocks) == 1:
            blocks = [[numbered] for numbered in blocks[0]]
        for block in blocks:
            documents.append(TrainingPrompt("\n".join(line for _, line in block), str(file), block[0][0]))
    return documents


def plan_text(
    target: TreeModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Sequence[TrainingPrompt],
    documents: Sequence[TrainingPrompt],
    settings: TextSettings,
) -> list[TextBatch]:
    """Return the batches to make, always the same for the same arguments; no model runs.

    Prompts take turns through the temperatures, and each prompt's further texts continue its turn; greedy text is made
    once a prompt.  Batches have one temperature and texts of similar length.  Their order is random, so that any part
    of them is a fair sample.

    Raises:
        InputError: no tokenizer, a prompt that is too long for the target, or more texts than can differ.
    """
    if tokenizer is None:
        raise InputError("the target has no tokenizer: text cannot be made without one")
    limit = target.position_limit()
    longest = min((limit or inf) - settings.new_tokens, LONGEST - 1)
    rows = [encode(prompt.text, tokenizer).rows[0] for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        if len(row) > longest:
            rest = (limit or inf) - len(row) if len(row) < LONGEST else 0
            advice = f"ask for at most {rest} (--new-tokens)" if rest > 0 else "shorten the prompt"
            raise InputError(
                f"{prompt.file}, line {prompt.line}: {len(row)} prompt tokens + {settings.new_tokens} new ones exceed "
                f"the target's context of {limit}, or the {LONGEST} tokens of a text that are learnt from: {advice}"
            )
    size = int(min(PIECE, (limit or inf) - 1))
    given = [list(tokenizer(document.text)["input_ids"]) for document in documents]
    pieces = [ids[start : start + size] for ids in given for start in range(0, len(ids), size)]
    check_ids([*rows, *pieces], target.vocab_size)
    batches = _batches(_prompt_jobs(rows, settings) if rows else [])
    batches += _batches([TextJob(piece, 1.0, None) for piece in pieces if len(piece) > 1])
    Random(settings.seed).shuffle(batches)
    return batches


def _prompt_jobs(rows: Sequence[list[int]], settings: TextSettings) -> list[TextJob]:
    temperatures = settings.temperatures
    positive = [temperature for temperature in temperatures if temperature > 0]
    samples = settings.samples or len(rows)
    if not positive and samples > len(rows):
        raise InputError(
            f"{samples} texts of {len(rows)} prompts cannot differ at temperature 0: add a temperature above 0, or ask "
            "for fewer"
        )
    jobs = []
    for number in range(samples):
        turn, index = divmod(number, len(rows))
        choices = temperatures if turn < len(temperatures) and positive else positive or temperatures
        temperature = choices[(index + turn) % len(choices)]
        jobs.append(TextJob(rows[index], temperature, key(settings.seed, TRAINING, number)))
    return jobs


def _batches(jobs: Sequence[TextJob]) -> list[TextBatch]:
    order = sorted(jobs, key=lambda job: (job.temperature, len(job.ids)))
    groups = [list(group) for _, group in groupby(order, lambda job: job.temperature)]
    return [group[start : start + BATCH] for group in groups for start in range(0, len(group), BATCH)]


# ---- writing it ----


def default_aux_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the hidden states that are kept: of an early, a late and the last layer, as transformers counts."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return tuple(sorted({max(1, round(depth * layers)) for depth in AUX_DEPTHS}))


@dataclass(frozen=True)
class TextFolder:
    """The text of one target, in a folder: a shard for each batch."""

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    aux_layers: Sequence[int]
    settings: TextSettings
    batches: list[TextBatch]

    def lock_settings(self) -> None:
        """Record in the folder what text is made there, or check that the record says the same.

        Raises:
            InputError: the folder holds text of another target or other settings, or cannot be written.
        """
        manifest = {
            "target": target_fingerprint(self.model, self.tokenizer),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "aux_layers": self.aux_layers,
            "distribution": "whole",
            **asdict(self.settings),
            "batches": len(self.batches),
            "texts": hashlib.sha256(json.dumps(self.batches).encode()).hexdigest(),  # ids, temperatures, seeds
        }
        empty = not any(self.folder.glob("*.safetensors"))
        lock_settings(self.folder / "manifest.json", manifest, "take the old settings, or choose another --out", empty)

    def write(self, progress: Progress) -> tuple[list[Path], int]:
        """Make every batch that is not there yet; return all shards, in the batches' order, and their tokens.

        Raises:
            SpecinferError: the disk is full; finished shards stay.
            InputError: the folder cannot be written, or a shard is damaged.
        """
        recorder = Recorder(self.aux_layers)
        decoder = SpeculativeDecoder(self.model, self.tokenizer, [recorder], tree=Chain(0))
        shards = [self.folder / f"{number:05}.safetensors" for number in range(len(self.batches))]
        texts, total, tokens = 0, sum(map(len, self.batches)), 0
        for shard, batch in zip(shards, self.batches, strict=True):
            if not shard.exists():
                write_whole(shard, _make_shard(decoder, recorder, batch, self.settings.new_tokens))
            texts, tokens = texts + len(batch), tokens + count_tokens(shard)
            progress("text", texts, total, {"tokens": tokens})
        return shards, tokens


def count_tokens(shard: Path) -> int:
    """Return how many tokens a shard holds.

    Raises:
        InputError: it is damaged.
    """
    try:
        with safe_open(shard, "pt") as file:
            return int(file.get_tensor("lengths").sum())
    except (OSError, SafetensorError) as error:
        raise InputError(f"{shard} is damaged ({error}): remove it, and its text is made again") from error


def _make_shard(decoder: SpeculativeDecoder, recorder: "Recorder", batch: TextBatch, new_tokens: int) -> bytes:
    """Let the target continue prompts or read given text; return the shard's bytes.

    Given text is read as prompts are, and the one token that the target adds is dropped.
    """
    given = batch[0].seed is None
    prompts, seeds = [job.ids for job in batch], [job.seed or 0 for job in batch]
    options = whole_distribution(batch[0].temperature, 1 if given else new_tokens) | Options(seed=seeds)
    run = Run(decoder.prepare(prompts, stopping=Stopping if given else StopOneLater, **options))
    run.finish()
    ids, states = [row.ids[:-1] for row in run.rows], [torch.cat(row) for row in recorder.rows]
    columns = {
        "ids": torch.tensor([token for row in ids for token in row], dtype=torch.int32),
        "lengths": torch.tensor([len(row) for row in ids], dtype=torch.int32),
        "prompt_lengths": torch.tensor([0 if given else len(row) for row in prompts], dtype=torch.int32),
        "temperatures": torch.tensor([job.temperature for job in batch]),
        "states": torch.cat([part for row in states for part in (torch.zeros_like(row[:1]), row)]).cpu(),
    }
    return save(columns, {"format": "pt"})


class StopOneLater(Stopping):
    """Ends a row one token late: then its last token is committed, and the state that chose it is handed out."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.budget, self.ended = self.budget + 1, ""

    def reason(self, ids: Sequence[int], new_tokens: int) -> str | None:
        """Return why the text ended with the last id but one."""
        ended, self.ended = self.ended, super().reason(ids, new_tokens + 1) or ""
        return ended or None


class Recorder(Draft, DraftSession):
    """A draft, and its own session, that proposes nothing and keeps the target's states.

    Args:
        aux_layers: which states, ascending.
    """

    name = "recorder"

    def __init__(self, aux_layers: Sequence[int]) -> None:
        self.aux_layers = tuple(aux_layers)
        self.rows: list[list[Tensor]] = []  # of the last run: in pieces, (n - 1, K, H) for n tokens
        self.active: list[list[Tensor]] = []

    def open(self, context: DraftContext) -> "Recorder":
        """Start with the states of the rows' prompts."""
        self.rows = [[] if states is None else [states] for states in context.states]
        self.active = list(self.rows)
        return self

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Keep the states that chose the committed tokens."""
        for row, new in zip(self.active, states, strict=True):
            row += [] if new is None else [new]
        self.active = [row for row, new in zip(self.active, tokens, strict=True) if new is not None]
