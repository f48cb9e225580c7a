"""Recording a trace: the target writes a text, then every draft is asked, position by position, what it would propose.

Knows: the engine, whose own sessions feed the drafts, and the order of the work.
Does not know: how a trace is kept (`trace`), what verification would make of it (`replaying`).

A batch of texts begins and ends together.  There are two runs per batch.  In the first the target decodes plainly,
which gives the texts and its distributions.  The second goes through the same texts: its verifier emits the known
tokens, and probes stand for the drafts.  A probe asks its draft one question after every token, and proposes nothing.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from specinfer.attention import Support, check_model
from specinfer.common.files import locked
from specinfer.common.progress import Progress
from specinfer.common.values import checked_count, checked_names, checked_temperature
from specinfer.decoder import SpeculativeDecoder, row_seeds
from specinfer.engine.options import Options
from specinfer.engine.sampling import whole_distribution
from specinfer.engine.sequence import RowView
from specinfer.engine.verify import ExactMatch, TargetView, Verdict
from specinfer.errors import InputError, UnsupportedModel
from specinfer.evaluation.probe import Probe
from specinfer.evaluation.traces.probes import Candidates, Distributions, Trees, blank_columns, distribution_arrays
from specinfer.evaluation.traces.trace import TOP, Drafted, Sizes, Trace, TraceFolder, TraceText, trace_settings
from specinfer.prompts import Prompt
from specinfer.tree import BestFirst, TokenTree

log = logging.getLogger(__name__)


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
    progress: Progress = lambda *_: None,
) -> Trace:
    """Let the decoder's target continue prompts, and record the proposals of its drafts along the texts.

    A text position costs about ``3 * depth`` draft passes (a level of the tree, of the candidates, of the
    distributions) and two target passes.  A batch shares its passes.  The decoder's tree and verifier do not matter.
    Of a list, a prompt that cannot be used is left out, with the reason in `Trace.refused`, and the others go on.

    Args:
        decoder: holds target, tokenizer and drafts.
        prompts: as `SpeculativeDecoder.generate`.
        max_new_tokens: per prompt.
        temperature: 0 is greedy; others sample from the whole distribution (top_k 0, top_p 1).
        seed: of the first prompt; the next ones take the numbers after it.
        nodes: best-first trees of at most this many nodes can be replayed; 0 records none.
        depth: trees of at most this many levels can be replayed.
        top: candidates kept per node along the text, and tokens kept per distribution.  No wider level can be replayed.
            None keeps complete distributions, and `TOP` candidates.
        draws: draws per node that multi-step sampling can be replayed with; sampling only.
        batch: texts at a time.
        raw: feed strings without the chat template.
        out: folder that every finished text is written to; one of the same settings and machine is continued.  The
            trace's texts are read from it where they are used, so they need not fit into memory.
        progress: called with "texts", how many are done, of how many, and new tokens, once and after each batch.

    Raises:
        InputError: a size that records nothing, no drafts, no usable prompt, or a folder of other settings or of
            another run.
        UnsupportedModel: best-first trees on a model that can score chains only.
        SpecinferError: decoding failed; ``out`` keeps the finished texts.
    """
    plan = Sizes(nodes, depth, top, draws, max_new_tokens).checked()
    batch = checked_count("batch", batch, 1, "leaves nothing to record")
    temperature, seed = checked_temperature(temperature), row_seeds(seed, 1)[0]
    checked_names("out", "" if out is None else out)
    _check(decoder, plan)
    rows = _read(decoder, prompts, raw, plan.max_new_tokens)
    settings = trace_settings(decoder, plan._asdict(), temperature)
    write = partial(_record, decoder, plan=plan, temperature=temperature)
    with locked(out) as folder:
        kept = TraceFolder(folder, settings)
        kept.records.begin(settings)
        texts = _fill(kept, rows, seed, batch, write, progress)  # the folder may hold more
        refused = {number: reason for number, reason in kept.refused().items() if number < len(rows)}
        return Trace(settings, texts, refused)


def _fill(
    kept: TraceFolder,
    rows: Sequence[list[int] | InputError],
    seed: int,
    batch: int,
    write: Callable[[Sequence[tuple[list[int], int]]], list[TraceText]],
    progress: Progress,
) -> tuple[TraceText, ...]:
    """Record the prompts that the folder does not hold yet; return the texts of all that can be used."""
    good = {number: (row, seed + number) for number, row in enumerate(rows) if isinstance(row, list)}
    done, numbers = _done(kept, rows, good), list(good)
    batches = [numbers[i : i + batch] for i in range(0, len(numbers), batch)]  # the same after a kill
    left = [each for each in batches if not done.issuperset(each)]
    tokens, refused = 0, len(rows) - len(good)
    progress("texts", len(done) + refused, len(rows), {"tokens": tokens})
    for each in left:
        written = write([good[number] for number in each])
        for number, text in zip(each, written, strict=True):
            if number not in done:
                kept.add(number, text)
        tokens += sum(len(text.token_ids) for text in written)
        done.update(each)
        progress("texts", len(done) + refused, len(rows), {"tokens": tokens})
    return tuple(map(kept.read, numbers))


def _read(decoder: SpeculativeDecoder, prompts: Prompt, raw: bool, new: int) -> list[list[int] | InputError]:
    """Return the ids of prompts, or why one cannot be used; raise if none can, or what is wrong with all together."""
    try:
        rows = decoder.read(prompts, raw).rows
        decoder.check_lengths(rows, [new] * len(rows))
        return list(rows)
    except InputError:
        if not isinstance(prompts, list | tuple):
            raise
        found = [_read_one(decoder, prompt, raw, new) for prompt in prompts]
        good = [prompt for prompt, row in zip(prompts, found, strict=True) if isinstance(row, list)]
        if len(good) in (0, len(found)):
            raise
        decoder.read(good, raw)
        return found


def _read_one(decoder: SpeculativeDecoder, prompt: Prompt, raw: bool, new: int) -> list[int] | InputError:
    """Return the ids of a prompt, or why it cannot be used."""
    try:
        ids = decoder.read(prompt, raw).only
        decoder.check_lengths([ids], [new])
    except InputError as error:
        return error
    return ids


def _done(
    kept: TraceFolder, rows: Sequence[list[int] | InputError], good: Mapping[int, tuple[list[int], int]]
) -> set[int]:
    """Return the numbers of prompts that were recorded; note those that are refused.

    Raises:
        InputError: a text of the folder is damaged, or of another prompt or seed.
    """
    refused = kept.refused()
    for number, row in enumerate(rows):
        if isinstance(row, InputError) and number not in refused:
            log.warning("prompt %d is left out: %s", number, row)
            kept.refuse(number, str(row))
    done = {number for number in kept.finished() if number < len(rows)}
    for number in done:
        text = kept.read(number)
        if (text.prompt_ids, text.seed) != good.get(number):
            advice = "give the same prompts, or choose another folder"
            raise InputError(f"{kept.path(number)} is of another prompt or seed: {advice}")
    return done


def _check(decoder: SpeculativeDecoder, plan: Sizes) -> None:
    """Raise for a decoder that cannot be recorded."""
    if not isinstance(decoder, SpeculativeDecoder):
        raise InputError(f"decoder={decoder!r:.60} is not a SpeculativeDecoder: construct one with drafts to record")
    if not decoder.drafts:
        raise InputError("this decoder has no drafts, so there is nothing to record: construct it with drafts")
    for draft in decoder.drafts:
        if draft.is_whole:
            raise InputError(
                f"draft {draft.name} proposes its trees whole, and a recording asks for them node by node: leave it "
                "out, and compare it by decoding"
            )
    for model in decoder.language_models:
        if plan.nodes and check_model(model.model).support is Support.CHAIN_ONLY:
            raise UnsupportedModel(f"{model.name} can score chains only: record with nodes=0, which keeps no trees")


def _record(
    decoder: SpeculativeDecoder, rows: Sequence[tuple[list[int], int]], plan: Sizes, temperature: float
) -> list[TraceText]:
    """Record a batch of (prompt ids, seed)."""
    prompts, seeds = map(list, zip(*rows, strict=True))
    options = whole_distribution(temperature, plan.max_new_tokens) | Options(seed=seeds)
    model, tokenizer = decoder.target.model, decoder.tokenizer
    writer = _Writer(len(rows))
    results = SpeculativeDecoder(model, tokenizer, (), None, verifier=writer).generate(prompts, **options)
    texts = [result.token_ids for result in results]
    distributions = [torch.stack(steps) for steps in writer.distributions]

    vocab_size = distributions[0].shape[1]
    kept, draws = (min(plan.top or vocab_size, vocab_size), plan.draws) if temperature else (0, 0)
    probes, drafted = [], []
    for draft in decoder.drafts:
        columns, trees = [blank_columns(plan, len(text), kept, draws) for text in texts], Trees(plan, texts)
        drafted.append((columns, trees))
        questions = [Candidates(plan, texts, columns), *([trees] if plan.nodes else [])]
        if temperature:
            questions.append(Distributions(plan, texts, columns, distributions, seeds))
        probes += [Probe(draft, question) for question in questions]
    capacity = BestFirst(plan.nodes + 1, plan.depth)  # of caches
    SpeculativeDecoder(model, tokenizer, probes, capacity, verifier=_Reader(texts)).generate(prompts, **options)
    return [
        TraceText(
            prompt_ids=prompts[row],
            token_ids=text,
            seed=seeds[row],
            **distribution_arrays("target", distribution, plan.top),
            probability=distribution[torch.arange(len(text), device="cpu"), text].numpy(),
            drafted=tuple(Drafted(**columns[row], **trees.columns(row)) for columns, trees in drafted),
        )
        for row, (text, distribution) in enumerate(zip(texts, distributions, strict=True))
    ]


class _Writer(ExactMatch):
    """Plain decoding that keeps the target's distribution at every position of every row: float32 (V,)."""

    def __init__(self, rows: int) -> None:
        self.distributions: list[list[Tensor]] = [[] for _ in range(rows)]

    def verify(self, tree: TokenTree, target: TargetView) -> Verdict:
        assert isinstance(target, RowView)
        self.distributions[target.row.index].append(target.scores(0).double().softmax(-1).float().cpu())
        return super().verify(tree, target)


class _Reader(ExactMatch):
    """A verifier that emits the tokens of known texts."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = texts

    def verify(self, tree: TokenTree, target: TargetView) -> Verdict:
        assert isinstance(target, RowView)
        row = target.row
        return Verdict((), self.texts[row.index][len(row.ids) - row.prompt_length])
