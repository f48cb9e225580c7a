"""Does a model score token trees exactly?  A six-node tree finds out.

Knows: the logits of every node must equal those of a plain pass over its path, before and after pruning.  No token's
logits may depend on later tokens or other rows.
Does not know: model families; nothing is decided by name.
"""

from collections.abc import Sequence
from math import inf, nan
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from specinfer.attention.compiler.watch import Watch
from specinfer.attention.forward import autocast_dtype, checked_model, returned_cache
from specinfer.attention.layout import PerNode, lay_out_chains
from specinfer.attention.model import TreeModel, running
from specinfer.attention.offload import device_of, its_turn
from specinfer.attention.packed.modules import comparable
from specinfer.attention.passes.stateful import held, tensors
from specinfer.attention.verdicts import Support, Verdict, read_verdict, verdict_file, write_verdict
from specinfer.errors import UnsupportedModel
from specinfer.tree import Draw, TokenTree

# Largest error, relative to the spread of the logits, that rounding explains.  A wrong mask, position or window
# costs 1e-2 to 1 on random weights.  16 bits may hide a wrong window or ALiBi bias, so these are read from the config.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 2e-1, torch.float16: 5e-2}
STATES = {torch.float64: 1e-2, torch.float32: 1e-2}  # the same for states, 3e-2 in 16 bits; losing one costs .04 to 1
LEAKING = 0.1  # of that: what rounding explains if passes differ only in tokens that must not matter
TREE_PARENTS = (0, 0, 1, 2, 4)  # with the root: six nodes, the second branch deeper than the first
CHAIN_PARENTS = (0, 1, 2, 3, 4)
PREFIX = 12


class ModelCheck(NamedTuple):
    """The outcome of `check_model`."""

    model: str  # class name
    dtype: str
    attention: str
    support: Support
    reason: str
    error: float  # largest error of a node's logits over the spread of the logits; NaN if none was measured


# with the types computed in
_checked: WeakKeyDictionary[nn.Module, tuple[Watch, str, ModelCheck]] = WeakKeyDictionary()
_lock = RLock()


def check_model(model: nn.Module) -> ModelCheck:
    """Run a six-node tree through a model and compare each node with a plain pass over its path.

    Two ragged rows are scored, pruned to a path that is not contiguous in the cache, and scored again; the last time
    with one token only.  Plain passes first show that later tokens and other rows do not matter.  The result is kept
    while the model does not change: modules, settings, kinds of weights, hooks, patched forwards, attention.  For
    large models it is also kept in the cache folder, for others of their architecture (`verdicts`).

    Args:
        model: a ``transformers`` causal LM.

    Returns:
        ModelCheck: exact, chain only or unsupported, with the reason.  No model makes it raise, except out of memory.

    Raises:
        ModelError: not a model.
    """
    checked_model(model)
    with its_turn(model):
        if known := _known(model):
            return known
    with _lock, its_turn(model):  # one of several threads checks
        return _known(model) or _checked_now(model)


def _known(model: nn.Module) -> ModelCheck | None:
    """Return the kept result, None if the model has changed since."""
    watch, types, check = _checked.get(model, (None, "", None))
    return None if watch is None or types != _types(model) or watch.changed(model) else check


def _checked_now(model: Any) -> ModelCheck:
    dtype = _types(model)
    watch, file = Watch(model), None if " in " in dtype else verdict_file(model)
    known = read_verdict(file) if file else None
    support, reason, error = known or _classify(model)
    implementation = str(model.config.get_text_config(decoder=True)._attn_implementation or "eager")
    check = ModelCheck(type(model).__name__, dtype, implementation, support, reason, error)
    if support is not Support.UNSUPPORTED:  # else it may be due to these weights
        watch.settle()
        _checked[model] = watch, dtype, check
        if file and not known:
            write_verdict(file, (support, reason, error))
    return check


def _types(model: Any) -> str:
    """Return the type of a model's weights, and the one that autocast computes in, if it does."""
    types = [model.dtype, autocast_dtype(device_of(model), model.dtype)]
    return " in ".join(str(dtype).removeprefix("torch.") for dtype in types if dtype)


def _classify(model: nn.Module) -> Verdict:
    try:
        tree_model = TreeModel(model)
    except UnsupportedModel as error:
        return Support.UNSUPPORTED, str(error), nan
    with running(tree_model), comparable(model):  # as it will run, but for states of 8 bits: they hide mistakes
        return _judge(tree_model)


def _judge(model: TreeModel) -> Verdict:
    chain_reason = _why_chain_only(model)
    computed_in = model.autocast or model.dtype
    tolerance = TOLERANCE.get(computed_in, 1e-3)
    try:
        if not _compiles(model) and _remembers(model, tolerance):
            return Support.UNSUPPORTED, "it keeps its states in its modules, where nothing can be taken back", nan
        if (leak := 0.0 if _compiles(model) else _leak(model)) > LEAKING * tolerance:
            reason = f"in a plain pass later tokens or other rows change a token's logits, by {leak:.1e}"
            reason = reason + _if_encoder(model) if leak < inf else "its logits are not numbers"
            return Support.UNSUPPORTED, reason, leak
        tree_error = nan if chain_reason else _error(model, TREE_PARENTS, kept=(3, 4))
        if tree_error <= tolerance:
            return Support.EXACT, f"every node within {tree_error:.1e} of a plain pass over its path", tree_error
        if model.stateful and not (lost := _state_error(model)) <= STATES.get(computed_in, 3e-2):
            reason = "its kernels continue a state by one token only: two tokens at once leave states that are off by"
            return Support.UNSUPPORTED, f"{reason} {lost:.1e}", lost
        chain_error = _error(model, CHAIN_PARENTS, kept=(1, 2))
        if chain_error <= tolerance:
            reason = chain_reason or f"a branching tree is off by {tree_error:.1e}, a chain by {chain_error:.1e}"
            return Support.CHAIN_ONLY, reason, chain_error
        return Support.UNSUPPORTED, f"even a chain is off by {chain_error:.1e}", chain_error
    except torch.OutOfMemoryError:  # says nothing about the model
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        failure = f"a pass {'with a tree mask ' * (not model.stateful)}fails: {type(error).__name__}: {first}"
        return Support.UNSUPPORTED, "; and ".join(filter(None, (chain_reason, failure))), nan


def _if_encoder(model: TreeModel) -> str:
    """Return advice if a model reads later tokens because it is an encoder."""
    if getattr(model.model.config.get_text_config(decoder=True), "is_decoder", True):
        return ""
    return "; is_decoder=False in its configuration: it is an encoder and no causal LM, so choose a decoder-only model"


def _compiles(model: TreeModel) -> bool:
    """Whether torch compiles the attention.  On CPUs torch 2.13 fails if many shapes follow each other."""
    return model.spec.implementation == "flex_attention"


def _why_chain_only(model: TreeModel) -> str:
    config = model.model.config.get_text_config(decoder=True)
    if model.stateful:
        return model.stateful
    if any(getattr(part, "alibi", False) for part in (config, getattr(config, "attn_config", None))):
        return "ALiBi biases are read from cache columns, so siblings cannot share a position"
    return "" if model.takes_positions else "its forward takes no position_ids, so siblings cannot share a position"


def _remembers(model: TreeModel, tolerance: float) -> bool:
    """Whether a pass over one row depends on what another row read before it: modules keep states.

    All passes have the same shapes, so rotary frequencies, masks and bits are the same unless tokens matter.  Where
    bits differ without states, as between runs of some kernels, modules hold the same; counters change no logits.
    """
    ids, others = _random_ids(model, 2, PREFIX).to(model.device)
    logits, left = [], []
    for between in (ids, others):
        _, cache = _read(model, ids[:-1])
        _read(model, between[:-1])
        left.append(held(model.modules))
        logits.append(_read(model, ids[-1:], PREFIX - 1, cache)[0])
    changed = _difference(*logits)
    return 0 < changed < inf and (changed > LEAKING * tolerance or not all(map(torch.equal, *left)))


def _read(model: TreeModel, tokens: Tensor, first: int = 0, cache: object = None) -> tuple[Tensor, object]:
    """Read a row's tokens from a position on: logits (1, N, V), and the cache, an empty one if none is returned."""
    inputs = {"input_ids": tokens[None], model.cache_name: cache}
    if model.takes_positions:
        inputs["position_ids"] = torch.arange(first, first + len(tokens), device=tokens.device)[None]
    output = model.model(**inputs, use_cache=True)
    cache = returned_cache(output)  # without one, the next pass would begin its states anew
    return output.logits, DynamicCache(config=model.model.config) if cache is None else cache


def _leak(model: TreeModel) -> float:
    """Return how much logits depend on other rows and on later tokens.

    Quantised activations, statistics of a batch, full experts or hooks may cause it.  All passes are plain ones of one
    shape, so rounding hides little of it.
    """
    ids, others = _random_ids(model, 6, PREFIX).view(2, 3, PREFIX).to(model.device)
    wanted, worst = model.model(input_ids=ids, use_cache=False).logits, 0.0
    for kept in ((slice(1, None),), (slice(None), slice(PREFIX // 2))):  # all rows but the first; first halves
        given = others.clone()
        given[kept] = ids[kept]
        found = model.model(input_ids=given, use_cache=False).logits
        worst = max(worst, _difference(found[kept], wanted[kept]))
    return worst


def _error(model: TreeModel, parents: Sequence[int], kept: Sequence[int]) -> float:
    """Return the largest relative error of a node: in a tree, in another after pruning to ``kept``, in a lone root."""
    window = min((w for w in model.spec.windows.values() if w), default=0)
    length = min(max(PREFIX, window + 3 if window <= 64 else 0), (model.max_positions or 1024) - 12)
    ids = _random_ids(model, 2, length + 16).tolist()
    prefixes = [ids[0][:length], ids[1][: length - 3]]
    session = model.session(rows=2, capacity=length + 16)
    session.prefill(prefixes)
    worst, fresh = 0.0, length
    shapes = [(parents, (0, *kept)), (parents, (0,)), ((), (0,))]
    for shape, path in shapes[:2] if _compiles(model) else shapes:
        trees = [toy_tree(row[fresh : fresh + 1 + len(shape)], shape) for row in ids]
        worst = max(worst, _largest_error(model, session.score(trees), prefixes, trees))
        session.commit([path] * 2)
        session.cache.check_integrity()
        prefixes = [[*p, *(int(t.tokens[i]) for i in path)] for p, t in zip(prefixes, trees, strict=True)]
        fresh += 1 + len(shape)
    return worst


def _state_error(model: TreeModel) -> float:
    """Return how far two tokens read at once lead to other states than one by one, relative to the states' size.

    With small weights, logits hardly show that a kernel forgets the state it should continue.
    """
    ids, states = _random_ids(model, 1, PREFIX + 2)[0].tolist(), []
    for parts in ([ids[-2:]], [ids[-2:-1], ids[-1:]]):
        session = model.session(rows=1, capacity=len(ids))
        session.prefill([ids[:-2]])
        for part in parts:
            session.append(lay_out_chains([part], model.device))
        states.append([state.cpu().double() for state in tensors(session.cache.rows[0].cache)])
    pairs = zip(*states, strict=True)
    sizes = [float((found - wanted).norm() / wanted.norm().clamp(min=1e-12)) for found, wanted in pairs]
    return max((size if size == size else inf for size in sizes), default=inf)


def _random_ids(model: TreeModel, rows: int, length: int) -> Tensor:
    return torch.randint(model.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0), device="cpu")


def toy_tree(tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
    """Return a tree of the given shape.  Equal siblings are made different; scores keep the nodes in list order."""
    nodes: list[tuple[int, int]] = []  # parent, token
    for token, parent in zip(tokens[1:], parents, strict=True):
        nodes.append((parent, next(t for t in (token, 0, 1, 2) if (parent, t) not in nodes)))
    numbers = range(len(nodes))
    draws = [[Draw(0, i)] for i in numbers]
    return TokenTree.from_nodes(tokens[0], [token for _, token in nodes], parents, [-1.0 - i for i in numbers], draws)


def _largest_error(model: TreeModel, logits: PerNode, prefixes: Sequence[list[int]], trees: list[TokenTree]) -> float:
    worst = 0.0
    for row, (prefix, tree) in enumerate(zip(prefixes, trees, strict=True)):
        for leaf in set(range(len(tree))).difference(tree.parents.tolist()):
            nodes = tree.ancestors(leaf)
            ids = torch.tensor([[*prefix, *tree.tokens[nodes].tolist()]], device=model.device)
            plain = model.model(input_ids=ids, use_cache=False).logits[0, -len(nodes) :]
            worst = max(worst, _difference(logits.row(row)[nodes], plain))
    return worst


def _difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest error of logits (..., V), over the spread of the wanted ones."""
    found, wanted = found.cpu().double(), wanted.cpu().double()  # not all devices have float64
    spread = (wanted - wanted.mean(-1, keepdim=True)).abs().max().clamp(min=1e-12)
    error = float((found - wanted).abs().max() / spread)
    return error if error == error else inf
