"""What there is to show of a tree, a step, a result or an inspection: one description for all painters.

Knows: trees, steps, results, inspections, a tokenizer.  Does not know: HTML, pictures.

`Description.to_dict` is the JSON that the page draws:

    drafts   names by draft id
    shapes   of drafts, by id
    marks    state -> its mark and its words in a legend
    rule     "greedy", "coupled" or "coins": what decided; null if that is not known
    seed     of a sampled result
    prompt   {"text", "tokens"}
    stats    of a result: new_tokens, target_passes, draft_passes, tokens_per_target_pass, seconds
    notes    what the engine or the inspection has to say
    texts    token id -> text with visible white space
    columns  token id -> how many columns of a terminal the text takes
    steps    one entry each, in columns with an entry per node:
        tokens, parents, states    token ids, parent nodes, what became of them (`specinfer.results.State`)
        q, draws                   the draft's probability given the parent; [draft, order among its draws there]
        lines                      the line that a node is drawn on; if there is a bonus token, its line comes last
        path, bonus                accepted nodes; the target's own token, null if there is none
        emitted                    token ids
        position                   of the root in the text, null if not known; node i stands at position + its depth and
                                   was written to cache slot position + i
        seconds, change            of a recorded step; how the tree of an inspected one was changed
        p, ratio, noise, margin, tests, why     of an inspection: see `NodeInspection`; left out where no node has any
        top                        of an inspection: what the target nearly said after the node, as [token id, p] or
                                   [token id, p, noise]; unless coins decide, the first one is its choice

Probabilities and the like are rounded to three digits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import Any

from specinfer.results import Result, Seconds, State, Step
from specinfer.tree import TokenTree
from specinfer.tree.drawing import STATES, TreeDrawing, columns
from specinfer.viz.inspection import Inspection, StepInspection
from specinfer.viz.rescoring import BY_HAND
from specinfer.viz.style import shapes
from specinfer.viz.token_text import token_text

PROMPT_CHARACTERS = 4000  # of a longer prompt, the last ones are shown
INSPECTED = ("p", "ratio", "noise", "margin", "tests")


@dataclass(frozen=True)
class DrawnStep:
    """One tree and what became of it, whatever it came from."""

    tree: TokenTree
    drawing: TreeDrawing
    states: Sequence[State] | None  # None: not verified
    path: Sequence[int] = ()
    bonus: int | None = None
    emitted: Sequence[int] = ()
    position: int | None = None
    seconds: Seconds | None = None
    inspection: StepInspection | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the step in columns."""
        nodes = self.inspection.nodes if self.inspection else ()
        data: dict[str, Any] = {
            "tokens": self.tree.tokens.tolist(),
            "parents": self.tree.parents.tolist(),
            "q": [_short(node.probability) for node in self.drawing.nodes[: len(self.tree)]],
            "draws": [[list(draw) for draw in draws] for draws in self.tree.draws],
            "lines": [round(line, 2) for line in self.drawing.lines],
            "states": None if self.states is None else [str(state) for state in self.states],
            "path": list(self.path),
            "bonus": self.bonus,
            "emitted": list(self.emitted),
            "position": self.position,
        }
        if self.seconds is not None:
            data["seconds"] = _short(self.seconds.to_dict())
        if self.inspection:
            data["change"] = self.inspection.change
            inspected = {name: [_short(getattr(node, name)) for node in nodes] for name in INSPECTED}
            data |= {name: column for name, column in inspected.items() if name == "p" or any(column)}
            data["top"] = [[_short([x for x in one if x is not None]) for one in node.top] for node in nodes]
            data["why"] = [self.inspection.why(node) for node in range(len(nodes))]
        return data


@dataclass(frozen=True)
class Description:
    """What there is to show.

    Attributes:
        shows: the name of its type.
        drafts: names by draft id.
        steps: one per tree.
        tokenizer: from ids to text; None shows ids.
        result: what the steps belong to, if that is known.
        notes: what the inspection has to say.
    """

    shows: str
    drafts: list[str]
    steps: list[DrawnStep]
    tokenizer: Any
    result: Result | None
    notes: Sequence[str]

    @property
    def best(self) -> DrawnStep:
        """The step that accepted most."""
        return max(self.steps, key=lambda step: len(step.path))

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
        """What decided, where the nodes tell: "greedy", "coupled" or "coins"."""
        root = next((step.inspection.nodes[0] for step in self.steps if step.inspection), None)
        if root is None:
            return None
        return "coins" if root.choice is None else "greedy" if root.top[0].noise is None else "coupled"

    def to_dict(self) -> dict[str, Any]:
        """Return all that the page draws, ready for JSON."""
        steps = [step.to_dict() for step in self.steps]
        ids = {token for step in steps for token in [*step["tokens"], *step["emitted"], *_alternatives(step)]}
        texts = {str(token): token_text(self.tokenizer, token) for token in sorted(ids)}
        data: dict[str, Any] = {
            "shows": self.shows,
            "drafts": self.drafts,
            "shapes": shapes(self.drafts),
            "marks": {state: list(words) for state, words in STATES.items()},
            "rule": self.rule,
            "texts": texts,
            "columns": {token: columns(text) for token, text in texts.items()},
            "steps": steps,
        }
        if self.result is None:
            return data
        ids = self.result.prompt_ids
        text = self.tokenizer.decode(ids) if self.tokenizer else " ".join(map(str, ids))
        stats = self.result.stats.to_dict()
        kept = ("new_tokens", "target_passes", "draft_passes", "tokens_per_target_pass", "seconds")
        return data | {
            "seed": self.result.seed,
            "text": self.result.text,
            "finish_reason": self.result.finish_reason,
            "notes": [*self.result.stats.notes, *self.notes],
            "prompt": {"text": text[-PROMPT_CHARACTERS:], "tokens": len(ids)},
            "stats": {name: _short(stats[name]) for name in kept},
        }


def describe(thing: Any, tokenizer: Any = None) -> Description:
    """Describe what there is to show of a `TokenTree`, `Step`, `Result`, `Inspection` or `StepInspection`.

    Args:
        thing: what to show.
        tokenizer: from ids to text; by default what the thing was made with, else ids are shown.
    """
    result = getattr(thing, "result", thing if isinstance(thing, Result) else None)
    tokenizer = tokenizer or getattr(thing if result is None else result, "tokenizer", None)
    drafts = _draft_names(thing, result)
    steps = list(_steps(thing, tokenizer, len(drafts) - 1 if BY_HAND in drafts else None))
    return Description(type(thing).__name__, drafts, steps, tokenizer, result, getattr(thing, "notes", ()))


def _draft_names(thing: Any, result: Result | None) -> list[str]:
    """Return the names of drafts by id; numbers for a tree or a step, which does not know them."""
    if isinstance(thing, StepInspection):
        return thing.draft_names
    if result is not None:
        return [draft.draft for draft in result.stats.drafts]
    proposers = (thing if isinstance(thing, TokenTree) else thing.tree).proposers
    return [f"draft {i}" for i in range(max(proposers).bit_length())]


def _steps(thing: Any, tokenizer: Any, by_hand: int | None) -> Iterator[DrawnStep]:
    text = cache(lambda token: token_text(tokenizer, token))
    if not isinstance(thing, Result | Inspection):
        yield _step(thing, text, by_hand)
        return
    position = len(getattr(thing, "result", thing).prompt_ids) - 1
    for step in thing.steps:
        yield _step(step, text, by_hand, position)
        position += len(step.tokens)


def _step(
    thing: TokenTree | Step | StepInspection,
    text: Callable[[int], str],
    by_hand: int | None,
    position: int | None = None,
) -> DrawnStep:
    if isinstance(thing, TokenTree):
        return DrawnStep(thing, TreeDrawing.of(thing, text), None)
    inspection = thing if isinstance(thing, StepInspection) else None
    bonus = thing.bonus if len(thing.tokens) > len(thing.path) else None  # cut before it: not emitted
    bonus_text = None if bonus is None else text(bonus)
    return DrawnStep(
        tree=thing.tree,
        drawing=TreeDrawing.of(thing.tree, text, thing.states, bonus_text, (0, *thing.path)[-1], by_hand),
        states=thing.states,
        path=thing.path,
        bonus=bonus,
        emitted=thing.tokens,
        position=inspection.nodes[0].position if inspection else position,
        seconds=getattr(inspection.step if inspection else thing, "seconds", None),
        inspection=inspection,
    )


def _alternatives(step: dict[str, Any]) -> list[int]:
    """Return the token ids among an inspected step's alternatives."""
    return [token for top in step.get("top", ()) for token, *_ in top]


def _short(value: Any) -> Any:
    """Return numbers in three digits, whatever they stand in; None for what JSON has no word for."""
    if isinstance(value, float):
        return float(f"{value:.3g}") if isfinite(value) else None
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    return value
