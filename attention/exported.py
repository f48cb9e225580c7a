"""A model's pass as a graph of its own: the unmodified model exported, its weights turned into inputs.

Knows: `torch.export`, the operations of an exported graph, which weights multiply which states.
Does not know: compilers, files, trees, what becomes of the graph (`attention.compiled`).

The graph is a function of the pass's tensors and of the model's: rows, nodes, slots of the cache, columns attended to
and columns whose logits are wanted may all vary.  Three things are changed in it, none in what it computes:

- weights are inputs, so a graph holds for every model of one architecture, and a weight is never stored with it;
- linear layers that read the same states (queries, keys and values; gate and up) become one product of packed weights;
- queries that share a key are one product with it, instead of copies of the key.
"""

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache

aten = torch.ops.aten
EXPECTED = re.compile(
    r"expression (Eq\(s\d+, s\d+\)|Ne\(s\d+, 1\)|s\d+ <= s\d+) "
)  # sizes alike, not one, slots enough
LARGEST = 1 << 16  # whole numbers that a graph may hold itself: constants of the code, not weights


class Source(NamedTuple):
    """Where an input of the graph comes from that belongs to the model."""

    kind: (
        str  # "weight": as it is; "packed": joined and packed; "joined": biases, joined; "sizes": only its shape counts
    )
    names: tuple[str, ...]  # of the model's parameters or buffers
    shape: tuple[int, ...]


class Exported(NamedTuple):
    """A pass as a graph; its inputs are the pass's tensors, then those that come from the model."""

    graph: fx.GraphModule
    sources: tuple[Source, ...]


class Example(NamedTuple):
    """The tensors of one pass, in the order of the graph's inputs."""

    ids: Tensor  # (B, T)
    positions: list[Tensor]  # one (B, T), or none where the forward takes none
    masks: list[Tensor]  # (B, 1, T, L), one for each kind of layer
    slots: Tensor  # (B, T) of the cache, to be written
    columns: Tensor  # (C,) nodes whose logits are wanted
    keys: list[Tensor]  # (B, heads, slots, dim), one a layer
    values: list[Tensor]
    extra: list[Tensor]  # what else the forward takes, (B, T, ...)


class Pass(nn.Module):
    """A model's pass as a function of tensors.

    Args:
        model: a causal LM.
        kinds: names of its kinds of layers, in the order of the masks; one mask stands alone.
        aux_layers: the hidden states to hand out.
        keeps: whether its forward takes ``logits_to_keep``.
        extra: names of what else the forward is given.
    """

    def __init__(
        self, model: Any, kinds: Sequence[str], aux_layers: Sequence[int], keeps: bool, extra: Sequence[str]
    ) -> None:
        super().__init__()
        self.model, self.kinds, self.aux_layers, self.keeps, self.extra = model, kinds, aux_layers, keeps, extra

    def forward(
        self,
        ids: Tensor,
        positions: list[Tensor],
        masks: list[Tensor],
        slots: Tensor,
        columns: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        extra: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """Return logits (B, C, V), and hidden states (B, T, K, H) if layers are named; arguments as in `Example`."""
        own = Example(ids, positions, masks, slots, columns, keys, values, extra)
        one = len(self.kinds) == 1
        mask = own.masks[0] if one else dict(zip(self.kinds, own.masks, strict=True))
        inputs: dict[str, Any] = dict(zip(self.extra, own.extra, strict=True))
        inputs |= {"position_ids": own.positions[0]} if own.positions else {}
        inputs |= {"logits_to_keep": own.columns} if self.keeps else {}
        inputs |= {"output_hidden_states": True} if self.aux_layers else {}
        cache = _Written(own)
        output = self.model(
            input_ids=own.ids, attention_mask=mask, past_key_values=cache, use_cache=True, return_dict=True, **inputs
        )
        logits = output.logits if self.keeps else output.logits[:, own.columns]
        if not self.aux_layers:
            return (logits,)
        return logits, torch.stack([output.hidden_states[layer] for layer in self.aux_layers], 2)


class _Written(Cache):
    """Buffers of a `TreeCache` as transformers' models see them while they are exported."""

    def __init__(self, example: Example) -> None:
        super().__init__(layers=[])
        self.example = example
        self.kv_length = example.masks[0].shape[-1]
        self.rows = torch.arange(example.ids.shape[0], device=example.ids.device)[:, None]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Write (B, heads, T, dim) states at the slots; return the columns attended to."""
        found = []
        for buffers, states in ((self.example.keys, key_states), (self.example.values, value_states)):
            buffer = buffers[layer_idx]
            buffer[self.rows, :, self.example.slots] = states.transpose(1, 2)
            found.append(buffer.narrow(2, 0, self.kv_length))
        return tuple(found)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return nothing: positions are given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return (columns attended to, 0)."""
        return self.kv_length, 0


def exported(model: Pass, example: Example, packable: Callable[[Tensor], bool]) -> Exported:
    """Export a pass.

    Args:
        model: in evaluation mode.
        example: tensors of a pass over at least two rows and nodes, no two sizes alike.
        packable: which weights of linear layers are to be packed.

    Raises:
        Exception: whatever keeps a model from being exported: branches on data, shapes that only some sizes have.
    """
    rows, nodes, slots, kv_length, kept = (Dim(name, min=1) for name in ("rows", "nodes", "slots", "kv_length", "kept"))
    places, buffers = {0: rows, 1: nodes}, [{0: rows, 2: slots} for _ in example.keys]
    shapes = (
        places,
        [places for _ in example.positions],
        [{0: rows, 2: nodes, 3: kv_length} for _ in example.masks],
        places,
        {0: kept},
        buffers,
        buffers,
        [places for _ in example.extra],
    )
    with torch.no_grad(), _one_is_a_size_like_others():
        program = export(
            model,
            tuple(example),
            dynamic_shapes=shapes,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    made = program.module(check_guards=False)
    _drop_checks(made.graph)
    _group_queries(made.graph)
    sources = _Inputs(made, model.model).run(packable)
    made.graph.lint()
    made.graph._codegen = fx.graph.CodeGen()
    return Exported(fx.GraphModule(_constants(made), made.graph), sources)


def tensors(example: Example) -> list[Tensor]:
    """Return a pass's tensors as the graph takes them, each contiguous."""
    return [tensor.contiguous() for tensor in tree_leaves(tuple(example))]


def _one_is_a_size_like_others() -> Any:
    """Let a graph for many nodes hold for one, too: `export` would make an exception of it."""
    from torch.fx.experimental import _config

    settings: Any = _config
    return settings.patch(backed_size_oblivious=True)


def _drop_checks(graph: fx.Graph) -> None:
    """Erase what export left to be checked at run time: what all passes are, or compared with one node and one row.

    Raises:
        ValueError: something else, so that the graph would hold for some sizes only.
    """
    for node in reversed(graph.nodes):
        if node.target is aten._assert_scalar.default and not EXPECTED.search(str(node.args[1])):
            raise ValueError(f"the graph would hold for some sizes only: {node.args[1]}")
        if node.target in (aten._assert_scalar.default, aten._assert_tensor_metadata.default):
            graph.erase_node(node)
    graph.eliminate_dead_code()


# ---- queries that share a key ----


def _group_queries(graph: fx.Graph) -> None:
    """Let attention read keys and values as they are where the model repeats them for every query head."""
    widened: dict[tuple[fx.Node, int], fx.Node] = {}  # masks, repeated once for all layers
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        query, key, value, mask = (*node.args, None)[:4]
        own_key, own_value = _unrepeated(key), _unrepeated(value)
        if own_key is None or own_value is None or mask is None or mask.meta["val"].shape[1] != 1:
            continue
        _, heads, _, dim = query.meta["val"].shape
        shared = own_key.meta["val"].shape[1]
        times = heads // shared
        with graph.inserting_before(node):
            rows, nodes = (graph.call_function(aten.sym_size.int, (query, axis)) for axis in (0, 2))
            columns = graph.call_function(aten.sym_size.int, (own_key, 2))
            together = graph.call_function(operator.mul, (nodes, times))
            grouped = graph.call_function(aten.reshape.default, (query, [rows, shared, together, dim]))
            if (mask, times) not in widened:
                wide = graph.call_function(aten.unsqueeze.default, (mask, 2))
                wide = graph.call_function(aten.expand.default, (wide, [rows, 1, times, nodes, columns]))
                widened[mask, times] = graph.call_function(aten.reshape.default, (wide, [rows, 1, together, columns]))
            arguments = (grouped, own_key, own_value, widened[mask, times])
            mixed = graph.call_function(node.target, arguments, node.kwargs)
            shape = [rows, heads, nodes, own_value.meta["val"].shape[3]]
            result = graph.call_function(aten.reshape.default, (mixed, shape))
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _unrepeated(node: fx.Node) -> fx.Node | None:
    """Return the (B, heads, L, D) states that a node repeats for several queries each (transformers' `repeat_kv`)."""
    if node.target is not aten.reshape.default:
        return None
    expanded = _same_shape(node.args[0])
    if expanded.target is not aten.expand.default:
        return None
    inserted = _same_shape(expanded.args[0])
    return (
        _same_shape(inserted.args[0]) if inserted.target is aten.unsqueeze.default and inserted.args[1] == 2 else None
    )


def _same_shape(node: Any) -> fx.Node:
    """Follow slices that take everything."""
    while node.target is aten.slice.Tensor and node.meta["val"].shape == node.args[0].meta["val"].shape:
        node = node.args[0]
    return node


# ---- weights as inputs ----


class _Inputs:
    """Turns what a graph holds of its model into inputs, in the order of `Source`s.

    Args:
        made: the graph, with the model's tensors as attributes.
        model: what was exported: the names in `Source` are its own.
    """

    def __init__(self, made: fx.GraphModule, model: nn.Module) -> None:
        self.made, self.graph = made, made.graph
        every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self.places = {(t.data_ptr(), t.shape, t.dtype): name for name, t in reversed(every)}
        self.last = self.graph.find_nodes(op="placeholder")[-1]
        self.fake = self.last.meta["val"].fake_mode if isinstance(self.last.meta.get("val"), Tensor) else None
        self.sources: dict[Source, fx.Node] = {}

    def run(self, packable: Callable[[Tensor], bool]) -> tuple[Source, ...]:
        """Make the inputs; return where each comes from."""
        layers: dict[tuple[fx.Node, bool], list[fx.Node]] = {}
        for node in self.graph.find_nodes(op="call_function", target=aten.linear.default):
            if node.args[1].op == "get_attr" and packable(self.tensor(node.args[1])):
                layers.setdefault((node.args[0], len(node.args) > 2 and node.args[2] is not None), []).append(node)
        for (states, biased), group in layers.items():
            self.join(states, biased, group)
        for node in self.graph.find_nodes(op="get_attr"):
            held = self.tensor(node)
            name = self.places.get((held.data_ptr(), held.shape, held.dtype))
            if name is not None:
                node.replace_all_uses_with(self.input(Source("weight", (name,), tuple(held.shape)), held.dtype))
                self.graph.erase_node(node)
            elif held.numel() > (1 if held.is_floating_point() else LARGEST):
                raise ValueError(f"the graph would hold {tuple(held.shape)} numbers that are no parameter or buffer")
        return tuple(self.sources)

    def join(self, states: fx.Node, biased: bool, group: Sequence[fx.Node]) -> None:
        """Make one product of layers that read the same states."""
        weights = [self.tensor(node.args[1]) for node in group]
        sizes = [len(weight) for weight in weights]
        shape, dtype = (sum(sizes), weights[0].shape[1]), weights[0].dtype
        names = tuple(self.name(node.args[1]) for node in group)
        biases = tuple(self.name(node.args[2]) for node in group) if biased else ()
        like = self.input(Source("sizes", (), shape), dtype)
        packed = self.input(Source("packed", names, shape), dtype)
        bias = self.input(Source("joined", biases, shape[:1]), dtype) if biased else None
        with self.graph.inserting_before(group[0]):
            product = self.graph.call_function(torch.ops.specinfer.linear.default, (states, like, packed, bias))
            parts = [product]
            if len(group) > 1:
                split = self.graph.call_function(aten.split_with_sizes.default, (product, sizes, -1))
                parts = [self.graph.call_function(operator.getitem, (split, place)) for place in range(len(group))]
        for node, part in zip(group, parts, strict=True):
            node.replace_all_uses_with(part)
            self.graph.erase_node(node)
        self.graph.eliminate_dead_code()

    def input(self, source: Source, dtype: torch.dtype) -> fx.Node:
        """Return the input for a source, one for each."""
        if source not in self.sources:
            with self.graph.inserting_after(self.last):
                self.last = self.graph.placeholder(f"own_{len(self.sources)}")
            assert self.fake is not None
            with self.fake:
                self.last.meta["val"] = torch.empty(source.shape, dtype=dtype, device=self.device)
            self.sources[source] = self.last
        return self.sources[source]

    @property
    def device(self) -> torch.device:
        """Where the pass runs."""
        return self.graph.find_nodes(op="placeholder")[0].meta["val"].device

    def tensor(self, node: Any) -> Tensor:
        """Return what a graph's attribute holds."""
        return operator.attrgetter(node.target)(self.made)

    def name(self, node: Any) -> str:
        """Return what the model calls an attribute of the graph."""
        held = self.tensor(node)
        return self.places[held.data_ptr(), held.shape, held.dtype]


def _constants(made: fx.GraphModule) -> dict[str, Any]:
    """Return what the graph still holds by itself."""
    return {str(node.target): operator.attrgetter(node.target)(made) for node in made.graph.find_nodes(op="get_attr")}
