"""An unmodified Hugging Face causal language model that scores token trees: prefill, score, commit.

Knows: the model's forward signature, masks, positions, its cache.
Does not know: drafting, verification, sampling, text.

`TreeModel` is the model.  A `TreeSession` is one batch of rows that it decodes, with a `TreeCache`; models that keep
states decode chains, with a `StateCache`.
"""

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from specinfer.attention.cache import TreeCache
from specinfer.attention.context import Context
from specinfer.attention.layout import Layout, lay_out_behind, lay_out_chains, lay_out_trees
from specinfer.attention.mask import AttentionSpec, attention_mask
from specinfer.attention.offload import device_of, is_dispatched, its_turn, spans_devices
from specinfer.attention.packing import Packing
from specinfer.attention.passes.graphs import Graphs
from specinfer.attention.passes.stateful import StateCache
from specinfer.attention.per_node import PerNode, Span
from specinfer.attention.precision import autocast_dtype
from specinfer.attention.torch_private import modules_of
from specinfer.common.ranks import Ranks
from specinfer.common.tensors import concat, on_device, padded_width
from specinfer.errors import InputError, ModelError, UnsupportedModel
from specinfer.tree import TokenTree

Inputs = dict[str, Any]  # of the model's forward
Outputs = tuple[Tensor, ...]
Columns = Sequence[range] | None  # of each row, nodes of a layout; None: all

CACHES = ("past_key_values", "cache_params", "state")  # names of caches in forwards
LISTED = 6  # numbers of layers in a message
PREFILL_CHUNK = 512  # the most prompt tokens of a row that one pass reads ...
PREFILL_TOKENS = 4096  # ... and of all rows: this bounds memory, and on a CPU larger passes are slower


class FastPass(Protocol):
    """What may run a model's passes in its place, as `compiled.CompiledPass` does."""

    aux_layers: list[int]
    dtype: torch.dtype  # of masks, cache and results
    packs: bool  # whether it takes the nodes of all rows as one row: see `packing`

    def refresh(self) -> str:
        """Return why it cannot stand for the model as it is now, or nothing."""

    def serving(self, network: Any) -> "FastPass":
        """Return the same passes for another network of the same architecture."""

    def __call__(self, inputs: Inputs, cache: TreeCache, aux_layers: Sequence[int]) -> Outputs:
        """Run a pass: logits (B, C, V), and hidden states (B, T, K, H) if there are aux_layers."""


def checked_model(model: Any) -> Any:
    """Return a model; raise `ModelError` for anything else."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise ModelError(f"{model!r:.60} is not a model: give a transformers causal LM, or use from_pretrained")
    return model


class TreeModel:
    """A causal language model behind a tree mask.

    Args:
        model: a ``transformers`` causal LM, already on its device, or loaded with a ``device_map``: see `offload`.  It
            is never modified.

    Raises:
        ModelError: not a model.
        UnsupportedModel: flash attention, an encoder-decoder, no cache, weights on several devices without hooks, or
            FSDP.

    Attributes:
        stateful: why it keeps states that chains only can use (`attention.recurrent`), in words; else "".
        ranks: the processes that hold parts of it.
    """

    def __init__(self, model: Any) -> None:
        self.model = checked_model(model)
        self.name = type(model).__name__
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.context = Context.of(config)
        self.max_positions = self.context.positions
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = next((name for name in CACHES if name in parameters), "")  # an argument, and of the output
        if getattr(model.config, "is_encoder_decoder", False) or not self.cache_name:
            raise UnsupportedModel(
                f"{self.name} offers no cache of its tokens: it is an encoder-decoder, or a wrapper that hides the "
                "cache.  So nothing can be taken back: use a decoder-only model, without a wrapper (peft's has "
                "get_base_model(), which keeps LoRA, torch.compile's has _orig_mod)"
            )
        self.dispatched = is_dispatched(model)  # its hooks move inputs and weights
        devices = ", ".join(sorted({str(parameter.device) for parameter in model.parameters()}))
        if ", " in devices and not self.dispatched:
            raise UnsupportedModel(
                f"{self.name} is spread over {devices}, and no hooks move what its layers read: load it on one device, "
                "or with transformers' device_map"
            )
        self.ranks = Ranks.of(model)
        self.spec = AttentionSpec.of(model)
        self.stateful = _why_stateful(self.spec, self.cache_name)
        self.modules = modules_of(model)  # as of the last call of `running`
        self.layers: int = config.num_hidden_layers
        # with keys of one shape, as far as is known
        shared = getattr(config, "num_kv_shared_layers", 0)
        self.uniform_layers = 1 if spans_devices(model) else self.layers // self.ranks.stages - shared
        self.takes_positions = "position_ids" in parameters
        self.takes_logits_to_keep = "logits_to_keep" in parameters
        self.form = "packed"  # of its weights in compiled passes: see `linear`
        self.compiled: FastPass | None = None
        self.plain = ""  # why passes run plain although they are compiled, as of the last call of `running`

    @property
    def device(self) -> torch.device:
        """Where token ids must be."""
        return device_of(self.model)

    @property
    def embedded(self) -> int:
        """How many token ids it can read; a head with a small vocabulary reads more than it proposes."""
        return max(self.vocab_size, len(getattr(self.model.get_input_embeddings(), "weight", ())))

    @property
    def dtype(self) -> torch.dtype:
        """The model's floating type."""
        return self.model.dtype

    @property
    def autocast(self) -> torch.dtype | None:
        """The floating type that passes compute in now, if autocast gives them another one."""
        return autocast_dtype(self.device, self.dtype)

    @property
    def runs_modules(self) -> bool:
        """Whether passes run the model's modules, as of the last call of `running`; compiled ones do not."""
        return self.compiled is None or bool(self.plain)

    def position_limit(self) -> int | None:
        """Return how many positions are exact under trees, None if unbounded: see `context`."""
        return self.max_positions if self.context.exact is None else self.context.exact

    def session(
        self,
        rows: int,
        capacity: int,
        max_capacity: int | None = None,
        aux_layers: Sequence[int] = (),
        graphs: bool = False,
    ) -> "TreeSession":
        """Open a batch of ``rows`` empty sequences with a cache of ``capacity`` slots each.

        Args:
            rows, capacity, max_capacity: as `TreeCache`.
            aux_layers: the hidden states to return on commit: 0 = embeddings, i = after layer i, as in transformers.
            graphs: replay passes over a few tokens as CUDA graphs.

        Raises:
            InputError: graphs of a model that keeps states.
        """
        if self.stateful and graphs:
            raise InputError(f"graphs=True: {self.name} keeps states, which graphs do not write: leave it out")
        if self.stateful:
            return TreeSession(self, StateCache(rows, max(capacity, max_capacity or 0)), aux_layers)
        cache = TreeCache(rows, capacity, max_capacity, self.uniform_layers, fixed=graphs)
        usable = self.compiled and not self.plain and set(aux_layers) <= set(self.compiled.aux_layers)
        return TreeSession(self, cache, aux_layers, self.compiled if usable else None)


def _why_stateful(spec: AttentionSpec, cache_name: str) -> str:
    """Return why a model can work on chains only, "" if tree masks reach all its layers."""
    if not spec.others and cache_name == CACHES[0]:
        return ""
    layers, kinds = [str(layer) for layer, _ in spec.others], ", ".join(dict.fromkeys(kind for _, kind in spec.others))
    numbers = ", ".join(layers if len(layers) <= LISTED else [*layers[:LISTED], "..."])
    where = f"layer{'s' * (len(layers) > 1)} {numbers} ({kinds})" if layers else "its layers"
    return f"a token cannot have siblings in {where}: recurrent states, and masks of a model's own, take no tree mask"


_training: weakref.WeakKeyDictionary[Any, tuple[int, list[Any]]] = weakref.WeakKeyDictionary()
_modes = Lock()


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
            reason = "" if model.compiled is None else "autocast is on" if model.autocast else model.compiled.refresh()
            model.plain = reason
        yield


@contextmanager
def resumed(*models: TreeModel) -> Iterator[None]:
    """`running` for models that ran before in this call, without looking for changes of them."""
    with torch.inference_mode(), evaluating(*models):
        yield


class TreeSession:
    """A batch of rows on one model: what is committed, what is pending, and what the passes cost.

    Attributes:
        cache: a `TreeCache` or a `StateCache`; ``cache.lengths`` are the committed tokens per row.
        passes: forward passes so far, those that read prompts excluded.
        seconds: wall-clock seconds in forward passes, prefill excluded (on CUDA until they are launched).
        prefill_seconds: wall-clock seconds in prefill.  A pass that reads ends of prompts beside trees counts here with
            its share of such tokens.
        aux_states: hidden states of the pending slots, per pass (n, K, H) of each row for K aux_layers.  Empty without
            aux_layers.
        held: per row, the end of its prompt, which the pass of the next `score` reads.
        read: per row, the pending slots of these tokens, until the commit.
    """

    def __init__(
        self,
        model: TreeModel,
        cache: TreeCache | StateCache,
        aux_layers: Sequence[int] = (),
        compiled: FastPass | None = None,
    ) -> None:
        self.model, self.dtype = model, compiled.dtype if compiled else model.dtype
        self.cache: Any = cache
        self.aux_layers = tuple(aux_layers)
        self.compiled = compiled
        self.aux_states: list[PerNode] = []
        self.held: list[Sequence[int]] = []
        self.read: list[range] = []
        session = weakref.proxy(self)  # a cycle would keep the cache until garbage is collected
        self.graphs = (
            Graphs(lambda inputs: session._run_at_slots(inputs))
            if isinstance(cache, TreeCache) and cache.fixed
            else None
        )
        self.passes = 0
        self.seconds = 0.0
        self.prefill_seconds = 0.0

    @property
    def packs(self) -> bool:
        """Whether its passes take the nodes of all rows as one row, so that padding costs nothing."""
        return self.compiled is not None and self.compiled.packs

    def append(self, layout: Layout, columns: Columns = None, **inputs: Tensor) -> PerNode:
        """Feed a layout's nodes as new pending slots: ONE forward pass over all rows.

        Args:
            layout: T nodes a row; its S counts the columns already pending plus T.
            columns: of each row, the nodes whose logits are wanted; all of the layout's when None.
            **inputs: what else the model's forward takes, one entry per node.

        Returns:
            logits of these nodes, (n, V) of each row, in the dtype of the passes.
        """
        started = perf_counter()
        logits = self._forward(layout, columns, inputs, self._replay)
        self.passes += 1
        self.seconds += perf_counter() - started
        return logits

    def append_last(self, layout: Layout, columns: Columns = None, **inputs: Tensor) -> PerNode:
        """`append` for the only pass of a step, which may be padded."""
        more = self._padding(layout)
        padded = {name: pad(value, (*[0, 0] * (value.ndim - 2), 0, more)) for name, value in inputs.items()}
        return self.append(layout.padded(more), columns, **padded)

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
        chunk = max(1, min(PREFILL_CHUNK, PREFILL_TOKENS // len(prompts)))
        starts = range(0, max(len(prompt) for prompt in prompts), chunk)
        end = starts[-1] if hold and starts else None
        for start in starts if end is None else starts[:-1]:
            part = slice(start, start + chunk)
            chunks = [prompt[part] for prompt in prompts]
            layout = lay_out_chains(chunks, self.model.device)
            more = {name: pad_sequence([row[part] for row in rows], True) for name, rows in inputs.items()}
            self._forward(layout, [range(1)] * len(chunks), more, self._run)
            for row, states in zip(kept, self.commit([range(len(chunk)) for chunk in chunks]), strict=True):
                row += [] if states is None else [states]
        if end is not None:
            self.held = [prompt[end:] for prompt in prompts]
        if self.model.device.type == "cuda":  # else the time of the first step would include it
            torch.cuda.synchronize(self.model.device)
        self.prefill_seconds += perf_counter() - started
        return [concat(states) for states in kept]

    def score(self, trees: Sequence[TokenTree]) -> PerNode:
        """Score every node of one tree per row in one pass: logits (n, V) of each row, in the order of its nodes."""
        if self.held:
            return self._score_behind(trees)
        layout = lay_out_trees(trees, self.model.device)
        return self.append(layout.padded(self._padding(layout)))

    def _score_behind(self, trees: Sequence[TokenTree]) -> PerNode:
        """`score` in a pass that reads the ends of prompts, too."""
        started = perf_counter()
        layout, self.read = lay_out_behind(self.held, trees, self.model.device, aligned=not self.packs)
        columns = [range(read.stop, read.stop + len(tree)) for read, tree in zip(self.read, trees, strict=True)]
        if not self.packs:
            self.cache.allow(layout.width)
        logits = self._forward(layout, columns, {}, self._run)
        spent, read, scored = perf_counter() - started, sum(map(len, self.held)), sum(map(len, trees))
        self.seconds += spent * scored / (read + scored)
        self.prefill_seconds += spent * read / (read + scored)
        return logits

    def commit(self, paths: Sequence[Sequence[int] | None]) -> list[Tensor | None]:
        """Keep these pending slots of each row, forget the others, retire rows given None (`TreeCache.keep`).

        Returns:
            Per row, the auxiliary hidden states (n, K, H) of the n slots kept; None for a retired row or without
            aux_layers.
        """
        if self.read:
            paths = [
                None if path is None else (*read, *(read.stop + node for node in path))
                for read, path in zip(self.read, paths, strict=True)
            ]
            self.held, self.read = [], []
        self.cache.keep(paths)
        aux_states, self.aux_states = self.aux_states, []
        if not aux_states:
            return [None] * len(paths)
        states = PerNode.joined(aux_states)
        is_whole = states.count == sum(len(path or ()) for path in paths)  # then there is nothing else to free
        rows = zip(paths, states, strict=True)
        return [None if path is None else _chosen(row, path, is_whole) for path, row in rows]

    def join(self, other: "TreeSession") -> None:
        """Take in the rows of another session of the same model, after the own ones, between two steps."""
        self.held = [*([()] * len(self.cache.lengths)), *other.held] if other.held else []
        self.cache.join(other.cache)
        self.prefill_seconds += other.prefill_seconds

    def begin_with(self, other: "TreeSession", length: int) -> None:
        """Begin every row with the first tokens of another session's first row; nothing was read here yet."""
        self.cache.begin_with(other.cache, length)

    def _padding(self, layout: Layout) -> int:
        """Return how many nodes of padding the only pass of a step gets."""
        return padded_width(layout.width) - layout.width if self.graphs else 0

    @torch.inference_mode()
    def _forward(
        self, layout: Layout, columns: Columns, extra: dict[str, Tensor], run: Callable[[Inputs], Outputs]
    ) -> PerNode:
        """Feed a layout; return the logits of the wanted nodes.

        Args:
            layout, columns, extra: as `append`.
            run: runs the model.
        """
        model, cache = self.model, self.cache
        packing = Packing(layout) if self.packs and not model.stateful else None
        wanted = packing.nodes(columns) if packing else _union(columns)
        if model.stateful:
            nodes = None if wanted is None else on_device(wanted, layout.tokens.device)
            logits, *aux_states = cache.feed(layout, nodes, self._read_row)
            self.aux_states += [PerNode.padded_rows(each, layout.sizes) for each in aux_states]
            return _of_columns(logits, columns, wanted, layout.sizes)
        cache.stage(layout.width, layout.tokens.device, packing.sizes if packing else ())
        inputs: Inputs = {
            "input_ids": layout.tokens,
            "attention_mask": attention_mask(model.spec, layout, cache.lengths, self.dtype, cache.kv_length),
            **extra,
        }
        if model.takes_positions:
            inputs["position_ids"] = self._positions(layout)
        if packing:
            inputs = packing.inputs(inputs, cache.staged(model.device))
        nodes = None if wanted is None else on_device(wanted, model.device)
        if nodes is not None and model.takes_logits_to_keep:
            inputs["logits_to_keep"] = nodes
        with model.ranks.together(*layout, cache.lengths):
            logits, *aux_states = run(inputs)
        logits = logits if nodes is None or model.takes_logits_to_keep else logits[:, nodes]
        self.aux_states += [
            packing.by_row(each) if packing else PerNode.padded_rows(each, layout.sizes) for each in aux_states
        ]
        if packing:
            return packing.by_row(logits, columns)
        return _of_columns(logits, columns, wanted, layout.sizes)

    def _run(self, inputs: Inputs) -> Outputs:
        """Run the model: logits, and the auxiliary hidden states (B, T, K, H) if there are aux_layers."""
        if self.compiled is not None:
            return self.compiled(inputs, self.cache, self.aux_layers)
        output, *aux_states = self._call({**inputs, "past_key_values": self.cache})
        return output.logits, *aux_states

    def _read_row(
        self, tokens: Sequence[int], first: int, cache: Any, columns: Tensor
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Run one row's tokens from a position on: a `recurrent.Read`."""
        model, device = self.model, columns.device
        inputs: Inputs = {"input_ids": on_device([[*tokens]], device), model.cache_name: cache}
        if model.takes_positions:
            positions = torch.arange(first, first + len(tokens), device=device)[None]
            inputs["position_ids"] = positions.clamp(max=(model.max_positions or sys.maxsize) - 1)
        if model.takes_logits_to_keep:
            inputs["logits_to_keep"] = columns
        output, *states = self._call(inputs)
        if getattr(output, model.cache_name, None) is None:
            raise UnsupportedModel(f"{model.name} returns no cache of what it read, so nothing can be taken back")
        logits = output.logits if model.takes_logits_to_keep else output.logits[:, columns]
        return logits, states[0] if states else None, output[model.cache_name]

    def _call(self, inputs: Inputs) -> tuple[Any, ...]:
        """Call the model: its output, and the auxiliary hidden states (B, T, K, H) if there are aux_layers."""
        options = {"output_hidden_states": True} if self.aux_layers else {}
        with its_turn(self.model.model):
            output = self.model.model(**inputs, **options, use_cache=True, return_dict=True)
        if not self.aux_layers:
            return (output,)
        if getattr(output, "hidden_states", None) is None:
            advice = "which EAGLE-style heads and contrastive search read: use other drafts, and no penalty_alpha"
            raise UnsupportedModel(f"{self.model.name} hands out no hidden states, {advice}")
        return output, torch.stack([output.hidden_states[layer] for layer in self.aux_layers], 2)

    def _replay(self, inputs: Inputs) -> Outputs:
        """`_run`, from a graph if there is one for inputs of these shapes."""
        if self.graphs is None or not isinstance(inputs["attention_mask"], Tensor):  # a mask for each kind of layer
            return self._run(inputs)
        assert self.cache.slots is not None
        return self.graphs({**inputs, "slots": self.cache.slots}, self.cache.capacity)

    def _run_at_slots(self, inputs: Inputs) -> Outputs:
        """`_run`, which writes to the slots among the inputs."""
        self.cache.slots = inputs["slots"]
        return self._run({name: value for name, value in inputs.items() if name != "slots"})

    def _positions(self, layout: Layout) -> Tensor:
        """Return (B, T) positions, committed length + depth, clamped to the context (the rest is cut later)."""
        lengths: Any = self.cache.lengths
        first = lengths[0] if len(set(lengths)) == 1 else on_device(lengths, layout.tokens.device)[:, None]
        columns = layout.depths.shape[1]
        positions = (layout.depths if columns == layout.width else layout.depths[:, -layout.width :]) + first
        limit = self.model.max_positions
        if limit is None or max(lengths) + columns <= limit:  # no node is deeper than there are columns
            return positions
        return positions.clamp(max=limit - 1)


def _union(columns: Columns) -> list[int] | None:
    """Return the columns that any row wants, ascending; None: all."""
    return None if columns is None else sorted({column for row in columns for column in row})


def _of_columns(logits: Tensor, columns: Columns, wanted: Sequence[int] | None, sizes: Sequence[int]) -> PerNode:
    """Return the logits of each row's columns, from those of all wanted columns of all rows, (B, C, V)."""
    if columns is None or wanted is None:
        return PerNode.padded_rows(logits, sizes)
    first = [wanted.index(row.start) if row else 0 for row in columns]
    spans = zip(first, columns, strict=True)
    return PerNode(logits, [Span(line, range(start, start + len(row))) for line, (start, row) in enumerate(spans)])


def _chosen(states: Tensor, path: Sequence[int], is_whole: bool) -> Tensor:
    """Return a row's states (S, ...) at ascending indices, (n, ...): a copy, so that the others can be freed."""
    if path and path[-1] != len(path) - 1:
        return states[on_device(list(path), states.device)]
    return states if is_whole else states[: len(path)].clone()
