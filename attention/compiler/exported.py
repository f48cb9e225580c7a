"""A model's pass as a graph: the unmodified model exported, its weights turned into inputs.

Knows: `torch.export`, the operations of an exported graph, which weights multiply which states.
Does not know: compilers, files, trees, how the graph is used (`attention.compiled`).

The graph is a function of the tensors of the pass and of the model.  Rows, nodes, slots of the cache, columns attended
to, columns and token ids whose logits are wanted may vary.  Four things are changed in it, but not what it computes:

- Weights are inputs, so a graph is good for every model of one architecture, and no weight is stored with it.
- Linear layers that read the same states (queries, keys and values; gate and up) become one product of packed weights.
- The output layer multiplies the rows of the token ids that are wanted, the first ones, and no others.
- Attention reads keys as they are, without a copy for each query: by our own kernel, or with the queries that share
  a key as one (`attention.attend`).

Where our kernel does all attention, a pass takes the nodes of all rows as one row (`packing`).
"""

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export
from transformers.cache_utils import Cache

from specinfer.attention.compiler.attend import inputs_of, keys_of_rows, replace_attention
from specinfer.attention.compiler.linear import ROUNDED_STATES, packed_shape
from specinfer.attention.compiler.watch import named_tensors
from specinfer.attention.forward import Forward
from specinfer.attention.torch_private import run_time_check, sizes_may_be_one

aten = torch.ops.aten
# run-time checks of export: equal sizes (to broadcast: or one), more than one row or node, enough slots
EXPECTED = re.compile(r"expression ((Eq\(s\d+, 1\) \| )?Eq\(s\d+, s\d+\)|Ne\(s\d+, 1\)|s\d+ <= s\d+) ")
# products of the first outputs of weights; an argument counts them
COUNTED = torch.ops.specinfer.linear_blocks.default, torch.ops.specinfer.packed_linear.default
OUTPUTS = 2  # its number
LARGEST = 1 << 16  # the most integers of one tensor that a graph may hold: constants of the code, not weights
TORCHS = {  # products of torch
    *(aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default),
    *(aten.baddbmm.default, aten.einsum.default, aten.scaled_dot_product_attention.default),
}
KNOWN = "aten", "specinfer"  # libraries with no other products; those of experts are operators of transformers


class Source(NamedTuple):
    """An input of the graph that comes from the model."""

    # "weight": as it is; a form of `linear`: joined and packed; "joined": biases; "sizes": its shape alone counts
    kind: str
    names: tuple[str, ...]  # of the model's parameters or buffers
    shape: tuple[int, ...]
    dtype: str  # in the graph


class Tensors(NamedTuple):
    """The tensors of one pass, in the order of the graph's inputs; in a packed one B = 1, and the cache has R rows."""

    ids: Tensor  # (B, T)
    rows: list[Tensor]  # one (B, T) in a packed pass, the rows of the cache; else none, and R = B
    positions: list[Tensor]  # one (B, T), or none where the forward takes none
    masks: list[Tensor]  # (B, 1, T, L), one for each kind of layer
    slots: Tensor  # (B, T) of the cache, to write to
    columns: Tensor  # (C,) nodes whose logits are wanted
    words: Tensor  # (W,) whose size alone counts: logits are wanted of the token ids below it
    keys: list[Tensor]  # (R, heads, slots, dim), one a layer
    values: list[Tensor]
    extra: list[Tensor]  # unusual inputs of the forward, (B, T, ...)


class Pass(nn.Module):
    """A model's pass as a function of tensors.

    Args:
        model: a causal LM.
        aux_layers: the hidden states to return.
        extra: names of the unusual inputs of its forward.
        vocabulary: how many logits a node has.
    """

    def __init__(self, model: Forward, aux_layers: Sequence[int], extra: Sequence[str], vocabulary: int) -> None:
        super().__init__()
        self.model, self.keeps, self.cache_name = model.model, model.takes_logits_to_keep, model.cache_name
        self.kinds = sorted(model.spec.windows)  # of layers, in the order of the masks
        self.aux_layers, self.extra, self.vocabulary = aux_layers, extra, vocabulary

    def forward(self, tensors: Tensors) -> tuple[Tensor, ...]:
        """Return logits (B, C, W), and hidden states (B, T, K, H) if layers are named."""
        masks = dict(zip(self.kinds, tensors.masks, strict=True))
        inputs: dict[str, object] = dict(zip(self.extra, tensors.extra, strict=True))
        inputs |= {"position_ids": tensors.positions[0]} if tensors.positions else {}
        inputs |= {"logits_to_keep": tensors.columns} if self.keeps else {}
        inputs |= {"output_hidden_states": True} if self.aux_layers else {}
        inputs |= {"input_ids": tensors.ids, "attention_mask": masks if len(masks) > 1 else tensors.masks[0]}
        inputs |= {self.cache_name: _ExportedCache(tensors)}
        output = self.model(**inputs, use_cache=True, return_dict=True)
        logits = output.logits if self.keeps else output.logits[:, tensors.columns]
        logits = logits.narrow(-1, 0, tensors.words.shape[0])
        if not self.aux_layers:
            return (logits,)
        return logits, torch.stack([output.hidden_states[layer] for layer in self.aux_layers], 2)


class _ExportedCache(Cache):
    """Buffers of a `TreeCache`, as models see them during export."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(layers=[])
        self.tensors = tensors
        self.kv_length = tensors.masks[0].shape[-1]
        every = torch.arange(tensors.ids.shape[0], device=tensors.ids.device)[:, None]
        self.rows = tensors.rows[0] if tensors.rows else every

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write (B, heads, T, dim) states at the slots; return the columns attended to."""
        buffers = self.tensors.keys[layer_idx], self.tensors.values[layer_idx]
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            buffer[self.rows, :, self.tensors.slots] = states.transpose(1, 2)
        found = (buffer.narrow(2, 0, self.kv_length) for buffer in buffers)
        keys, values = (keys_of_rows(buffer, self.rows) for buffer in found) if self.tensors.rows else found
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return (columns attended to, 0)."""
        return self.kv_length, 0


def export_pass(
    model: Pass, example: Tensors, form_of: Callable[[Tensor], str], stored: Mapping[str, torch.dtype]
) -> tuple[fx.GraphModule, tuple[Source, ...]]:
    """Export a pass as a graph.  Its inputs are the tensors of the pass, then one for each source.

    Args:
        model: in evaluation mode.
        example: tensors of a pass over at least two rows (of the cache) and nodes, all sizes different.
        form_of: the form that a weight of linear layers is to be packed in, "" for none.
        stored: dtypes of embeddings by name; only the rows that are read are converted.

    Raises:
        Exception: the model cannot be exported: it branches on data, or the graph would hold for some sizes only; or
            the pass is packed, and our kernel does not do all of its attention.
    """
    rows, nodes, slots, kv_length, kept = (Dim(name, min=1) for name in ("rows", "nodes", "slots", "kv_length", "kept"))
    words = Dim("words", min=1, max=model.vocabulary)
    each = {} if example.rows else {0: rows}
    per_node, buffers = {**each, 1: nodes}, [{0: rows, 2: slots}] * len(example.keys)
    per_mask = {**each, 2: nodes, 3: kv_length}
    given, positions, extra = ([per_node] * len(part) for part in (example.rows, example.positions, example.extra))
    masks = [per_mask] * len(example.masks)
    shapes: Any = (per_node, given, positions, masks, per_node, {0: kept}, {0: words}, buffers, buffers, extra)
    exporting = partial(export, strict=False, prefer_deferred_runtime_asserts_over_guards=True)
    with torch.no_grad(), sizes_may_be_one():
        program = exporting(model, (example,), dynamic_shapes=(Tensors(*shapes),))
    module = program.module(check_guards=False)
    _drop_checks(module.graph)
    replace_attention(module.graph)
    sources = _WeightInputs(module, model.model, stored).run(form_of)
    module.graph.lint()
    module.graph.set_codegen(fx.graph.CodeGen())
    return fx.GraphModule(module, module.graph), sources


def other_products(graphs: Iterable[fx.GraphModule]) -> list[str]:
    """Return the products of graphs that are not our kernels': a node's bits may depend on what else they multiply."""
    found = {node.target for each in graphs for node in each.graph.nodes if node.op == "call_function"}
    return sorted(str(each) for each in found if each in TORCHS or getattr(each, "namespace", "aten") not in KNOWN)


def _drop_checks(graph: fx.Graph) -> None:
    """Erase run-time checks that all passes satisfy, or that compare with one node and one row, or are of strides.

    Raises:
        ValueError: there is another check, so the graph would hold for some sizes only.
    """
    for node in reversed(graph.nodes):
        message = run_time_check(node)
        if message and not EXPECTED.search(message) and not _is_of_strides(node):
            raise ValueError(f"the graph would hold for some sizes only: {message}")
        if message is not None:
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _is_of_strides(check: fx.Node) -> bool:
    """Whether a check says that keys or values have more slots than a pass attends to.

    Models are given the first slots only, so they know the number of all from strides: whether heads lie side by side,
    and can be seen as one without a copy.  What is right if they do not is right if they do.
    """
    differ = inputs_of(check)[0]
    sizes = inputs_of(inputs_of(differ)[0]) if differ.target is torch.sym_not else []
    compared = {str(inputs_of(size)[0]).rstrip("0123456789") for size in sizes if size.target is aten.sym_size.int}
    return compared in ({"tensors_keys_", "tensors_masks_"}, {"tensors_values_", "tensors_masks_"})


# ---- weights as inputs ----


def _replace(node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _is_pointwise(operation: object) -> bool:
    return operation == aten.to.dtype or torch.Tag.pointwise in getattr(operation, "tags", ())


def _is_embedding(node: fx.Node) -> bool:
    """Whether an attribute of the graph is only looked up by token ids."""
    return all(user.target is aten.embedding.default for user in node.users)


def _before_rounding(states: fx.Node) -> fx.Node | None:
    """Return the states that were rounded to bfloat16, and are in their own type again; None for others."""
    rounded = inputs_of(states)[0] if states.target is aten.to.dtype else None
    if rounded is not None and rounded.target is aten.to.dtype and rounded.args[1] == torch.bfloat16:
        return inputs_of(rounded)[0]
    return None


class _WeightInputs:
    """Turns the model's tensors that a graph holds into inputs, in the order of `Source`s.

    Args:
        module: the graph, with the model's tensors as attributes.
        model: the exported model, whose names `Source` has.
        stored: dtypes of embeddings by name.
    """

    def __init__(self, module: fx.GraphModule, model: nn.Module, stored: Mapping[str, torch.dtype]) -> None:
        self.module, self.graph, self.stored = module, module.graph, stored
        self.names = {(t.data_ptr(), t.shape, t.dtype): name for name, t in reversed(named_tensors(model))}
        self.last = self.graph.find_nodes(op="placeholder")[-1]
        self.example = self.last.meta["val"]
        self.sources: dict[Source, fx.Node] = {}

    def run(self, form_of: Callable[[Tensor], str]) -> tuple[Source, ...]:
        """Make the inputs; return their sources."""
        layers: dict[tuple[fx.Node, bool, str], list[fx.Node]] = {}
        for node in self.graph.find_nodes(op="call_function", target=aten.linear.default):
            states, weight, *bias = inputs_of(node)
            if weight.op == "get_attr" and (form := form_of(self.tensor(weight))):
                whole = _before_rounding(states) if form == "bf16" else None
                states, form = (states, form) if whole is None else (whole, ROUNDED_STATES)
                layers.setdefault((states, bool(bias), form), []).append(node)
        for (states, biased, form), group in layers.items():
            self.join(states, biased, form, group)
        self.join_packed()
        self.cut_logits()
        for node in self.graph.find_nodes(op="get_attr"):
            tensor, name = self.tensor(node), self.names.get(self.key(node))
            if name is not None and tensor.dtype != self.stored[name] and _is_embedding(node):
                self.embed(node, name, tensor)
            elif name is not None:
                _replace(node, self.input("weight", (name,), tuple(tensor.shape), tensor.dtype))
            elif tensor.numel() > (1 if tensor.is_floating_point() else LARGEST):
                raise ValueError(f"the graph would hold {tuple(tensor.shape)} numbers of no parameter or buffer")
        return tuple(self.sources)

    def join(self, states: fx.Node, biased: bool, form: str, group: Sequence[fx.Node]) -> None:
        """Make one product of layers that read the same states, with weights of one form."""
        weights = [self.tensor(inputs_of(node)[1]) for node in group]
        outputs, dtype = [len(weight) for weight in weights], weights[0].dtype
        shape = sum(outputs), weights[0].shape[1]
        names, call = self.names_of(group, 1), self.graph.call_function
        bias = self.input("joined", self.names_of(group, 2), shape[:1], dtype) if biased else None
        with self.graph.inserting_before(group[0]):
            if form == "packed":
                like = self.input("sizes", (), shape, dtype)
                packed = self.input(form, names, shape, dtype)
                product = call(torch.ops.specinfer.linear.default, (states, like, packed, bias))
            else:
                if form == ROUNDED_STATES:
                    states = call(aten.to.dtype, (states, torch.bfloat16))
                kind = "bf16" if form == ROUNDED_STATES else form
                of_words = torch.bfloat16 if kind in ("bf16", "rounded") else torch.int32
                packed = self.input(kind, names, packed_shape(*shape, form), of_words)
                product = call(torch.ops.specinfer.linear_blocks.default, (states, packed, shape[0], form))
                product = product if bias is None else call(aten.add.Tensor, (product, bias))
        self.share(product, outputs, group)
        self.graph.eliminate_dead_code()

    def join_packed(self) -> None:
        """Make one product of packed layers that read the same states."""
        linear, groups = torch.ops.specinfer.packed_linear.default, dict[fx.Node, list[Any]]()
        for node in self.graph.find_nodes(op="call_function", target=linear):
            groups.setdefault(inputs_of(node)[0], []).append(node)
        for states, group in groups.items():
            if len(group) > 1:
                matrices, outputs = ([part for node in group for part in node.args[index]] for index in (1, 2))
                with self.graph.inserting_before(group[0]):
                    product = self.graph.call_function(linear, (states, matrices, outputs))
                self.share(product, outputs, group)

    def share(self, product: fx.Node, outputs: Sequence[int], group: Sequence[fx.Node]) -> None:
        """Put parts of a product in the places of layers; sizes are their outputs."""
        parts = [product]
        if len(group) > 1:
            with self.graph.inserting_before(group[0]):
                split = self.graph.call_function(aten.split_with_sizes.default, (product, outputs, -1))
                parts = [self.graph.call_function(operator.getitem, (split, index)) for index in range(len(group))]
        for node, part in zip(group, parts, strict=True):
            _replace(node, part)

    def cut_logits(self) -> None:
        """Make only the logits that are returned, where our kernels make them and later operations treat each alone."""
        returned = self.graph.output_node().all_input_nodes[0]  # the logits, cut
        product = inputs_of(returned)[0]
        while _is_pointwise(product.target) and len(product.all_input_nodes) == 1:
            product = product.all_input_nodes[0]
        if product.target not in COUNTED:
            return
        with self.graph.inserting_before(product):
            size = self.graph.node_copy(inputs_of(returned)[1])
        product.update_arg(OUTPUTS, [size] if isinstance(product.args[OUTPUTS], list) else size)
        _replace(returned, inputs_of(returned)[0])

    def embed(self, node: fx.Node, name: str, tensor: Tensor) -> None:
        """Read rows of embeddings as they are stored."""
        for lookup in [*node.users]:
            with self.graph.inserting_after(lookup):
                rows = self.graph.call_function(aten.to.dtype, (lookup, tensor.dtype))
            lookup.replace_all_uses_with(rows)
            rows.args = (lookup, tensor.dtype)
        _replace(node, self.input("weight", (name,), tuple(tensor.shape), self.stored[name]))

    def input(self, kind: str, names: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        """Return the input for a source, one for each."""
        source = Source(kind, names, shape, str(dtype).removeprefix("torch."))
        if source not in self.sources:
            with self.graph.inserting_after(self.last):
                self.last = self.graph.placeholder(f"weight_{len(self.sources)}")
            self.last.meta["val"] = self.example.new_empty(source.shape, dtype=dtype)
            self.sources[source] = self.last
        return self.sources[source]

    def names_of(self, layers: Sequence[fx.Node], index: int) -> tuple[str, ...]:
        """Return the names of one argument of layers."""
        return tuple(self.names[self.key(inputs_of(node)[index])] for node in layers)

    def tensor(self, node: fx.Node) -> Tensor:
        """Return the tensor of a graph's attribute."""
        return operator.attrgetter(str(node.target))(self.module)

    def key(self, node: fx.Node) -> tuple[int, torch.Size, torch.dtype]:
        """Return the key of an attribute in `names`."""
        tensor = self.tensor(node)
        return tensor.data_ptr(), tensor.shape, tensor.dtype
