"""Recording a trace: the target writes a text, then every draft is asked, position by position, what it would propose.

Knows: the engine, whose own sessions feed the drafts, and the order of the work.
Does not know: how a trace is kept (`trace`), what verification would make of it (`replaying`).

Two runs per batch of texts.  In the first the target decodes plainly, which gives the texts and its distributions.  The
second goes through the same texts with a verifier that says what was written, and with probes in the drafts' places: a
probe asks its draft one question after every token, and proposes nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specinfer.attention import Support, check_model
from specinfer.common.files import locked
from specinfer.common.values import checked_count, checked_names, checked_temperature, plain
from specinfer.decoder import SpeculativeDecoder, row_seeds
from specinfer.engine.sampling import whole_distribution
from specinfer.engine.target_view import RowView
from specinfer.engine.verify import ExactMatch, TargetView, Verdict
from specinfer.errors import InputError, UnsupportedModel
from specinfer.evaluation.probe import Probe
from specinfer.evaluation.traces.probes import (
    Candidates,
    Distributions,
    ProbePlan,
    TextQuestion,
    Trees,
    distribution_arrays,
)
from specinfer.evaluation.traces.trace import (
    FORMAT,
    TOP,
    Drafted,
    Text,
    Trace,
    begin,
    model_name,
    model_settings,
    read_text,
    versions,
    write_text,
)
from specinfer.prompts import Prompt
from specinfer.tree import BestFirst, TokenTree

Progress = Callable[[list[list[int]], int], Iterable[list[int]]]  # (batches left, texts done) -> the batches


def record(
    decoder: SpeculativeDecoder,
    prompts: Prompt,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    nodes: int = 64,
    depth: int = 8,
    top: int | None = TOP,
    draws: int = 5,
    batch: int = 4,
    raw: bool = False,
    out: str | Path | None = None,
    progress: Progress = lambda batches, _: batches,
) -> Trace:
    """Let the decoder's target continue prompts, and record what its drafts would have proposed along the texts.

    A text position costs about ``3 * depth`` draft passes (a level of the tree, of the candidates, of the
    distributions) and two target passes; of a batch all at once.  The decoder's own tree and verifier do not matter.

    Args:
        decoder: holds target, tokenizer and drafts.
        prompts: as `SpeculativeDecoder.generate`.
        max_new_tokens: per prompt.
        temperature: 0 is greedy; others sample from the whole distribution (top_k 0, top_p 1).
        seed: of the first prompt; the next ones take the numbers after it.
        nodes: best-first trees of at most so many nodes can be replayed; 0 records none.
        depth: trees of at most so many levels can be replayed.
        top: candidates kept per node along the text, and tokens per distribution: the widest level that can be
            replayed.  None keeps whole distributions, and `TOP` candidates.
        draws: draws per node that multi-step sampling can be replayed with; sampling only.
        batch: texts at a time.
        raw: feed strings without the chat template.
        out: folder that every finished text is written to; one of the same settings is continued.
        progress: wraps the batches of prompts' numbers that are left, for a bar.

    Raises:
        InputError: a size that records nothing, no drafts, an unusable prompt, or a folder of other settings or of
            another run.
        UnsupportedModel: best-first trees on a model that can score chains only.
        SpecinferError: what decoding raises; ``out`` keeps what was finished.
    """
    sizes = {"nodes": (nodes, 0), "depth": (depth, 1), "top": (1 if top is None else top, 1), "draws": (draws, 1)}
    sizes |= {"max_new_tokens": (max_new_tokens, 2), "batch": (batch, 1)}
    for name, (value, least) in sizes.items():
        checked_count(name, value, least, "leaves nothing to record")
    temperature, seed = checked_temperature(temperature), row_seeds(seed, 1)[0]
    max_new_tokens, batch = plain(max_new_tokens), plain(batch)
    plan = ProbePlan(plain(nodes), plain(depth), plain(top), plain(draws))
    checked_names("out", "" if out is None else out)
    _check(decoder, plan)
    rows = decoder.read(prompts, raw).rows
    seeds = [seed + number for number in range(len(rows))]
    settings = {
        "format": FORMAT,
        "model": model_name(decoder.target),
        **model_settings(decoder),
        **plan._asdict(),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "versions": versions(),
    }
    with locked(out):
        folder = None if out is None else Path(out)
        texts: dict[int, Text] = {}
        if folder is not None:
            begin(folder, settings)
            vocab_size = decoder.target.vocab_size
            found = [read_text(folder, i, row, seeds[i], settings, vocab_size) for i, row in enumerate(rows)]
            texts = {number: text for number, text in enumerate(found) if text is not None}
        left = [number for number in range(len(rows)) if number not in texts]
        batches = [left[i : i + batch] for i in range(0, len(left), batch)]
        for numbers in progress(batches, len(texts)):
            own = [(rows[number], seeds[number]) for number in numbers]
            for number, text in zip(numbers, _record(decoder, own, plan, max_new_tokens, temperature), strict=True):
                texts[number] = text
                if folder is not None:
                    write_text(folder, number, text)
    return Trace(settings, tuple(texts[number] for number in range(len(rows))))


def _check(decoder: SpeculativeDecoder, plan: ProbePlan) -> None:
    """Raise for a decoder that cannot be recorded."""
    if not isinstance(decoder, SpeculativeDecoder):
        raise InputError(f"decoder={decoder!r:.60} is no SpeculativeDecoder: construct one with the drafts to record")
    if not decoder.drafts:
        raise InputError(
            "this decoder has no drafts, so there is nothing to record: construct it with drafts and a tree"
        )
    for model in decoder.language_models:
        if plan.nodes and check_model(model.model).support is Support.CHAIN_ONLY:
            raise UnsupportedModel(f"{model.name} can score chains only: record with nodes=0, which keeps no trees")


def _record(
    decoder: SpeculativeDecoder, rows: Sequence[tuple[list[int], int]], plan: ProbePlan, new: int, temperature: float
) -> list[Text]:
    """Record a batch of (prompt ids, seed)."""
    prompts, seeds = [prompt for prompt, _ in rows], [seed for _, seed in rows]
    options: dict[str, Any] = {"seed": seeds, "max_new_tokens": new, **whole_distribution(temperature)}
    model, tokenizer = decoder.target.model, decoder.tokenizer
    writer = _Writer(len(rows))
    results = SpeculativeDecoder(model, tokenizer, (), None, writer).generate(prompts, **options)
    texts = [result.token_ids for result in results]
    distributions = [torch.stack(own) for own in writer.distributions]

    def questions() -> list[TextQuestion]:
        asked = [Candidates(plan, texts, new), *([Trees(plan, texts, new)] if plan.nodes else [])]
        return [*asked, *([Distributions(plan, texts, new, distributions, seeds)] if temperature else [])]

    asked = [questions() for _ in decoder.drafts]
    probes = [Probe(draft, each) for draft, own in zip(decoder.drafts, asked, strict=True) for each in own]
    room = BestFirst(plan.nodes + 1, plan.depth)  # what caches must hold
    SpeculativeDecoder(model, tokenizer, probes, room, _Reader(texts)).generate(prompts, **options)
    return [
        Text(
            prompt_ids=prompts[row],
            token_ids=text,
            seed=seeds[row],
            **distribution_arrays("target", distribution, plan.top),
            probability=distribution[torch.arange(len(text)), text].numpy(),
            drafted=tuple(_drafted(own, row, len(text), plan) for own in asked),
        )
        for row, (text, distribution) in enumerate(zip(texts, distributions, strict=True))
    ]


def _drafted(questions: Sequence[TextQuestion], row: int, n: int, plan: ProbePlan) -> Drafted:
    """Return the answers about one text; what was not asked is empty."""
    depth = plan.depth
    nothing = {
        "first": np.zeros(n + 1, np.int32),
        **{name: np.zeros(0, np.int32) for name in ("tree_tokens", "tree_parents")},
        "tree_scores": np.zeros(0, np.float32),
        "distribution_tokens": np.zeros((n, depth, 0), np.int32),
        **{
            name: np.zeros((n, depth, 0), np.float32) for name in ("distribution_probs", "tests", "without_replacement")
        },
        "probability": np.zeros((n, depth), np.float32),
    }
    answers = [question.arrays(row) for question in questions]
    return Drafted(**{name: array for own in (nothing, *answers) for name, array in own.items()})


class _Writer(ExactMatch):
    """Plain decoding that remembers the target's distribution at every position of every row: float32 (V,)."""

    def __init__(self, rows: int) -> None:
        self.distributions: list[list[Tensor]] = [[] for _ in range(rows)]

    def verify(self, tree: TokenTree, target: TargetView) -> Verdict:
        assert isinstance(target, RowView)
        self.distributions[target.row.index].append(target.scores(0).double().softmax(-1).float().cpu())
        return super().verify(tree, target)


class _Reader(ExactMatch):
    """A verifier that says what was written."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = texts

    def verify(self, tree: TokenTree, target: TargetView) -> Verdict:
        assert isinstance(target, RowView)
        row = target.row
        return Verdict((), self.texts[row.index][len(row.ids) - row.prompt_length])
