"""Does a draft fit its target?  It is measured along the target's own text, and what is wrong is said in words.

    from specinfer import SpeculativeDecoder, check_draft
    print(check_draft(SpeculativeDecoder.from_pretrained(drafts=["bundled", "ngram"])))

Knows: traces and their replay, the order of the work.
Does not know: how models are timed (`pass_costs`), what figures mean (`verdict`), how they are printed (`report`).
"""

from collections.abc import Sequence

import numpy as np

from specinfer.attention import Support, check_model
from specinfer.common.progress import Progress
from specinfer.decoder import SpeculativeDecoder
from specinfer.drafts.lookup.ngram import NGramDraft
from specinfer.drafts.lookup.suffix import SuffixDraft
from specinfer.engine.draft import Draft
from specinfer.errors import InputError
from specinfer.evaluation.doctor.draft_report import DraftCheck, DraftReport, Expected, Gains
from specinfer.evaluation.doctor.pass_costs import PassCosts, measured_costs
from specinfer.evaluation.doctor.verdict import Signs, verdict
from specinfer.evaluation.traces import Trace, hits, oracle, record, replay
from specinfer.prompts import Prompt
from specinfer.tree import BestFirst, Chain, Policy

__all__ = ["DraftCheck", "DraftReport", "Expected", "Gains", "check_draft"]

DEPTH = 8
CHAINS, TREES = (1, 2, 3, 4, 6, 8), (4, 8, 16, 32, 64)
RANKS = (1, 4, 16)
TIMING = "timing passes and proposals"
PROMPTS = (  # code, counting, chat, arithmetic, a story, facts
    "Write a Python function that returns the largest of three numbers, with a docstring.",
    "Count from one to twenty in words.",
    "My neighbour plays loud music at night. How can I ask them politely to stop?",
    "A train travels 60 miles in 40 minutes. What is its speed in miles per hour? Explain step by step.",
    "Tell a short story about a lighthouse keeper and a lost whale.",
    "What causes the seasons on Earth, and why are they opposite in the two hemispheres?",
)


def check_draft(
    decoder: SpeculativeDecoder | None = None,
    prompts: Prompt = None,
    *,
    max_new_tokens: int = 48,
    raw: bool = False,
    progress: Progress = lambda *_: None,
) -> DraftReport:
    """Measure how well each draft of a decoder fits its target, what trees it should gain, and at what cost.

    The target continues the prompts greedily, and every draft is asked, position by position, what it would have
    proposed (`record`).  Tokens per pass follow (`replay`), exactly if drafts go by the text alone; milliseconds
    are medians over a few steps of one text.  The decoder's own tree does not matter.  A draft may have ``agreements``,
    a list of (convention in words, top-1 agreement at depth 1, 2, ...), the one in use first; they are reported as they
    are.

    Args:
        decoder: holds target, tokenizer and drafts; None is the default target with its bundled drafts.
        prompts: as `SpeculativeDecoder.generate`; None is six short ones.
        max_new_tokens: per prompt.
        raw: feed strings without the chat template.
        progress: as `record`'s; then called with "timing passes and proposals", before and after.

    Raises:
        InputError: no drafts, or an unusable prompt or length.
        SpecinferError: decoding failed.
    """
    decoder = SpeculativeDecoder.from_pretrained(drafts="bundled") if decoder is None else decoder
    if not isinstance(decoder, SpeculativeDecoder) or not decoder.drafts:
        raise InputError("there is no draft to check: name one with --draft, or give a SpeculativeDecoder with drafts")
    branch = all(check_model(model.model).support is Support.EXACT for model in decoder.language_models)
    trees: list[Policy] = [BestFirst(nodes, DEPTH) for nodes in TREES] if branch else []
    policies = [*map(Chain, CHAINS), *trees]
    trace = record(
        decoder,
        list(PROMPTS) if prompts is None else prompts,
        max_new_tokens=max_new_tokens,
        nodes=max(TREES) if branch else 0,
        depth=DEPTH,
        top=max(RANKS),
        raw=raw,
        progress=progress,
    )
    prompt = max(trace.texts, key=lambda text: len(text.token_ids)).prompt_ids
    progress(TIMING, 0, 1, {})
    passes, proposals = measured_costs(decoder, policies, prompt, max_new_tokens)
    progress(TIMING, 1, 1, {})
    every = range(len(decoder.drafts))
    gains = [_gains(trace, policies, [index], passes, proposals) for index in every]
    return DraftReport(
        target=trace.settings["model"],
        dtype=trace.settings["dtype"],
        device=str(decoder.target.device),
        texts=len(trace.texts),
        tokens=trace.tokens,
        passes=passes,
        drafts=[_check(decoder, trace, index, passes, gains[index]) for index in every],
        together=_gains(trace, policies, every, passes, proposals) if len(every) > 1 else None,
    )


def _gains(
    trace: Trace,
    policies: Sequence[Policy],
    drafts: Sequence[int],
    passes: PassCosts,
    proposals: Sequence[Sequence[float]],
) -> Gains:
    """Return the expected gain of each policy with these drafts, whose trees are merged."""
    sizes = []
    for number, policy in enumerate(policies):
        tokens, nodes = replay(trace, policy, drafts=drafts).tokens_per_pass, _nodes(trace, policy, drafts)
        milliseconds = passes.step(nodes) + sum(proposals[draft][number] for draft in drafts)
        label = f"chain {policy.max_depth}" if isinstance(policy, Chain) else f"tree {policy.max_nodes}"
        sizes.append(Expected(label, nodes, tokens, milliseconds, tokens[0] * passes.step(0) / milliseconds))
    level = sum(proposals[draft][len(CHAINS) - 1] for draft in drafts) / DEPTH
    return Gains(sizes, oracle(trace, Chain(DEPTH), drafts=drafts).tokens_per_pass, level)


def _nodes(trace: Trace, policy: Policy, drafts: Sequence[int]) -> float:
    """Return how many nodes a policy's trees have on average; a draft that knows nothing somewhere has none there."""
    columns = [[text.drafted[draft] for text in trace.texts] for draft in drafts]
    if isinstance(policy, Chain):
        known = [np.concatenate([drafted.tokens[:, 0, 0] >= 0 for drafted in column]) for column in columns]
        return float(policy.max_depth * np.mean(known, axis=1).sum())
    grown = np.sum([np.concatenate([np.diff(drafted.first) for drafted in column]) for column in columns], axis=0)
    return float(np.minimum(grown, policy.max_nodes).mean())


def _check(decoder: SpeculativeDecoder, trace: Trace, index: int, passes: PassCosts, gains: Gains) -> DraftCheck:
    """Return the findings about one draft."""
    draft, table = decoder.drafts[index], hits(trace, index)
    depths = int((table.tried > 0).sum())
    within = {f"top {rank}": table.within[:depths, rank - 1].tolist() for rank in RANKS}
    proposed = max(int(text.drafted[index].tokens.max()) for text in trace.texts)
    signs = Signs(
        first=within["top 1"],
        among=within[f"top {max(RANKS)}"][0],
        lookup=isinstance(draft, NGramDraft | SuffixDraft),
        covered=_covered(draft, trace),
        reach=(proposed + 1) / decoder.target.vocab_size,
        level=gains.level / passes.target[0],
    )
    agreements = [(words, list(rates)) for words, rates in draft.agreements]
    return DraftCheck(
        draft.name, *verdict(signs), table.tried[:depths].tolist(), within, signs.covered, gains, agreements
    )


def _covered(draft: Draft, trace: Trace) -> float:
    """Return the share of the target's tokens that are in a draft's vocabulary; 1 where that is the target's."""
    ids = getattr(getattr(draft.model, "model", None), "token_ids", None)
    tokens = [token for text in trace.texts for token in text.token_ids]
    return 1.0 if ids is None else float(np.isin(tokens, ids.cpu().numpy()).mean())
