"""What there is to show of a tree, a step, a result or an inspection, as plain data for JSON.

Knows: trees, steps, results, inspections, a tokenizer.  Does not know: HTML, pictures.

    drafts   names by draft id
    rule     "greedy", "coupled" or "coins": what decided; null if that is not known
    seed     of a sampled result
    prompt   {"text", "tokens"}
    stats    of a result: new_tokens, target_passes, draft_passes, tokens_per_target_pass, seconds
    notes    what the engine or the inspection has to say
    texts    token id -> text with visible white space
    steps    one entry each, in columns with an entry per node:
        tokens, parents, states    token ids, parent nodes, what became of them (`specinfer.results.State`)
        q, draws                   the draft's probability given the parent; [draft, order among its draws there]
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

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from specinfer.results import Result, Seconds, State, Step
from specinfer.tree import TokenTree
from specinfer.viz.inspection import Inspection, StepInspection
from specinfer.viz.token_text import token_text

PROMPT_CHARACTERS = 4000  # of a longer prompt, the last ones are shown


@dataclass(frozen=True)
class DrawnStep:
    """One tree and what became of it, whatever it came from."""

    tree: TokenTree
    states: Sequence[State] | None = None  # None: not verified
    path: Sequence[int] = ()
    bonus: int | None = None
    emitted: Sequence[int] = ()
    position: int | None = None
    seconds: Seconds | None = None
    inspection: StepInspection | None = None

    @property
    def end(self) -> int:
        """The node that the bonus token follows."""
        return self.path[-1] if self.path else 0


def views(thing: Any) -> list[DrawnStep]:
    """Return the trees of whatever can be shown, in order."""
    if isinstance(thing, TokenTree):
        return [DrawnStep(thing)]
    if isinstance(thing, Step):
        return [_of_step(thing)]
    if isinstance(thing, StepInspection):
        return [_of_inspection(thing)]
    if isinstance(thing, Inspection):
        return [_of_inspection(step) for step in thing.steps]
    return list(_of_result(thing))


def tokenizer_of(thing: Any) -> Any:
    """Return the tokenizer that a thing was made with, if it knows."""
    return getattr(getattr(thing, "result", thing), "tokenizer", None)


def draft_names(thing: Any) -> list[str]:
    """Return the names of drafts by id; numbers for a tree or a step, which does not know them."""
    if isinstance(thing, StepInspection):
        return thing.draft_names
    if isinstance(thing, Result | Inspection):
        result = thing.result if isinstance(thing, Inspection) else thing
        return [draft.draft for draft in result.stats.drafts]
    ids = [draw.draft for view in views(thing) for draws in view.tree.draws for draw in draws]
    return [f"draft {i}" for i in range(max(ids, default=-1) + 1)]


def model(thing: Any, tokenizer: Any = None) -> dict[str, Any]:
    """Return what there is to show of a `TokenTree`, `Step`, `Result`, `Inspection` or `StepInspection`.

    Args:
        thing: what to show.
        tokenizer: from ids to text; by default what the thing was made with, else ids are shown.
    """
    tokenizer = tokenizer or tokenizer_of(thing)
    steps = [_step(view) for view in views(thing)]
    ids = {token for step in steps for token in [*step["tokens"], *step["emitted"], *_mentioned(step)]}
    result = getattr(thing, "result", thing if isinstance(thing, Result) else None)
    data: dict[str, Any] = {
        "shows": type(thing).__name__,
        "drafts": draft_names(thing),
        "rule": _rule(thing),
        "texts": {str(token): token_text(tokenizer, token) for token in sorted(ids)},
        "steps": steps,
    }
    if result is not None:
        data |= _of_call(result, tokenizer)
        data["notes"] += getattr(thing, "notes", ())
    return data


def json_of(data: dict[str, Any]) -> str:
    """Return a model as JSON on one line, without NaN and infinities."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def plain(data: dict[str, Any]) -> str:
    """Return a model as text, for places that run no scripts: a result's text, else a tree's tokens, indented."""
    if "text" in data:
        return str(data["text"])
    texts, lines = data["texts"], []
    for step in data["steps"]:
        indent: list[str] = []
        for token, parent in zip(step["tokens"], step["parents"], strict=True):
            indent.append("" if parent < 0 else indent[parent] + "  ")
            lines.append(indent[-1] + texts[str(token)])
    return "\n".join(lines)


def _of_step(step: Step, position: int | None = None) -> DrawnStep:
    return DrawnStep(step.tree, step.states, step.path, step.bonus, step.tokens, position, step.seconds)


def _of_result(result: Result) -> Iterator[DrawnStep]:
    position = len(result.prompt_ids) - 1
    for step in result.steps:
        yield _of_step(step, position)
        position += len(step.tokens)


def _of_inspection(step: StepInspection) -> DrawnStep:
    fates = [node.state for node in step.nodes]
    seconds = step.step.seconds if step.step else None
    bonus = step.bonus if len(step.tokens) > len(step.path) else None  # cut before it: not emitted
    return DrawnStep(step.tree, fates, step.path, bonus, step.tokens, step.nodes[0].position, seconds, step)


def _rule(thing: Any) -> str | None:
    """Return what decided, where the nodes tell."""
    nodes = [view.inspection.nodes[0] for view in views(thing) if view.inspection]
    if not nodes:
        return None
    return "coins" if nodes[0].choice is None else "greedy" if nodes[0].top[0].noise is None else "coupled"


def _of_call(result: Result, tokenizer: Any) -> dict[str, Any]:
    """Return what a result knows beside its steps."""
    text = tokenizer.decode(result.prompt_ids) if tokenizer else " ".join(map(str, result.prompt_ids))
    stats = result.stats.to_dict()
    kept = ("new_tokens", "target_passes", "draft_passes", "tokens_per_target_pass", "seconds")
    return {
        "seed": result.seed,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "notes": list(result.stats.notes),
        "prompt": {"text": text[-PROMPT_CHARACTERS:], "tokens": len(result.prompt_ids)},
        "stats": {name: _short(stats[name]) for name in kept},
    }


def _step(view: DrawnStep) -> dict[str, Any]:
    """Return a view in columns."""
    tree, nodes = view.tree, view.inspection.nodes if view.inspection else ()
    data: dict[str, Any] = {
        "tokens": tree.tokens.tolist(),
        "parents": tree.parents.tolist(),
        "q": [None, *(_short(tree.probability(node)) for node in range(1, len(tree)))],
        "draws": [[list(draw) for draw in draws] for draws in tree.draws],
        "states": None if view.states is None else [str(state) for state in view.states],
        "path": list(view.path),
        "bonus": view.bonus,
        "emitted": list(view.emitted),
        "position": view.position,
    }
    if view.seconds is not None:
        data["seconds"] = _short(view.seconds.to_dict())
    if view.inspection:
        data["change"] = view.inspection.change
        columns = {name: [_short(getattr(node, name)) for node in nodes] for name in INSPECTED}
        data |= {name: column for name, column in columns.items() if name in ("p", "q") or any(column)}
        data["top"] = [[_short([x for x in one if x is not None]) for one in node.top] for node in nodes]
        data["why"] = [view.inspection.why(node) for node in range(len(nodes))]
    return data


INSPECTED = ("p", "q", "ratio", "noise", "margin", "tests")


def _mentioned(step: dict[str, Any]) -> list[int]:
    """Return the token ids among an inspected step's alternatives."""
    return [token for top in step.get("top", ()) for token, *_ in top]


def _short(value: Any) -> Any:
    """Return numbers in three digits, whatever they stand in; None for what JSON has no word for."""
    if isinstance(value, float):
        return float(f"{value:.3g}") if isfinite(value) else None
    if isinstance(value, dict):
        return {name: _short(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return [_short(own) for own in value]
    return value
