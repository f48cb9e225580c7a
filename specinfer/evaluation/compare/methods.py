"""The methods that are compared, and the probe that counts how often a draft ranks the target's choice high.

Knows: decoders, transformers' own ways to generate, clocks.
Does not know: prompt files, what the counts are used for.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any, NotRequired, TypeAlias, TypedDict

import numpy as np
import torch
from transformers import PreTrainedModel

from specinfer.adaptive.policy import Auto
from specinfer.common.records import Record
from specinfer.decoder import SpeculativeDecoder
from specinfer.drafts.language_model import ModelDraft
from specinfer.engine.options import Options
from specinfer.errors import InputError, SpecinferError, UnsupportedModel
from specinfer.evaluation.probe import Probe, Question
from specinfer.loading import Loaded, same_tokens
from specinfer.results import Contribution, Result
from specinfer.tree import BestFirst, Chain, Expansion, Forest, Policy, Source

GATE = 0.5
LOOKUP_TOKENS = 10  # of transformers' prompt lookup
TOP = 5  # hit rates are those of the 1, 2, ... TOP likeliest tokens

# (ids of prompts, seeds, generation options) -> counts, seconds and the new ids of each
Method: TypeAlias = Callable[[list[list[int]], list[int], Options], list[Record]]
Timed: TypeAlias = tuple[list[Record], dict[str, float]]  # the same without seconds, and seconds by stage if known
Decode: TypeAlias = Callable[[list[list[int]], list[int], Options], Timed]


class OnePath(Chain):
    """Sequence speculation with any number of drafts: each grows its chain, and the target scores one of them.

    `BestFirst` keeps the nodes with the largest sum of path probabilities; this keeps the path with the largest sum.
    """

    def fit(self, trees: Forest) -> Forest:
        """Return the path of each merged tree on which most tokens are expected to be accepted."""
        fitted = []
        for tree in trees:
            paths = tree.ancestor_mask()  # (N, N): a row per path
            best = paths[(paths[:, 1:] @ np.exp(tree.scores[1:])).argmax()]
            fitted.append(tree.best(int(best[1:].sum()), best))
        return Forest.of(fitted)


class Decoding(TypedDict):
    """Options of a decoder."""

    tree: Policy | None
    graphs: NotRequired[bool]
    confidence_gate: NotRequired[float]


# name -> (nodes, depth) -> options of a decoder with all drafts
OURS: dict[str, Callable[[int, int], Decoding]] = {
    "autoregressive": lambda nodes, depth: {"tree": None},
    # of several drafts' chains, the most promising one
    "sequence": lambda nodes, depth: {"tree": OnePath(depth)},
    # no deeper than the chain, so with at most as many draft passes
    "tree": lambda nodes, depth: {"tree": BestFirst(nodes, depth)},
    "auto": lambda nodes, depth: {"tree": Auto()},
    # passes replayed as CUDA graphs
    "graphs": lambda nodes, depth: {"tree": Auto(), "graphs": True},
    # the first draft alone
    "one-draft": lambda nodes, depth: {"tree": BestFirst(nodes, depth)},
    # trees only after tokens that the target was sure of
    "gate": lambda nodes, depth: {"tree": BestFirst(nodes, depth), "confidence_gate": GATE},
}
# name -> options of transformers' generate; "assisted" also has an assistant
THEIRS: dict[str, dict[str, object]] = {
    "generate": {},
    "assisted": {},
    "prompt-lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
}
METHODS = (*OURS, *THEIRS)


def build_methods(
    names: Sequence[str],
    decoder: SpeculativeDecoder,
    nodes: int,
    depth: int,
    assistant: Loaded | None = None,
    max_rows: int = 1,
) -> tuple[dict[str, Method], dict[str, str]]:
    """Return the named methods on the decoder's target and drafts, and for those that cannot run the reason.

    Args:
        names: of `METHODS`.
        decoder: holds target, tokenizer and drafts.
        nodes: drafted nodes at most, of every fixed tree.
        depth: levels at most, of every fixed tree and of the chain.
        assistant: for assisted generation; None takes the first draft that is a language model.
        max_rows: prompts at a time.
    """
    methods, skipped = {}, {}
    for name in names:
        try:
            if name in THEIRS and max_rows > 1:
                raise InputError("transformers' methods take one prompt at a time here, and ours took several")
            if name in OURS:
                methods[name] = _timed(_ours(_decoder(name, decoder, OURS[name](nodes, depth))))
            else:
                extra = _assistant(decoder, assistant) if name == "assisted" else THEIRS[name]
                methods[name] = _timed(_theirs(decoder.target.model, **extra))
        except SpecinferError as error:
            skipped[name] = str(error)
    return methods, skipped


def _decoder(name: str, decoder: SpeculativeDecoder, options: Decoding) -> SpeculativeDecoder:
    """Return a decoder of one of our methods."""
    drafts, tree = decoder.drafts, options["tree"]
    if name == "one-draft":
        if len(drafts) == 1:
            raise InputError("there is one draft only: the method tree is that")
        drafts = drafts[:1]
    made = SpeculativeDecoder(decoder.target.model, decoder.tokenizer, drafts, **options)
    if tree is not None and made.policy is not tree:
        raise UnsupportedModel(made.notes[-1].partition(": ")[2])  # why it fell back to a chain
    return made


def _assistant(decoder: SpeculativeDecoder, assistant: Loaded | None) -> dict[str, object]:
    """Return the options of transformers' assisted generation; with another tokenizer, of the universal one."""
    if assistant is not None:
        model, tokenizer = assistant.model, assistant.tokenizer
    elif drafts := [draft for draft in decoder.drafts if isinstance(draft, ModelDraft)]:
        model, tokenizer = drafts[0].model.model, drafts[0].tokenizer
    else:
        raise InputError("no assistant was given, and no draft is a language model")
    extra: dict[str, object] = {"assistant_model": model}
    if tokenizer is None or decoder.tokenizer is None:
        return extra
    sizes = {each.config.get_text_config().vocab_size for each in (decoder.target.model, model)}
    if len(sizes) == 2 and tokenizer.get_vocab() != decoder.tokenizer.get_vocab():
        return {**extra, "tokenizer": decoder.tokenizer, "assistant_tokenizer": tokenizer}
    same_tokens(decoder.tokenizer, tokenizer)
    return extra


def _timed(decode: Decode) -> Method:
    """Return a method with a clock from the prompts' ids to the texts.

    Rows that are decoded together share the seconds by their tokens: each has the tokens per second of all.
    """

    def run(prompts: list[list[int]], seeds: list[int], options: Options) -> list[Record]:
        started = perf_counter()
        records, passes = decode(prompts, seeds, options)
        total = perf_counter() - started
        rest = {"bookkeeping": total - sum(passes.values())} if passes else {}
        tokens = sum(record["tokens"] for record in records)
        for record in records:
            share = record["tokens"] / tokens
            record["seconds"] = {name: share * spent for name, spent in ({"total": total} | passes | rest).items()}
        return records

    return run


def _ours(decoder: SpeculativeDecoder) -> Decode:
    """Return how a decoder decodes a method's prompts."""

    def decode(prompts: list[list[int]], seeds: list[int], options: Options) -> Timed:
        asked = [{"prompt": ids, "seed": seed} for ids, seed in zip(prompts, seeds, strict=True)]
        found = {}
        for number, result, error in decoder.generate_many(asked, max_rows=len(asked), **options):
            if result is None:
                raise error or InputError(f"prompt {number} has no result")
            found[number] = result
        last = list(found.values())[-1].stats  # its clocks are those of the whole run
        tokens = sum(len(result.token_ids) for result in found.values())
        records = [_counted(found[row], len(found[row].token_ids) / tokens, last.drafts) for row in sorted(found)]
        return records, {stage: getattr(last.seconds, stage) for stage in ("prefill", "target", "draft")}

    return decode


def _counted(result: Result, share: float, spent: Sequence[Contribution]) -> Record:
    """Return a result's record, with its share of the seconds that a run spent on each draft."""
    stats, pairs = result.stats.to_dict(), zip(result.stats.drafts, spent, strict=True)
    drafts = [asdict(replace(draft, seconds=share * of.seconds)) for draft, of in pairs]
    kept = ("target_passes", "draft_passes", "tree_sizes", "notes")
    return {"ids": result.token_ids, "tokens": stats["new_tokens"], **{n: stats[n] for n in kept}, "drafts": drafts}


def _theirs(model: Any, **extra: object) -> Decode:
    """Return how transformers' generate decodes one prompt.

    Its first pass reads the whole prompt and yields a token, so it counts as a target pass.  Our loop first reads the
    prompt without its last token, and does not count that pass.
    """
    models = [each for each in (model, extra.get("assistant_model")) if isinstance(each, PreTrainedModel)]

    def decode(prompts: list[list[int]], seeds: list[int], options: Options) -> Timed:
        prompt = torch.tensor(prompts, device=model.device)  # one
        passes = Counter[torch.nn.Module]()
        with ExitStack() as hooks:
            for each in models:
                hooks.callback(each.register_forward_pre_hook(lambda module, _: passes.update([module])).remove)
            torch.manual_seed(seeds[0])
            output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options, **extra)
            new = output[0, prompt.shape[1] :].tolist()
        counts = {"target_passes": passes[model], "draft_passes": passes.total() - passes[model]}
        return [{"ids": new, "tokens": len(new), **counts}], {}

    return decode


# ---- hit rates ----


class HitRates:
    """Counts how often the target's choice is among the tokens that each draft ranks first.

    The target decodes plainly.  After every committed token each draft is asked, and proposes nothing (teacher
    forcing).  When sampling, drafts rank by the noise that they share with the target.
    """

    def __init__(self, decoder: SpeculativeDecoder) -> None:
        probes = [Probe(draft, _FirstChoices()) for draft in decoder.drafts]
        self.decoder = SpeculativeDecoder(decoder.target.model, decoder.tokenizer, probes, Expansion((TOP,)))
        self.probes = [draft for draft in self.decoder.drafts if isinstance(draft, Probe)]  # attached to the target

    def count(self, ids: list[int], seed: int, options: Options) -> list[Record]:
        """Return, per draft, its name, the positions it was asked at, and at how many its k likeliest held the choice.

        The last position of a text that ends by its length does not count: nothing is drafted there.
        """
        questions = [_FirstChoices() for _ in self.probes]
        for probe, question in zip(self.probes, questions, strict=True):
            probe.question = question
        chosen = self.decoder.generate(ids, **(options | Options(seed=seed))).token_ids
        return [
            {"draft": probe.name, **count_hits([answers.ranked.get(i, []) for i in range(answers.wanted)], chosen)}
            for probe, answers in zip(self.probes, questions, strict=True)
        ]


def count_hits(ranked: Sequence[Sequence[int]], chosen: Sequence[int]) -> Record:
    """Return the positions, and at how many the target's choice is among the first k = 1 ... TOP ranked tokens."""
    pairs = list(zip(ranked, chosen, strict=False))
    return {"positions": len(pairs), "hits": [sum(token in row[:k] for row, token in pairs) for k in range(1, TOP + 1)]}


class _FirstChoices(Question):
    """Which tokens does a draft of one row rank first?"""

    def __init__(self) -> None:
        super().__init__(rows=1)
        self.ranked: dict[int, list[int]] = {}  # by position, the likeliest first; none where the draft knew nothing

    def ask(self, source: Source, max_depth: int | None) -> None:
        growth = Expansion((TOP,)).grow(source, max_depth)
        self.ranked[self.position] = growth.tokens[0, growth.valid[0]].tolist()[1:]  # without the root
