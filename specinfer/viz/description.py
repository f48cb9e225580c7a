"""The description of a tree, a step, a result or an inspection: one for all painters.

Knows: trees, steps, results, inspections, a tokenizer.  Does not know: HTML, pictures.

`Description.to_dict` is the JSON that the page draws:

    drafts   names by draft id
    shapes   of drafts, by id
    colours  of drafts, by id, as names of the palette
    marks    state -> its mark
    legend   what shapes and marks mean, as [sign, words]
    rule     "greedy", "coupled" or "coins": what decided; null if that is not known
    seed     of a sampled result
    prompt   {"text", "tokens"}
    stats    of a result: new_tokens, target_passes, draft_passes, tokens_per_target_pass, tokens_per_second, seconds
    notes    what the engine or the inspection has to say
    made_by  of a result: see `Result.made_by`
    texts    token id -> text
    columns  token id -> how many columns of a terminal the text takes, with visible white space
    best     the number of the step to look at first
    steps    one entry each, in columns with an entry per node:
        tokens, parents, states    token ids, parent nodes, what became of them (`specinfer.results.State`)
        q, draws                   the draft's probability given the parent; [draft, order among its draws there]
        lines                      the line that a node is drawn on; if there is a bonus token, its line comes last
        path, bonus                accepted nodes; the target's own token, null if there is none
        emitted                    token ids
        split                      nodes (and the bonus token, as the next number) in which a character begins or ends
                                   that several tokens share -> [characters that end here, other bytes, columns]
        position                   of the root in the text, null if not known; node i stands at position + its depth and
                                   was written to cache slot position + i
        seconds, change            of a recorded step; how the tree of an inspected one was changed
        p, ratio, noise, margin, tests, why     of an inspection: see `NodeInspection`; left out where no node has any
        top                        of an inspection: what the target nearly said after the node, as [token id, p] or
                                   [token id, p, noise]; unless coins decide, the first one is its choice

Probabilities and the like are rounded to three digits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from typing import TypeAlias

from specinfer.common.records import Record
from specinfer.common.token_text import Piece, Tokenizer, last_piece, piece_after, plain_text, split_bytes, visible
from specinfer.common.values import mapped
from specinfer.evaluation.inspect.inspection import Inspection, StepInspection
from specinfer.evaluation.inspect.rescoring import BY_HAND
from specinfer.results import Result, Step, best_step
from specinfer.tree import TokenTree
from specinfer.tree.drawing import STATES, TreeDrawing, columns
from specinfer.viz.style import SHAPES, by_draft

PROMPT_CHARACTERS = 4000  # of a longer prompt, the last ones are shown
LONGEST_CHARACTER = 4  # bytes, in UTF-8
Drawable: TypeAlias = TokenTree | Step | Result | Inspection | StepInspection
INSPECTED = ("p", "ratio", "noise", "margin", "tests")


@dataclass(frozen=True)
class DrawnStep:
    """One tree and its fate, whatever it came from."""

    tree: TokenTree
    drawing: TreeDrawing
    record: Step | StepInspection | None = None  # None: not verified
    bonus: int | None = None
    position: int | None = None  # of the root in the text
    pieces: Mapping[int, Piece] = field(default_factory=dict)  # where characters are split: by node, the bonus last

    @property
    def path(self) -> tuple[int, ...]:
        """The accepted nodes, root excluded."""
        return self.record.path if self.record else ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The emitted tokens."""
        return tuple(self.record.tokens) if self.record else ()

    @property
    def authors(self) -> list[tuple[int, ...]]:
        """The drafts that proposed each emitted token; none of the target's own."""
        path = [self.drawing.nodes[node].drafts for node in self.path[: len(self.tokens)]]
        return [*path, *[()] * (len(self.tokens) - len(path))]

    def to_dict(self) -> Record:
        """Return the step in columns."""
        data: Record = {
            "tokens": self.tree.tokens.tolist(),
            "parents": self.tree.parents.tolist(),
            "q": [_short(node.probability) for node in self.drawing.nodes[: len(self.tree)]],
            "draws": [[list(draw) for draw in draws] for draws in self.tree.draws],
            "lines": [int(y) if y.is_integer() else round(y, 2) for y in self.drawing.lines],
            "states": list(map(str, self.record.states)) if self.record else None,
            "path": list(self.path),
            "bonus": self.bonus,
            "emitted": list(self.tokens),
            "position": self.position,
        }
        if self.pieces:
            data["split"] = {
                str(node): [piece.text, piece.rest.decode("ascii", "backslashreplace"), columns(str(piece))]
                for node, piece in self.pieces.items()
            }
        if step := self.record.step if isinstance(self.record, StepInspection) else self.record:
            data["seconds"] = _short(step.seconds.to_dict())
        return data | (_inspected(self.record) if isinstance(self.record, StepInspection) else {})


@dataclass(frozen=True)
class Description:
    """The description of a thing to show.

    Attributes:
        thing: that was described.
        drafts: names by draft id.
        steps: one per tree.
        tokenizer: from ids to text; None shows ids.
        result: that the steps belong to, if it is known.
    """

    thing: object
    drafts: list[str]
    steps: list[DrawnStep]
    tokenizer: Tokenizer | None
    result: Result | None

    @property
    def best(self) -> DrawnStep:
        """The step to look at first.

        Raises:
            InputError: there are no steps.
        """
        return self.steps[best_step(self.steps)]

    @property
    def title(self) -> str:
        """A title for a page."""
        if self.result is None:
            return "A token tree"
        return f"{self.result.stats.new_tokens} tokens in {self.result.stats.target_passes} target passes"

    @property
    def plain(self) -> str:
        """Text for places that run no scripts: a result's, else a tree's tokens, indented."""
        if self.result is not None:
            return self.result.text
        nodes = [node for step in self.steps for node in step.drawing.nodes[: len(step.tree)]]
        return "\n".join("  " * node.depth + node.text for node in nodes)

    @property
    def rule(self) -> str | None:
        """The rule that decided, where the nodes tell: "greedy", "coupled" or "coins"."""
        record = self.best.record
        if not isinstance(record, StepInspection):
            return None
        root = record.nodes[0]
        return "coins" if root.choice is None else "greedy" if root.top[0].noise is None else "coupled"

    @property
    def shapes(self) -> list[str]:
        """The shapes of the drafts."""
        return ["✎" if name == BY_HAND else SHAPES[draft % len(SHAPES)] for draft, name in enumerate(self.drafts)]

    def legend(self, steps: Iterable[DrawnStep]) -> list[list[str]]:
        """Return the meaning of shapes and marks, as [sign, words], as far as they occur in some steps."""
        nodes = [node for step in steps for node in step.drawing.nodes]
        drafts = sorted({draft for node in nodes for draft in node.drafts})
        states = {node.state for node in nodes} - {"root", "drafted"}
        signs = [[mark or "┄", words] for state, (mark, words) in STATES.items() if state in states]
        return [*([self.shapes[draft], self.drafts[draft]] for draft in drafts), *signs]

    def to_dict(self) -> dict[str, object]:
        """Return all that the page draws, ready for JSON."""
        steps = [step.to_dict() for step in self.steps]
        tops = [token for step in steps for top in step.get("top", ()) for token, *_ in top]
        ids = {*tops, *(token for step in steps for token in [*step["tokens"], *step["emitted"]])}
        texts = {str(token): plain_text(self.tokenizer, token) for token in sorted(ids)}
        data: dict[str, object] = {
            "shows": type(self.thing).__name__,
            "drafts": self.drafts,
            "shapes": self.shapes,
            "colours": [by_draft(draft) for draft in range(len(self.drafts))],
            "marks": {state: mark for state, (mark, _) in STATES.items()},
            "legend": self.legend(self.steps),
            "rule": self.rule,
            "texts": texts,
            "best": best_step(self.steps),
            "columns": {token: columns(visible(text)) for token, text in texts.items()},
            "steps": steps,
        }
        if self.result is None:
            return data
        prompt = self.result.prompt_ids
        text = self.tokenizer.decode(prompt) if self.tokenizer else " ".join(map(str, prompt))
        stats = self.result.stats.to_dict()
        left_out = ("acceptance_by_depth", "notes", "tree_sizes", "drafts")
        return data | {
            "seed": self.result.seed,
            "made_by": dict(self.result.made_by),
            "text": self.result.text,
            "finish_reason": self.result.finish_reason,
            "notes": [*self.result.stats.notes, *getattr(self.thing, "notes", ())],
            "prompt": {"text": text[-PROMPT_CHARACTERS:], "tokens": len(prompt)},
            "stats": {name: _short(value) for name, value in stats.items() if name not in left_out},
        }


def describe(thing: Drawable, tokenizer: Tokenizer | None = None) -> Description:
    """Describe a thing for painters.

    Args:
        thing: to show.
        tokenizer: from ids to text; by default the one that the thing was made with, else ids are shown.
    """
    result = thing if isinstance(thing, Result) else getattr(thing, "result", None)
    tokenizer = tokenizer or getattr(thing if result is None else result, "tokenizer", None)
    return Description(thing, _draft_names(thing, result), list(_steps(thing, tokenizer)), tokenizer, result)


def _draft_names(thing: Drawable, result: Result | None) -> list[str]:
    """Return the names of drafts by id; numbers for a tree or a step that does not know them."""
    if isinstance(thing, StepInspection):
        return thing.draft_names
    if isinstance(thing, TokenTree | Step):
        trees = [thing if isinstance(thing, TokenTree) else thing.tree]
        names = list(trees[0].draft_names)
    else:
        assert result is not None
        trees, names = [step.tree for step in result.steps], [draft.draft for draft in result.stats.drafts]
    ids = range(len(names), max((max(tree.proposers).bit_length() for tree in trees), default=0))
    # contrastive search's candidates are the target's own
    return [*names, *("target" if names or result is not None else f"draft {i}" for i in ids)]


def _steps(thing: Drawable, tokenizer: Tokenizer | None) -> Iterator[DrawnStep]:
    tokens = _Tokens(tokenizer)
    if isinstance(thing, TokenTree):
        yield DrawnStep(thing, TreeDrawing.of(thing, tokens.text))
    elif isinstance(thing, Step):
        yield _step(thing, tokens, None)
    elif isinstance(thing, StepInspection):
        yield _step(thing, tokens, thing.nodes[0].position, by_hand=len(thing.draft_names) - 1)
    else:
        result = thing if isinstance(thing, Result) else thing.result
        ids, position = [*result.prompt_ids, *result.token_ids], len(result.prompt_ids) - 1
        for step in thing.steps:
            yield _step(step, tokens, position, ids[max(0, position - LONGEST_CHARACTER) : position])
            position += len(step.tokens)


class _Tokens:
    """A tokenizer that is asked once for each token."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.text = cache(lambda token: visible(plain_text(tokenizer, token)))
        self.split = cache(lambda token: split_bytes(tokenizer, token))


def _step(
    step: Step | StepInspection,
    tokens: _Tokens,
    position: int | None,
    before: Sequence[int] = (),
    by_hand: int | None = None,
) -> DrawnStep:
    """Describe a step, given the tokens just before its root."""
    bonus = step.bonus if len(step.tokens) > len(step.path) else None  # cut before it: not emitted
    text, end = None if bonus is None else tokens.text(bonus), (0, *step.path)[-1]
    drawing = TreeDrawing.of(step.tree, tokens.text, step.states, text, end, by_hand)
    every = [*step.tree.tokens.tolist(), *([] if bonus is None else [bonus])]
    pieces = _pieces([node.parent for node in drawing.nodes], every, before, tokens)
    nodes = [node._replace(text=str(pieces.get(i, node.text))) for i, node in enumerate(drawing.nodes)]
    return DrawnStep(step.tree, TreeDrawing(nodes), step, bonus, position, pieces)


def _pieces(parents: Sequence[int], tokens: Sequence[int], before: Sequence[int], known: _Tokens) -> dict[int, Piece]:
    """Return the shares of the nodes in which a character is split, by node."""
    found: dict[int, Piece] = {}
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        if node == 0:
            piece = last_piece(map(known.split, [*before, token]))
        else:
            piece = piece_after(found[parent].open if parent in found else b"", known.split(token))
        if piece is not None:
            found[node] = piece
    return found


def _inspected(step: StepInspection) -> dict[str, object]:
    """Return the columns that an inspection adds."""
    columns = {name: [_short(getattr(node, name)) for node in step.nodes] for name in INSPECTED}
    return {
        "change": step.change,
        **{name: column for name, column in columns.items() if name == "p" or any(column)},
        "top": [[_short([x for x in one if x is not None]) for one in node.top] for node in step.nodes],
        "why": [step.why(node) for node in range(len(step.nodes))],
    }


def _short(value: object) -> object:
    """Return numbers in three digits, whatever they stand in; None for infinities and NaN, which JSON lacks."""
    return mapped(value, lambda leaf: leaf if not isinstance(leaf, float) else _digits(leaf))


def _digits(number: float) -> float | None:
    return float(f"{number:.3g}") if isfinite(number) else None
