"""Does a model score token trees exactly?  Asked of the model itself, with a six-node tree.

Knows: that the logits of every node must equal those of a plain pass over its path, before and after pruning.
Does not know: model families; nothing is decided by name.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specinfer.attention.model import TreeModel, running
from specinfer.errors import UnsupportedModel
from specinfer.tree import Draw, TokenTree

# Largest error, relative to the spread of the logits, that rounding explains.  A wrong mask, position or window
# costs 1e-2 to 1 on random weights; reading a window or ALiBi bias from the config covers what 16 bits would hide.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 2e-1, torch.float16: 5e-2}
TREE_PARENTS = (0, 0, 1, 2, 4)  # with the root: six nodes, the second branch deeper than the first
CHAIN_PARENTS = (0, 1, 2, 3, 4)
PREFIX = 12


class Support(StrEnum):
    """What a model can be used for."""

    EXACT = "exact"
    CHAIN_ONLY = "chain only"
    UNSUPPORTED = "unsupported"


class ModelCheck(NamedTuple):
    """The outcome of `check_model`."""

    model: str  # class name
    dtype: str
    attention: str
    support: Support
    reason: str
    error: float  # largest error of a node's logits over the spread of the logits; NaN if none was measured


_checked: dict[tuple[type, torch.dtype, str, str, str], ModelCheck] = {}


def check_model(model: Any) -> ModelCheck:
    """Run a six-node tree through a model and compare each node with a plain pass over its path.

    Two ragged rows are scored, pruned to a path that is not contiguous in the cache, and scored again.  The result is
    kept per model class, dtype, device, attention implementation and configuration, so asking again is free.

    Args:
        model: a ``transformers`` causal LM.

    Returns:
        ModelCheck: exact, chain only or unsupported, with the reason.  It never raises for a model's sake.
    """
    config = model.config.get_text_config(decoder=True)
    implementation = str(config._attn_implementation or "eager")
    key = (type(model), model.dtype, model.device.type, implementation, repr(model.config))
    if key not in _checked:
        support, reason, error = _classify(model)
        dtype = str(model.dtype).removeprefix("torch.")
        check = ModelCheck(type(model).__name__, dtype, implementation, support, reason, error)
        if support is Support.UNSUPPORTED:  # perhaps for these weights only
            return check
        _checked[key] = check
    return _checked[key]


def _classify(model: Any) -> tuple[Support, str, float]:
    try:
        tree_model = TreeModel(model)
    except UnsupportedModel as error:
        return Support.UNSUPPORTED, str(error), float("nan")
    with running(tree_model):  # what is checked is what will run
        return _judge(tree_model)


def _judge(model: TreeModel) -> tuple[Support, str, float]:
    nan, chain_reason = float("nan"), _why_chain_only(model)
    try:
        tree_error = nan if chain_reason else _error(model, TREE_PARENTS, kept=(3, 4))
        tolerance = TOLERANCE.get(model.dtype, 1e-3)
        if tree_error <= tolerance:
            return Support.EXACT, f"every node within {tree_error:.1e} of a plain pass over its path", tree_error
        chain_error = _error(model, CHAIN_PARENTS, kept=(1, 2))
        if chain_error <= tolerance:
            reason = chain_reason or f"a branching tree is off by {tree_error:.1e}, a chain by {chain_error:.1e}"
            return Support.CHAIN_ONLY, reason, chain_error
        return Support.UNSUPPORTED, f"even a chain is off by {chain_error:.1e}", chain_error
    except torch.OutOfMemoryError:  # says nothing about the model
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        failure = f"a pass with a tree mask fails: {type(error).__name__}: {first}"
        return Support.UNSUPPORTED, "; and ".join(filter(None, (chain_reason, failure))), nan


def _why_chain_only(model: TreeModel) -> str:
    config = model.model.config.get_text_config(decoder=True)
    attention = getattr(config, "attn_config", None)
    if getattr(config, "alibi", False) or getattr(attention, "alibi", False):
        return "ALiBi biases are read from cache columns, so siblings cannot share a position"
    return "" if model.takes_positions else "its forward takes no position_ids, so siblings cannot share a position"


def _error(model: TreeModel, parents: Sequence[int], kept: Sequence[int]) -> float:
    """Return the largest relative error over all nodes, of a first tree and of one after pruning to ``kept``."""
    window = min((w for w in model.spec.windows.values() if w), default=0)
    length = min(max(PREFIX, window + 3 if window <= 64 else 0), (model.max_positions or 1024) - 12)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (2, length + 16), generator=generator).tolist()
    prefixes = [ids[0][:length], ids[1][: length - 3]]
    trees = [_toy_tree(row[length : length + 6], parents) for row in ids]
    session = model.session(rows=2, capacity=length + 16)
    session.prefill(prefixes)
    worst = _largest_error(model, session.score(trees), prefixes, trees)
    session.commit([(0, *kept)] * 2)
    session.cache.check_integrity()
    prefixes = [[*p, *(int(t.tokens[i]) for i in (0, *kept))] for p, t in zip(prefixes, trees, strict=True)]
    trees = [_toy_tree(row[length + 6 : length + 12], parents) for row in ids]
    return max(worst, _largest_error(model, session.score(trees), prefixes, trees))


def _toy_tree(tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
    """Build a tree of the given shape; equal siblings are told apart, scores keep the nodes in list order."""
    children: dict[int, set[int]] = {}
    distinct: list[int] = []
    for token, parent in zip(tokens[1:], parents, strict=True):
        taken = children.setdefault(parent, set())
        distinct.append(next(t for t in (token, 0, 1, 2) if t not in taken))
        taken.add(distinct[-1])
    scores = [-float(i + 1) for i in range(len(parents))]
    return TokenTree.from_nodes(tokens[0], distinct, parents, scores, [[Draw(0, i)] for i in range(len(parents))])


@torch.inference_mode()
def _largest_error(
    model: TreeModel, logits: Tensor, prefixes: Sequence[list[int]], trees: Sequence[TokenTree]
) -> float:
    worst = 0.0
    for row, (prefix, tree) in enumerate(zip(prefixes, trees, strict=True)):
        for path in tree.paths():
            ids = [*prefix, int(tree.tokens[0]), *path]
            plain = model.model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
            nodes = _nodes_along(tree, path)
            wanted = plain[-len(nodes) :].double()
            spread = (wanted - wanted.mean(-1, keepdim=True)).abs().max().clamp(min=1e-12)
            error = float((logits[row, nodes].double() - wanted).abs().max() / spread)
            worst = max(worst, error if error == error else float("inf"))
    return worst


def _nodes_along(tree: TokenTree, path: Sequence[int]) -> list[int]:
    nodes = [0]
    for token in path:
        child = tree.child(nodes[-1], token)
        assert child is not None
        nodes.append(child)
    return nodes
