"""Which conventions a published head was made with: they are measured on the target's own text.

Knows: teacher forcing, agreement at each depth.  Does not know: formats, networks, what a convention changes.

Formats leave open which of the target's states a head reads, and where it norms.  A wrong guess drafts badly and says
nothing.  So the target writes a text, and under each convention the head is asked, after every token, for the tokens
that follow.  The convention under which a chain of first choices is accepted furthest is taken.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specinfer.attention import TreeModel, running
from specinfer.engine.draft import DraftContext, DraftSession
from specinfer.engine.processors import Processors
from specinfer.errors import ModelError
from specinfer.prompts import encode
from specinfer.tree import Forest, Frontier, Kind

PROMPTS = (
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "Write a Python function that checks whether a word is a palindrome.",
    "List ten facts about the planet Mars.",
)
TOKENS = 32  # of each text that count
DEPTHS = 4  # that a head is asked for
LEAST = 0.1  # of its first choices that must be the target's


@dataclass(frozen=True)
class Convention:
    """How a head is read: which states of the target it gets, and the options of its network."""

    aux_layers: tuple[int, ...]  # the target's hidden states, as transformers counts them
    options: tuple[tuple[str, bool], ...] = ()  # attributes of the network

    def __str__(self) -> str:
        parts = [f"states {', '.join(map(str, self.aux_layers))}"]
        parts += [f"{name.replace('_', ' ')}: {'yes' if value else 'no'}" for name, value in self.options]
        return "; ".join(parts)


@dataclass(frozen=True)
class WrittenText:
    """A target's text, with the states that chose every token but the first."""

    ids: list[list[int]]  # per row
    states: list[Tensor]  # per row (n - 1, K, H)
    aux_layers: Sequence[int]  # K
    prompt_lengths: list[int]
    ends: list[int]  # per row, tokens up to the end of its text


def write_text(target: TreeModel, tokenizer: PreTrainedTokenizerBase | None, aux_layers: Sequence[int]) -> WrittenText:
    """Let a target continue `PROMPTS` greedily; without a tokenizer, single tokens."""
    if tokenizer is None:
        prompts = [[token] for token in range(1, 1 + len(PROMPTS))]
    else:
        prompts = encode(list(PROMPTS), tokenizer).rows
    ends = target.model.generation_config.eos_token_id
    stops = set(ends if isinstance(ends, list) else [ends])
    count = TOKENS + DEPTHS
    with running(target):
        longest = max(map(len, prompts)) + count + 1
        session = target.session(len(prompts), longest, longest, aux_layers)
        states = [[] if early is None else [early] for early in session.prefill([row[:-1] for row in prompts])]
        ids = [list(row) for row in prompts]
        for _ in range(count):
            logits = torch.stack([row[0] for row in session.score(Forest(Kind.RANKED, [row[-1] for row in ids]))])
            for row, kept in zip(states, session.commit([(0,)] * len(ids)), strict=True):
                row += [] if kept is None else [kept]
            for written, token in zip(ids, logits.argmax(-1).tolist(), strict=True):
                written.append(token)
    lengths = [len(row) for row in prompts]
    ended = [
        next((i for i in range(n, len(row)) if row[i] in stops), len(row)) for row, n in zip(ids, lengths, strict=True)
    ]
    return WrittenText(ids, [torch.cat(row) for row in states], list(aux_layers), lengths, ended)


def agreement(
    open_session: Callable[[DraftContext], DraftSession], text: WrittenText, target: TreeModel
) -> list[float]:
    """Return how often a draft's first choice at depth 1, 2, ... is the text's token, after the text's tokens above it.

    Args:
        open_session: starts a session of the draft.
        text: with the states that the draft reads.
        target: which wrote it.
    """
    starts = text.prompt_lengths
    longest = max(map(len, text.ids)) + 8 * DEPTHS
    context = DraftContext(
        prompts=[row[:start] for row, start in zip(text.ids, starts, strict=True)],
        capacity=longest,
        max_capacity=2 * longest,
        vocab_size=target.vocab_size,
        draft=0,
        processors=Processors([]),
        seeds=[0] * len(starts),
        aux_layers=text.aux_layers,
        states=[states[: start - 1] if start > 1 else None for states, start in zip(text.states, starts, strict=True)],
    )
    session = open_session(context)
    hits, counts = [0] * DEPTHS, [0] * DEPTHS
    for position in range(TOKENS):
        now = [start + position for start in starts]
        for level, first in enumerate(_first_choices(session, text, now)):
            for row, token, column, end in zip(text.ids, first, now, text.ends, strict=True):
                hits[level] += column + level < end and token == row[column + level]
                counts[level] += column + level < end
        tokens = [[row[column]] for row, column in zip(text.ids, now, strict=True)]
        session.commit(tokens, [row[column - 1 : column] for row, column in zip(text.states, now, strict=True)])
    return [right / max(1, count) for right, count in zip(hits, counts, strict=True)]


def _first_choices(session: DraftSession, text: WrittenText, now: Sequence[int]) -> Iterator[list[int]]:
    """Yield a draft's first choices at depth 1, 2, ... below the rows' tokens before some columns, along the text."""
    above = [row[column - 1] for row, column in zip(text.ids, now, strict=True)]
    source = session.source(above)
    for level in range(min(DEPTHS, max(session.levels_left(), default=DEPTHS))):
        assert source is not None
        parents = torch.tensor(above, device=source.device)[:, None]
        yield source.top(Frontier.chain(parents, level), 1)[0][:, 0, 0].tolist()
        above = [row[column + level] for row, column in zip(text.ids, now, strict=True)]


def choose(name: str, measured: dict[Convention, list[float]], least: float = LEAST) -> tuple[Convention, str]:
    """Return the convention under which a chain is accepted furthest, and a note that says so, and which are as good.

    Args:
        name: the draft's.
        measured: agreement at each depth by convention; the format's own comes first.
        least: agreement at depth 1 below which the head is refused.

    Raises:
        ModelError: the head does not fit the target under any.
    """
    expected = {rule: sum(prod(rates[: d + 1]) for d in range(len(rates))) for rule, rates in measured.items()}
    best = max(expected, key=lambda rule: expected[rule])  # the first of equals
    if measured[best][0] < least:
        rates = ", ".join(f"{100 * rate:.0f} %" for rate in measured[best])
        tried = f"{len(measured)} conventions" if len(measured) > 1 else "the format's convention"
        raise ModelError(
            f"draft {name} does not fit this target: under the best of {tried} ({best}) its first choice is the "
            f"target's in {rates} of the cases at depths 1 to {len(measured[best])}, and {100 * least:.0f} % at depth "
            "1 are the least. It was trained for another target, or for one in another form: `specinfer check-draft` "
            "shows more"
        )
    tied = [str(rule) for rule, value in expected.items() if value == expected[best] and rule != best]
    others = f"; as good: {'; or '.join(tied)}" if tied else ""
    return best, f"draft {name} reads {best}: its first choice is the target's in {measured[best][0]:.0%}{others}"
