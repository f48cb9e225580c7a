"""What a generation returns: text, ids, one record per step, and figures derived from those records.

Knows: trees, paths, tokens, seconds.  Does not know: models, how anything was computed.

All counts are derived from the steps, so the parts of a result agree with each other.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, takewhile
from math import exp
from os import PathLike
from statistics import median
from typing import Any, TypeAlias, TypeVar

import torch
from msgspec import MsgspecError, convert, to_builtins
from torch import Tensor

from specinfer.common.display import Displayed, draw
from specinfer.common.files import checked_path, parse_json, write_json
from specinfer.common.token_text import KnownTokens, Tokenizer
from specinfer.common.values import installed, mapped
from specinfer.errors import InputError, SpecinferError
from specinfer.tree import Kind, TokenTree

FORMAT = 1  # of saved results
UNFINISHED = "unfinished"  # the finish reason of a text that nothing has ended, or an error
Kept = TypeVar("Kept")
TopLogprobs: TypeAlias = tuple[tuple[tuple[int, float], ...], ...]  # per token, ids with log-probabilities
REPR = 60  # characters of a text in its result's repr


@dataclass(frozen=True)
class Seconds:
    """Wall-clock seconds by stage.  In a batch all rows share the passes, so the figures are the batch's."""

    total: float = 0.0
    prefill: float = 0.0  # passes over prompts, target and drafts; of a pass that also scores trees, the prompts' share
    target: float = 0.0  # target passes over trees
    draft: float = 0.0  # draft passes
    learning: float = 0.0  # after the text, by drafts that learn between calls

    @property
    def decoding(self) -> float:
        """Everything but the prefill and what drafts learned afterwards."""
        return self.total - self.prefill - self.learning

    @property
    def bookkeeping(self) -> float:
        """All work but forward passes: n-gram look-ups, growing, sampling, verification, pruning."""
        return max(0.0, self.decoding - self.target - self.draft)

    def __sub__(self, earlier: "Seconds") -> "Seconds":
        """Return what was spent since an earlier reading of the same clocks."""
        return Seconds(**{name: value - getattr(earlier, name) for name, value in vars(self).items()})

    def to_dict(self) -> dict[str, float]:
        """Return a JSON-ready dict, bookkeeping included."""
        return {**vars(self), "bookkeeping": self.bookkeeping}


class State(StrEnum):
    """What became of a node."""

    ROOT = "root"
    ACCEPTED = "accepted"
    CUT = "cut"  # accepted, but the text ended before it
    REJECTED = "rejected"
    UNREACHED = "unreached"  # below a rejected node, or drawn after the accepted sibling


@dataclass(frozen=True)
class Step(Displayed):
    """One decode step of one row: one token tree, verified in one target pass."""

    tree: TokenTree
    path: tuple[int, ...]  # accepted nodes, root excluded, before any cut
    tokens: tuple[int, ...]  # tokens emitted: the accepted path, then the bonus token, cut where the text ended
    drafted_by: tuple[tuple[str, ...], ...]  # per emitted token: the drafts that proposed it, () = the target's own
    seconds: Seconds = Seconds()  # what the step took; in a batch, of all rows together
    logprobs: tuple[float, ...] | None = None  # per emitted token, if asked for: see `Result.logprobs`
    top_logprobs: TopLogprobs | None = None  # per emitted token, if asked for: see `Result.top_logprobs`

    def __repr__(self) -> str:
        return f"Step(tree={self.tree!r}, path={self.path}, tokens={self.tokens})"

    @property
    def bonus(self) -> int | None:
        """The target's own token after the accepted path; None if the text was cut before it."""
        return self.tokens[-1] if len(self.tokens) > len(self.path) else None

    @property
    def states(self) -> list[State]:
        """What became of each node of the tree.

        If the accepted token of a sampled tree was drawn twice, the draws in between count as not tried.
        """
        return states(self.tree, self.path, len(self.tokens), tried(self.tree, self.path))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Shows its tokens: the result's; None without one."""
        return self.tree.tokenizer

    def __str__(self) -> str:
        """Draw the tree, and what became of it."""
        return str(draw("text", self))

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-ready dict."""
        return {**_fields(self), "seconds": self.seconds.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "Step":
        """Return what `to_dict` described."""
        return _restored(data, cls)


@dataclass(frozen=True)
class Contribution:
    """What one draft did for a row, beside the others.

    In a batch the rows share its passes and seconds, as in `Stats`.
    """

    draft: str
    tokens: int  # emitted tokens on accepted paths that it proposed, alone or with others
    only: int  # leave-one-out: emitted tokens that would not have been accepted without it, summed over steps
    passes: int  # forward passes, prefill excluded
    seconds: float  # wall-clock, in proposing trees: passes, look-ups and growing; prefill excluded

    def __str__(self) -> str:
        return (
            f"{self.draft}: {self.tokens} tokens, {self.only} fewer without it, "
            f"in {self.passes} passes and {self.seconds:.2f} s"
        )


@dataclass(frozen=True)
class TreeSizes:
    """How large the trees were: means over the steps of a row."""

    nodes_per_step: float = 0.0  # drafted nodes that the target scored
    levels_per_step: float = 0.0  # depth of those trees
    plain_steps: int = 0  # steps without any drafted node
    steps: int = 0

    @classmethod
    def of(cls, steps: Sequence[Step]) -> "TreeSizes":
        """Compute the means over steps."""
        nodes, levels = ([getattr(step.tree, name) for step in steps] for name in ("num_drafted", "depth"))
        count = max(len(steps), 1)
        return cls(sum(nodes) / count, sum(levels) / count, nodes.count(0), len(steps))

    def __str__(self) -> str:
        return f"{self.nodes_per_step:.1f} nodes in {self.levels_per_step:.1f} levels a step"


def paid(steps: Sequence[Step]) -> str:
    """Return in words whether speculation paid: how often it was on, and what steps with a tree cost and wrote.

    A draft that was asked may have proposed nothing worth a node; its passes are no part of a plain step.
    """
    drafted, plain = ([step for step in steps if bool(step.tree.num_drafted) == on] for on in (True, False))
    state = f"off in {len(plain)}" if len(plain) > len(drafted) else f"on in {len(drafted)}"
    words = f"speculation {state} of {len(steps)} steps"
    usual = median(step.seconds.decoding - step.seconds.draft for step in plain) if plain else 0.0
    if not drafted or usual <= 0:
        return words
    cost = median(step.seconds.decoding for step in drafted) / usual
    tokens = sum(len(step.tokens) for step in drafted) / len(drafted)
    return f"{words}: a step with a tree took {cost:.1f} plain ones and wrote {tokens:.1f} tokens"


@dataclass(frozen=True)
class Stats:
    """Figures of one row.  Prefill passes are not counted as target passes; bonus tokens are counted as tokens.

    In a batch the rows share their passes: ``draft_passes`` and ``seconds`` are then those of the whole batch.
    """

    new_tokens: int
    target_passes: int
    draft_passes: int
    acceptance_by_depth: tuple[float, ...]  # [d]: accepted at depth d + 1, of the steps that tried that depth
    seconds: Seconds
    notes: tuple[str, ...] = ()  # what the engine decided, and why
    tree_sizes: TreeSizes = TreeSizes()
    drafts: tuple[Contribution, ...] = ()  # by draft id
    cached_tokens: int = 0  # of the prompt, which the target had read before: see `engine.store.PrefixStore`

    def __repr__(self) -> str:
        counts = f"new_tokens={self.new_tokens}, target_passes={self.target_passes}"
        rate = f"tokens_per_target_pass={self.tokens_per_target_pass:.2f}"
        return f"Stats({counts}, {rate}, tokens_per_second={self.tokens_per_second:.1f})"

    @property
    def tokens_per_target_pass(self) -> float:
        """The acceptance length tau: tokens committed per verification pass, bonus included."""
        return self.new_tokens / self.target_passes if self.target_passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """This row's new tokens over total wall-clock seconds."""
        return self.new_tokens / self.seconds.total if self.seconds.total else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-ready dict."""
        rates = {name: getattr(self, name) for name in ("tokens_per_target_pass", "tokens_per_second")}
        return {**_fields(self), **rates, "seconds": self.seconds.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "Stats":
        """Return what `to_dict` described."""
        return _restored(data, cls)

    def __str__(self) -> str:
        """Summarise in two lines."""
        s = self.seconds
        return (
            f"{self.new_tokens} tokens in {self.target_passes} target passes "
            f"({self.tokens_per_target_pass:.2f} per pass), {self.draft_passes} draft passes, "
            f"{self.tokens_per_second:.1f} tokens/s\n"
            f"seconds: {s.total:.2f} = prefill {s.prefill:.2f} + target {s.target:.2f} + draft {s.draft:.2f} "
            f"+ bookkeeping {s.bookkeeping:.2f}"
        )


@dataclass(frozen=True)
class Result(Displayed):
    """One prompt's continuation.

    Attributes:
        text: the new text, special tokens left out; empty when the decoder has no tokenizer.
        token_ids: the new tokens, an end-of-sequence token included if one was emitted.
        prompt_ids: the tokens the prompt became.
        finish_reason: "eos", "stop" (a stop string or stopping criterion), "length", "aborted" or "unfinished".
        seed: what reproduces it when sampling; None when greedy.
        steps: one `Step` per target pass.
        made_by: target, drafts, tree, verifier, sampling options, dtype, device and versions, JSON-ready.
        tokenizer: the decoder's, to display tokens.
    """

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    finish_reason: str
    seed: int | None
    stats: Stats
    steps: list[Step] = field(repr=False)
    made_by: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            for step in self.steps:
                step.tree.set_display(self.tokenizer, [draft.draft for draft in self.stats.drafts])

    @property
    def best_step(self) -> Step:
        """The step to look at first: see `best_step`.

        Raises:
            InputError: there are no steps.
        """
        return self.steps[best_step(self.steps)]

    @property
    def sequences(self) -> Tensor:
        """Prompt and new tokens, long (1, T), as ``model.generate`` returns them."""
        return torch.tensor([[*self.prompt_ids, *self.token_ids]], device="cpu")

    @property
    def accept_lengths(self) -> list[int]:
        """Tokens that each step emitted, the target's own included: one number per target pass."""
        return [len(step.tokens) for step in self.steps]

    @property
    def logprobs(self) -> list[float] | None:
        """Natural logarithms of the target's probability of each new token; None unless ``logprobs=True`` was given.

        The probabilities are the target's own, before temperature and other processors, as those of
        `SpeculativeDecoder.score`.
        """
        found = [step.logprobs for step in self.steps]
        return None if not found or None in found else [value for values in found for value in values or ()]

    @property
    def top_logprobs(self) -> TopLogprobs | None:
        """For each new token, the likeliest ones in its position and natural logarithms of their probabilities.

        They are the target's own, as `logprobs`, the likeliest first; None unless ``logprobs=`` named a number.
        """
        found = [step.top_logprobs for step in self.steps]
        return None if not found or None in found else tuple(top for tops in found for top in tops or ())

    def __str__(self) -> str:
        """Return the text."""
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= REPR else f"{self.text[: REPR - 3]}..."
        passes = f"new_tokens={len(self.token_ids)}, target_passes={len(self.steps)}"
        return f"Result({text!r}, finish_reason={self.finish_reason!r}, seed={self.seed}, {passes})"

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-ready dict of text, ids and stats (steps have their own `Step.to_dict`)."""
        names = "text", "token_ids", "logprobs", "top_logprobs", "finish_reason", "seed"
        return {**{name: getattr(self, name) for name in names}, "stats": self.stats.to_dict()}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the result to a JSON file, steps and the texts of their tokens included: see `load`.

        Raises:
            InputError: the file cannot be written.
            SpecinferError: the disk is full.
        """
        tokens = known_tokens(self)
        steps, prompt = [step.to_dict() for step in self.steps], self.prompt_ids
        data = {**self.to_dict(), "prompt_ids": prompt, "steps": steps, "made_by": dict(self.made_by)}
        write_json(path, {"specinfer result": FORMAT, **data, "known": tokens and _fields(tokens)})

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Result":
        """Return a saved result.  It knows its own tokens' texts, and has no tokenizer beyond that.

        Raises:
            InputError: there is no such file, or it holds no saved result.
        """
        try:
            data = parse_json(checked_path(path).read_bytes())
            if data["specinfer result"] != FORMAT:
                raise InputError(
                    f"{path} is of format {data['specinfer result']!r:.20}, and this version reads {FORMAT}"
                )
            return replace(_restored(data, cls), tokenizer=data["known"] and _restored(data["known"], KnownTokens))
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror or error})") from error
        except InputError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, SpecinferError, MsgspecError) as error:
            reason = f"holds no saved result ({error!s:.120})"
            raise InputError(f"{path} {reason}: give a file that Result.save wrote") from error

    def to_pandas(self) -> Any:
        """Return a data frame with a row for each new token.

        Columns: the step it was emitted in, from 0; the position in the text, from 0; its id, and its text alone (the
        id without a tokenizer); its depth in the step's tree, None for the target's own; the drafts that proposed it,
        joined by "+", "" for none; p, the target's probability of it, None without `logprobs`; q, the drafts' in the
        tree, None for the target's own; the step's seconds, shared by its tokens.

        Raises:
            InputError: pandas is not installed.
        """
        pandas = installed("pandas", "a data frame needs pandas (or use steps)")
        starts = accumulate((len(step.tokens) for step in self.steps), initial=0)
        rows = [
            {
                "step": number,
                "position": start + offset,
                "token_id": token,
                "text": self.tokenizer.decode([token]) if self.tokenizer else str(token),
                "depth": offset + 1 if offset < len(step.path) else None,
                "drafted_by": "+".join(names),
                "p": None if step.logprobs is None else exp(step.logprobs[offset]),
                "q": step.tree.probability(step.path[offset]) if offset < len(step.path) else None,
                "step_seconds": step.seconds.total,
            }
            for number, (start, step) in enumerate(zip(starts, self.steps, strict=False))
            for offset, (token, names) in enumerate(zip(step.tokens, step.drafted_by, strict=True))
        ]
        columns = ["step", "position", "token_id", "text", "depth", "drafted_by", "p", "q", "step_seconds"]
        return pandas.DataFrame(rows, columns=columns).astype({"depth": "Int64", "p": "Float64", "q": "Float64"})

    def __getstate__(self) -> dict[str, object]:
        """Pickle the texts of its tokens in place of the tokenizer."""
        return {**self.__dict__, "tokenizer": known_tokens(self)}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.__post_init__()


def best_step(steps: Sequence[object]) -> int:
    """Return the number, from 0, of the step to look at first, of those that have a tree and an accepted path.

    It is the one that accepted most, of those whose trees branch and were accepted in part, if there are any.

    Raises:
        InputError: there are no steps.
    """
    if not steps:
        raise InputError("no step was decoded, so there is no tree to show: ask for at least one new token")

    def worth(step: Any) -> tuple[bool, int, int]:
        drafted, accepted = step.tree.num_drafted, len(step.path)
        return accepted > 0 and drafted > step.tree.depth, accepted, drafted

    return max(range(len(steps)), key=lambda number: worth(steps[number]))


def known_tokens(result: Result) -> KnownTokens | None:
    """Return what a result shows of its tokenizer: every token of its texts and trees; None without a tokenizer."""
    if result.tokenizer is None or isinstance(result.tokenizer, KnownTokens):
        return result.tokenizer
    drafted = (token for step in result.steps for token in step.tree.tokens.tolist())
    emitted = (token for step in result.steps for token in step.tokens)
    return KnownTokens.of(
        result.tokenizer, [*result.prompt_ids, *result.token_ids, *drafted, *emitted], [result.prompt_ids]
    )


def _restored(data: object, kind: type[Kept]) -> Kept:
    """Return what `to_dict` described; raise `MsgspecError` with the field that is wrong, or `TreeError`."""
    return convert(data, kind, str_keys=True, dec_hook=lambda _, tree: TokenTree.from_dict(tree))


def _fields(record: object) -> dict[str, Any]:
    """Return the fields of a step or of figures, JSON-ready, with lists for tuples: `_restored` reads them."""
    fields = to_builtins(record, enc_hook=TokenTree.to_dict)
    return {name: mapped(value, lambda leaf: leaf) for name, value in fields.items()}


def states(tree: TokenTree, path: Sequence[int], kept: int, tried: Container[int]) -> list[State]:
    """Return what became of each node of a tree.

    Args:
        tree: of N nodes.
        path: the accepted ones, root excluded.
        kept: how many of their tokens are in the text.
        tried: the nodes that verification tested.
    """
    found = [State.ROOT, *(State.REJECTED if node in tried else State.UNREACHED for node in range(1, len(tree)))]
    for depth, node in enumerate(path):
        found[node] = State.ACCEPTED if depth < kept else State.CUT
    return found


def tried(tree: TokenTree, path: Sequence[int]) -> set[int]:
    """Return the nodes that verification tested: all children along the path, or all draws until one was accepted."""
    nodes: set[int] = set()
    for node, accepted in zip((0, *path), (*path, None), strict=True):
        drawn = [child for _, child in tree.draws_under(node)]
        until = drawn.index(accepted) + 1 if accepted is not None and tree.kind is not Kind.RANKED else len(drawn)
        nodes.update(drawn[:until])
    return nodes


def counts_by_depth(steps: Iterable[Step]) -> list[tuple[int, int]]:
    """Return, per depth 1, 2, ..., how many steps accepted a node there, and how many had a node to test.

    Levels after the end of the text count in neither, so the accepted nodes are the drafted tokens of the text.
    """
    accepted, tested = Counter[int](), Counter[int]()
    for step in steps:
        parents = (0, *step.path)[: len(step.tokens)]  # of the tokens that the step emitted
        accepted.update(range(min(len(step.path), len(step.tokens))))
        tested.update(depth for depth, node in enumerate(parents) if step.tree.children(node))
    return [(accepted[depth], count) for depth, count in sorted(tested.items())]


def contribution(steps: Iterable[Step], draft: int, name: str, passes: int, seconds: float) -> Contribution:
    """Return what the draft with this id did in steps of one row or of several."""
    tokens = only = 0
    for step in (step for step in steps if step.path):
        proposers = step.tree.proposers
        path = [proposers[node] for node in step.path[: len(step.tokens)]]
        tokens += sum(mask >> draft & 1 for mask in path)
        only += len(path) - reach(path, ~(1 << draft))
    return Contribution(name, tokens, only, passes, seconds)


def drafted_by(tree: TokenTree, path: Sequence[int], names: Sequence[str], tokens: int) -> tuple[tuple[str, ...], ...]:
    """Return, per emitted token, the names of the drafts that proposed it; () = the target's own.

    Args:
        tree, path: what was accepted.
        names: by draft id.
        tokens: how many were emitted.
    """
    masks = [tree.proposers[node] for node in path]
    return (*(tuple(name for draft, name in enumerate(names) if mask >> draft & 1) for mask in masks), ())[:tokens]


def reach(path: Iterable[int], drafts: int) -> int:
    """Return how long an accepted path would have been with some drafts only.

    Args:
        path: per node, the drafts that proposed it, as a bit mask (`TokenTree.proposers`).
        drafts: the drafts that remain, as a bit mask.
    """
    return sum(1 for _ in takewhile(lambda proposers: proposers & drafts, path))
