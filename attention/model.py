"""A model that scores trees: how its passes run, and sessions of rows on it.

A session reads prompts, scores trees, and commits accepted paths.  Models are in evaluation mode while they do so.

Knows: what is committed, pending and unread of each row, what passes cost, which way of running passes is used now.
Does not know: how a pass runs, drafting, verification, sampling, text.
"""

import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specinfer.attention.forward import Forward
from specinfer.attention.layout import Columns, Layout, PerNode, lay_out_chains, lay_out_slots, lay_out_trees
from specinfer.attention.passes.base import Pass, Ways
from specinfer.attention.passes.graphs import Function, GraphedCaches, GraphedPass, Tensors
from specinfer.attention.passes.plain import PlainPass, TensorPass
from specinfer.attention.passes.stateful import StatefulPass
from specinfer.attention.torch_private import modules_of
from specinfer.common.tensors import concat, on_device
from specinfer.errors import InputError, TreeError
from specinfer.tree import Forest, TokenTree

PREFILL_CHUNK = 512  # the most prompt tokens of a row that one pass reads on a CPU ...
PREFILL_TOKENS = 4096  # ... and of all rows: this bounds memory, and on a CPU larger passes are slower

_training: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, list[torch.nn.Module]]] = weakref.WeakKeyDictionary()
_modes = Lock()


class TreeSession:
    """A batch of rows on one model: what is committed, what is pending, and what the passes cost.

    Args:
        model: that reads them.
        cache: of the pass, empty.
        aux_layers: the hidden states to return on commit.
        run: what runs passes.
        repeated: what runs those over a few tokens, if that is another one.

    Attributes:
        cache: a `TreeCache` or a `StateCache`; ``cache.lengths`` are the committed tokens per row.
        unread: per row, tokens that are committed, and that the pass of the next `score` reads before the tree.
        passes: forward passes so far, those that read prompts excluded.
        seconds: wall-clock seconds in forward passes, prefill excluded (on CUDA until they are launched).
        prefill_seconds: wall-clock seconds in prefill.  A pass that reads ends of prompts beside trees counts here with
            its share of these tokens.
        aux_states: hidden states of the pending slots, per pass (n, K, H) of each row for K aux_layers.  Empty without
            aux_layers.
    """

    def __init__(
        self, model: Forward, cache: Any, aux_layers: Sequence[int], run: Pass, repeated: Pass | None = None
    ) -> None:
        self.model, self.cache, self.aux_layers, self.run = model, cache, tuple(aux_layers), run
        self.repeated = repeated or run
        self.dtype, self.device = run.dtype or model.dtype, model.device
        self.unread: list[Sequence[int]] = [()] * len(cache.lengths)
        self.aux_states: list[PerNode] = []
        self.passes = 0
        self.seconds = 0.0
        self.prefill_seconds = 0.0

    @property
    def first_passes(self) -> int:
        """How many passes took longer so far than others of their shapes will."""
        return self.repeated.first

    def chains(self, chains: Sequence[Sequence[int]]) -> Layout:
        """Lay out chains as `append` takes them."""
        return lay_out_chains(chains, self.device, self.repeated.width(max(map(len, chains))))

    def append(self, layout: Layout, columns: Columns = None, words: int | None = None, **inputs: Tensor) -> PerNode:
        """Feed a layout's nodes as new pending slots: ONE forward pass over all rows.

        Args:
            layout: N nodes; its S counts the columns that are pending already.
            columns: of each row, the nodes whose logits are wanted; all of the layout's when None.
            words: how many token ids need logits, from 0 on; compiled passes on a CPU compute no others.
            **inputs: what else the model's forward takes, (N, ...).

        Returns:
            logits of these nodes, (n, V) of each row, or of fewer ids, in the dtype of the passes.
        """
        started = perf_counter()
        logits = self._feed(layout._replace(wanted=columns, words=words, extra=inputs), self.repeated)
        self.passes += 1
        self.seconds += perf_counter() - started
        return logits

    @property
    def replays(self) -> bool:
        """Whether `several` passes are replayed as one graph."""
        return isinstance(self.repeated, GraphedPass)

    def several(self, run: Function, tensors: Tensors, slots: int, kind: Hashable) -> tuple[Tensor, ...]:
        """Run what appends several layouts to this session, and forget their slots: see `GraphedPass.several`.

        Args:
            run: takes and returns tensors.  It does the same in every call of a kind.
            tensors: its inputs.
            slots: how many of each row it writes at most.
            kind: of run.
        """
        assert isinstance(self.repeated, GraphedPass)
        started, graphed = perf_counter(), self.repeated

        def unrolled(given: Tensors) -> tuple[Tensor, ...]:
            self.repeated = self.run
            try:
                return run(given)
            finally:
                self.repeated, self.aux_states = graphed, []

        passes, seconds = self.passes, self.seconds
        found = graphed.several(unrolled, tensors, self.cache, slots, kind)
        self.passes, self.seconds = passes, seconds + perf_counter() - started
        return found

    def prefill(
        self, prompts: Sequence[Sequence[int]], hold: bool = False, **inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Commit a ragged batch of token lists (possibly empty) in chunks; return what `commit` returns.

        Args:
            prompts: token ids per row.
            hold: leave the last chunk to the pass of the next `score`, which saves one; its states come on commit.
            **inputs: what else the model's forward takes, per row one entry per token.
        """
        started = perf_counter()
        kept: list[list[Tensor]] = [[] for _ in prompts]
        longest = PREFILL_TOKENS if self.device.type == "cuda" else PREFILL_CHUNK
        chunk = max(1, min(longest, PREFILL_TOKENS // len(prompts)))
        starts = range(0, max(len(prompt) for prompt in prompts), chunk)
        end = starts[-1] if hold and starts else None
        for start in starts if end is None else starts[:-1]:
            part = slice(start, start + chunk)
            chunks = [prompt[part] for prompt in prompts]
            more = {name: torch.cat([row[part] for row in rows]) for name, rows in inputs.items()}
            first = [range(len(chunk[:1])) for chunk in chunks]
            self._feed(lay_out_chains(chunks, self.device)._replace(wanted=first, extra=more), self.run)
            for row, states in zip(kept, self.commit([range(len(chunk)) for chunk in chunks]), strict=True):
                row += [] if states is None else [states]
        if end is not None:
            self.unread = [prompt[end:] for prompt in prompts]
        if self.device.type == "cuda":  # else the time of the first step would include it
            torch.cuda.synchronize(self.device)
        self.prefill_seconds += perf_counter() - started
        return [concat(states) for states in kept]

    def score(self, trees: Sequence[TokenTree]) -> PerNode:
        """Score every node of one tree per row in one pass: logits (n, V) of each row, in the order of its nodes.

        Trees that are still on the device stay there, if the pass is replayed; padding has logits as well, the last n.

        Raises:
            TreeError: a node holds a token that the model cannot read.
        """
        read = sum(map(len, self.unread))
        trees = Forest.of(trees)
        if not read and self.replays and trees.slots and trees.slots.tokens.device == self.device:
            return self.append(lay_out_slots(trees.slots, trees.roots))
        self._check_tokens(trees.nodes.tokens)
        if not read:
            width = self.repeated.width(max(map(len, trees)))
            return self.append(lay_out_trees(trees, self.device, width=width))
        started = perf_counter()
        logits = self._feed(lay_out_trees(trees, self.device, self.unread), self.run)
        spent, share = perf_counter() - started, read / (read + sum(map(len, trees)))
        self.seconds += spent * (1 - share)
        self.prefill_seconds += spent * share
        return logits

    def _check_tokens(self, tokens: np.ndarray) -> None:
        """Raise TreeError for a token that the model cannot read: it has no embedding, and a pass may crash on it."""
        end = self.model.embedded
        if tokens.min() < 0 or tokens.max() >= end:
            token = tokens[(tokens < 0) | (tokens >= end)][0]
            raise TreeError(f"token {token} was drafted, but the vocabulary is [0, {end}): propose its ids alone")

    def commit(self, paths: Sequence[Sequence[int] | None]) -> Sequence[Tensor | None]:
        """Keep these pending slots of each row, forget the others, retire rows given None (`TreeCache.keep`).

        Slots are those of the trees, or of the layouts; what was unread before them is kept in any case.

        Returns:
            Per row, the auxiliary hidden states (n, K, H) of the n slots kept; None for a retired row or without
            aux_layers.
        """
        if any(self.unread):
            paths = [
                None if path is None else (*range(len(read)), *(len(read) + node for node in path))
                for read, path in zip(self.unread, paths, strict=True)
            ]
        self.cache.keep(paths)
        self.unread = [()] * len(self.cache.lengths)
        aux_states, self.aux_states = self.aux_states, []
        if not aux_states:
            return [None] * len(paths)
        states = PerNode.joined(aux_states)
        if None not in paths and states.held == sum(len(path or ()) for path in paths):
            return states  # all are kept
        return [None if path is None else _chosen(row, path) for path, row in zip(paths, states, strict=True)]

    def join(self, other: "TreeSession") -> None:
        """Take in the rows of another session of the same model, after the own ones, between two steps."""
        self.cache.join(other.cache)
        self.unread = [*self.unread, *other.unread]
        self.prefill_seconds += other.prefill_seconds

    def fresh(self, rows: int, capacity: int) -> "TreeSession":
        """Return an empty session of the same model, which runs as this one."""
        cache = self.run.cache(self.model, rows, capacity, None, False)
        return TreeSession(self.model, cache, self.aux_layers, self.run)

    @torch.inference_mode()
    def _feed(self, nodes: Layout, run: Pass) -> PerNode:
        """Feed nodes through a pass; keep their hidden states, and return the logits of the wanted ones."""
        logits, *states = run(self.model, nodes, self.cache, self.aux_layers)
        self.aux_states += states
        return logits


class TreeModel(Forward):
    """A causal language model that scores trees: see `Forward`.

    Attributes:
        ways: how its passes run.
        graphed: the caches that graphs read; they outlive sessions.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.graphed = GraphedCaches()
        self.ways = Ways(StatefulPass() if self.stateful else PlainPass())

    def session(
        self,
        rows: int,
        capacity: int,
        max_capacity: int | None = None,
        aux_layers: Sequence[int] = (),
        graphs: bool = False,
    ) -> TreeSession:
        """Open a batch of ``rows`` empty sequences with a cache of ``capacity`` slots each.

        Args:
            rows, capacity, max_capacity: as `TreeCache`.
            aux_layers: the hidden states to return on commit: 0 = embeddings, i = after layer i, as in transformers.
            graphs: replay passes over a few tokens as CUDA graphs, which are kept for later sessions.

        Raises:
            InputError: graphs of a model that keeps states.
        """
        run = self.ways.best(aux_layers)
        if not graphs:
            return TreeSession(self, run.cache(self, rows, capacity, max_capacity, False), aux_layers, run)
        if not isinstance(run, TensorPass):
            raise InputError(f"graphs=True: {self.name} keeps states, which graphs do not write: leave it out")
        cache, repeated = self.graphed.take(self, run, rows, capacity, max_capacity)
        return TreeSession(self, cache, aux_layers, run, repeated)


@contextmanager
def evaluating(*models: TreeModel) -> Iterator[None]:
    """Put models in evaluation mode.  When the last thread leaves, every submodule is as it was before."""
    with _modes:
        for model in models:
            users, changed = _training.get(model.model, (0, []))
            training = [module for module in model.modules if module.training]
            for module in training:
                module.training = False
            _training[model.model] = users + 1, [*changed, *training]
    try:
        yield
    finally:
        with _modes:
            for model in models:
                users, changed = _training.pop(model.model)
                if users > 1:
                    _training[model.model] = users - 1, changed
                else:
                    for module in changed:
                        module.training = True


@contextmanager
def running(*models: TreeModel) -> Iterator[None]:
    """Prepare models for passes: evaluation mode, and compiled passes only if they still are the model's.

    Changed weights are packed again.
    """
    for model in models:
        model.modules = modules_of(model.model)
    with resumed(*models):
        for model in models:
            model.ways.refresh("autocast is on" if model.autocast else "")
        yield


@contextmanager
def resumed(*models: TreeModel) -> Iterator[None]:
    """`running` for models that ran before in this call, without looking for changes of them."""
    with torch.inference_mode(), evaluating(*models):
        yield


def _chosen(states: Tensor, path: Sequence[int]) -> Tensor:
    """Return a row's states (S, ...) at ascending indices, (n, ...): a copy, so that the others can be freed."""
    if path and path[-1] != len(path) - 1:
        return states[on_device(list(path), states.device)]
    return states[: len(path)].clone()
