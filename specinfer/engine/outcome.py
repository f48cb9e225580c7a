"""The result of a row: its text, its figures, what made it.

Knows: a row, its steps, what was spent on them.  Does not know: when it was decoded, beside which others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specinfer.common.versions import versions
from specinfer.engine.clocks import Clocks, Reading
from specinfer.engine.sequence import Row
from specinfer.engine.sessions import Decoder
from specinfer.results import Result, Stats, Step, TreeSizes, acceptance_by_depth, contribution, paid
from specinfer.tree import Policy


@dataclass
class Batch:
    """What rows that are decoded together have in common.

    Attributes:
        policy: how their trees grow.
        notes: in addition to the decoder's.
        rows: the most that were decoded at a time.
    """

    policy: Policy
    notes: list[str] = field(default_factory=list)
    clocks: Clocks = field(default_factory=Clocks)
    rows: int = 0


def result_of(
    decoder: Decoder, row: Row, steps: list[Step], batch: Batch, spent: Reading, keep_stop_string: bool
) -> Result:
    """Return the result of a row.

    Args:
        decoder: that decoded it.
        row: ended or not.
        steps: so far.
        batch: in which it was decoded.
        spent: on these steps, and on reading the prompt.
        keep_stop_string: whether the text keeps the stop string that ended it.
    """
    new = row.ids[row.prompt_length :][: sum(len(step.tokens) for step in steps)]  # an interrupted step has none
    tree_sizes, notes = TreeSizes.of(steps), [*decoder.notes, *batch.notes, *row.notes]
    if (reasons := batch.policy.reasons([draft.name for draft in decoder.drafts], batch.rows)) is not None:
        notes.append("; ".join(filter(None, [f"auto: {paid(steps)}", str(tree_sizes), reasons])))
    drafting = (spent - Reading(drafting=((0, 0.0),) * len(decoder.drafts))).drafting
    stats = Stats(
        new_tokens=len(new),
        target_passes=len(steps),
        draft_passes=sum(passes for passes, _ in drafting),
        acceptance_by_depth=acceptance_by_depth(steps),
        seconds=spent.seconds,
        notes=tuple(notes),
        tree_sizes=tree_sizes,
        drafts=tuple(
            contribution(steps, number, draft.name, *clocks)
            for number, (draft, clocks) in enumerate(zip(decoder.drafts, drafting, strict=True))
        ),
    )
    return Result(
        text=_text(decoder.tokenizer, row, new, keep_stop_string) if decoder.tokenizer else "",
        token_ids=new,
        prompt_ids=row.ids[: row.prompt_length],
        finish_reason=row.finished or "unfinished",
        seed=row.seed if row.sampling else None,
        stats=stats,
        steps=steps,
        made_by=_made_by(decoder, row, batch.policy),
        tokenizer=decoder.tokenizer,
    )


def _made_by(decoder: Decoder, row: Row, policy: Policy) -> dict[str, Any]:
    """Return what made a row's text, in words and numbers."""
    name = str(getattr(decoder.target.model.config, "_name_or_path", "")) or decoder.target.name
    return {
        "target": Path(name).name if Path(name).exists() else name,
        "drafts": [draft.name for draft in decoder.drafts],
        "tree": str(policy),
        "verifier": str(decoder.verifier),
        "sampling": row.options,
        "dtype": str(decoder.target.dtype).removeprefix("torch."),
        "device": decoder.target.device.type,
        "versions": versions(),
    }


def _text(tokenizer: Any, row: Row, new: Sequence[int], keep_stop_string: bool) -> str:
    """Return the text of a row's new tokens, maybe without the stop string, which may have begun in the prompt."""
    if not keep_stop_string and row.stopping.strings:
        return row.stopping.strings.text_before(row.ids[: row.prompt_length + len(new)], row.prompt_length)
    text: str = tokenizer.decode(new, skip_special_tokens=True)
    return text
