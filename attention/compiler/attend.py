"""Attention in compiled passes: one kernel for all trees on a CPU, grouped queries elsewhere.

Knows: attention in an exported graph, what our kernel (``kernels/attend.h``) computes.
Does not know: models, weights, masks' meaning, how a compiled pass calls the kernel.

Models copy a key for every query that reads it (transformers' `repeat_kv`).  Neither form does:

    our kernel      float32 on a CPU.  A query's result has the same bits in every pass: alone, in a tree, beside
                    other rows.  So it does not matter to a text which trees were scored on its way
    grouped         everywhere else: torch's attention, with the queries that share a key as one
"""

import operator
from math import sqrt

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten

_library = torch.library.Library("specinfer", "FRAGMENT")
# queries (B, H, T, D), keys (B, heads, L, D), values (B, heads, L, V), a mask (B, 1, T, L) to add: (B, H, T, V)
# or of a packed pass (1, H, T, D), (R, heads, L, D) with the rows (1, T) of the nodes, and (1, 1, T, L)
_library.define("attend(Tensor queries, Tensor keys, Tensor values, Tensor mask, Tensor? rows, float scale) -> Tensor")
# keys or values (R, heads, L, D) of the rows (1, T) of nodes: (1, heads, L, D) in place of those of each.  In no graph
# that is compiled
_library.define("keys_of_rows(Tensor keys, Tensor rows) -> Tensor")


@torch.library.register_fake("specinfer::attend", lib=_library)
def _shape(
    queries: Tensor, _keys: Tensor, values: Tensor, _mask: Tensor, _of_nodes: Tensor | None, _scale: float
) -> Tensor:
    rows, heads, nodes, _ = queries.shape
    return queries.new_empty(rows, nodes, heads, values.shape[3]).transpose(1, 2)


@torch.library.register_fake("specinfer::keys_of_rows", lib=_library)
def _shape_of_rows(keys: Tensor, _rows: Tensor) -> Tensor:
    return keys.new_empty(1, *keys.shape[1:])


keys_of_rows = torch.ops.specinfer.keys_of_rows


def replace_attention(graph: fx.Graph) -> None:
    """Replace torch's attention in a graph by a form that reads keys and values as they are.

    Raises:
        ValueError: the pass is packed, and not all of its attention can be replaced.
    """
    grouped: dict[tuple[fx.Node, int], fx.Node] = {}  # masks, made once for all layers
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        query, key, value, *masks = inputs_of(node)
        if not masks or masks[0].meta["val"].shape[1] != 1:
            continue
        unrepeated = [found for states in (key, value) if (found := _unrepeated(states))]
        is_shared = len(unrepeated) == 2
        key, value = unrepeated if is_shared else (key, value)
        with graph.inserting_before(node):
            if _suits_our_kernel(node, key):
                scale = node.kwargs.get("scale")
                scale = 1 / sqrt(query.meta["val"].shape[3]) if scale is None else scale
                key, value, rows = _of_all_rows(key, value)
                given = query, key, value, masks[0], rows, scale
                result = graph.call_function(torch.ops.specinfer.attend.default, given)
            elif is_shared:
                result = _grouped(node, key, value, grouped)
            else:
                continue
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    if graph.find_nodes(op="call_function", target=keys_of_rows.default):
        raise ValueError("attention of a packed pass that is not our kernel's")


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of a node that are nodes, in order."""
    return [argument for argument in node.args if isinstance(argument, fx.Node)]


def _of_all_rows(key: fx.Node, value: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """Return the keys and values of all rows of a packed pass, and the rows of its nodes; else None in their place."""
    if {key.target, value.target} != {keys_of_rows.default}:
        return key, value, None
    (keys, rows), (values, _) = map(inputs_of, (key, value))
    return keys, values, rows


def _suits_our_kernel(node: fx.Node, key: fx.Node) -> bool:
    """Whether a node is attention in float32 on a CPU, with a mask for all nodes and slots, and nothing else."""
    query, _, _, mask = (each.meta["val"] for each in inputs_of(node))
    options = {name for name, value in node.kwargs.items() if value}
    if any(node.args[4:]) or not options <= {"scale", "enable_gqa"}:
        return False
    sizes = zip(mask.shape[2:], (query.shape[2], key.meta["val"].shape[2]), strict=True)
    whole = all(statically_known_true(found == wanted) for found, wanted in sizes)
    return whole and query.device.type == "cpu" and query.dtype == mask.dtype == torch.float32


def _grouped(node: fx.Node, key: fx.Node, value: fx.Node, masks: dict[tuple[fx.Node, int], fx.Node]) -> fx.Node:
    """Return attention whose queries of one key are queries of one head."""
    query, _, _, mask = inputs_of(node)
    call = node.graph.call_function
    _, heads, _, dim = query.meta["val"].shape
    key_heads = key.meta["val"].shape[1]
    group = heads // key_heads
    rows, nodes = (call(aten.sym_size.int, (query, axis)) for axis in (0, 2))
    columns = call(aten.sym_size.int, (key, 2))
    queries = call(operator.mul, (nodes, group))
    joined = call(aten.reshape.default, (query, [rows, key_heads, queries, dim]))
    if (mask, group) not in masks:
        wide = call(aten.unsqueeze.default, (mask, 2))
        wide = call(aten.expand.default, (wide, [rows, 1, group, nodes, columns]))
        masks[mask, group] = call(aten.reshape.default, (wide, [rows, 1, queries, columns]))
    mixed = call(aten.scaled_dot_product_attention.default, (joined, key, value, masks[mask, group]), node.kwargs)
    return call(aten.reshape.default, (mixed, [rows, heads, nodes, value.meta["val"].shape[3]]))


def _unrepeated(node: fx.Node) -> fx.Node | None:
    """Return the (B, heads, L, D) states that a node repeats for several queries each (transformers' `repeat_kv`)."""
    for target in (aten.reshape.default, aten.expand.default, aten.unsqueeze.default):
        if node.target is not target:
            return None
        axis, node = node.args[1], _same_shape(inputs_of(node)[0])
    return node if axis == 2 else None


def _same_shape(node: fx.Node) -> fx.Node:
    """Return the node before slices that take everything."""
    while node.target is aten.slice.Tensor and node.meta["val"].shape == inputs_of(node)[0].meta["val"].shape:
        node = inputs_of(node)[0]
    return node
