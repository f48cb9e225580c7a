"""Making compiled passes: a model is exported and compiled into a folder, and compared with the plain model.

Knows: the compiler (AOTInductor), what rounding explains.
Does not know: what the graph contains (`exported`), where packages are kept (`packages`), text.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from math import inf
from pathlib import Path
from textwrap import shorten

import torch
from torch import Tensor

from specinfer.attention.check import toy_tree
from specinfer.attention.compiler import exported
from specinfer.attention.compiler.kernels import teach_compiler
from specinfer.attention.compiler.linear import IN_FLOAT32, ROUNDED_STATES, form_of
from specinfer.attention.compiler.watch import altered, named_tensors
from specinfer.attention.layout import Columns, Layout, lay_out_chains, lay_out_trees
from specinfer.attention.model import TreeModel, TreeSession
from specinfer.attention.packed.modules import comparable, is_packed
from specinfer.attention.passes.base import Pass
from specinfer.attention.passes.compiled import RECORD, SPARE, CompiledPass
from specinfer.attention.torch_private import compile_package
from specinfer.common.memory import free_bytes
from specinfer.errors import NotCompiled

# Largest error of a pass's logits, root mean square over that of the logits, that rounding explains.  A wrong mask,
# position or weight costs 1e-2 (random weights) to 1.  Bfloat16 itself moves the logits of SmolLM2 by 0.05 to 0.36 from
# those in float32, so in 16 bits only gross mistakes are seen.
ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 4e-1, torch.float16: 1e-1}
ROUNDED = 0.3  # the same where weights or states are rounded
PACKED = 5e-3  # where weights are packed: states are rounded to 16 bits, so the last bits of others make a difference
MOST = 0.75  # of a pass's nodes must be within that in 16 bits; the others may be outliers
NEARLY_ALL = 0.99  # the same where weights are packed: one token in hundreds may magnify rounding a hundredfold
BRANCHES = (0, 1, 0, 3, 4)  # parents of a tree: two chains below the root, one two deep, one three

Graph = tuple[torch.fx.GraphModule, tuple[exported.Source, ...]]
Extra = dict[str, tuple[int, ...]]  # unusual inputs of a forward: name -> shape after (B, T)


@torch.inference_mode(False)  # so that writes to the copy's weights are counted
def computing(model: TreeModel, form: str) -> TreeModel:
    """Return the model whose passes are compiled: itself, or a copy in float32 if passes of its form are.

    Linear layers of the copy round their states where the form does.

    Raises:
        NotCompiled: the copy does not fit into memory.
    """
    if form not in IN_FLOAT32 or model.dtype == torch.float32:
        return model
    needed = SPARE * sum(4 * tensor.numel() for tensor in model.model.parameters())
    if needed > free_bytes():
        raise NotCompiled(f"compiling {model.name} takes {needed / 1e9:.1f} GB of memory, and less is free")
    copied = TreeModel(deepcopy(model.model).float())
    for module in copied.model.modules():
        if form == ROUNDED_STATES and type(module) is torch.nn.Linear:
            module.__class__ = _RoundingLinear
    return copied


class _RoundingLinear(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(torch.bfloat16).to(input.dtype))


def make(model: TreeModel, form: str, aux_layers: Sequence[int], folder: Path, stored: torch.nn.Module) -> None:
    """Export and compile a model's passes into an existing folder.

    Args:
        model: in evaluation mode; only read.
        form: of its weights: see `linear`.
        aux_layers: hidden states that passes return.
        folder: gets one file for each set of inputs that the forward takes, and a record of the files.
        stored: the network that it computes, perhaps in another dtype; passes read its embeddings as they are.

    Raises:
        NotCompiled: the model cannot be exported, or the compiler fails; it says why.
    """
    if reason := altered(model.model):
        raise NotCompiled(reason)
    if model.spec.implementation == "flex_attention":
        raise NotCompiled("flex attention's masks are not tensors")
    try:
        teach_compiler()
        layers, vocabulary = _sizes(model)
        dtypes = {name: tensor.dtype for name, tensor in named_tensors(stored)}

        def export(packed: bool) -> list[Graph]:
            found = []
            for extra in variants_of(model.model):
                one = exported.Pass(model, aux_layers, sorted(extra), vocabulary).eval()
                example = _example(model, layers, extra, packed)
                found.append(exported.export_pass(one, example, partial(form_of, form=form), dtypes))
            return found

        graphs: list[Graph] = []
        if model.device.type == "cpu" and model.dtype == torch.float32 and model.spec.implementation == "sdpa":
            with suppress(Exception):  # of any kind: a model may look at the rows of its cache
                graphs = export(packed=True)
        packs, variants = bool(graphs), []
        graphs = graphs or export(packed=False)
        others = exported.other_products(graph for graph, _ in graphs) if form == ROUNDED_STATES else []
        if others:  # rounding magnifies what these make of another number of nodes
            raise ValueError(f"a node's bits may depend on what else {', '.join(others)} multiplies")
        for number, (extra, (graph, sources)) in enumerate(zip(variants_of(model.model), graphs, strict=True)):
            path = folder / f"pass-{number}.pt2"
            compile_package(graph, path)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            variants.append({"extra": sorted(extra), "file": path.name, "sha256": digest, "sources": sources})
    except Exception as error:  # of any kind: torch cannot trace or compile some models
        reason = shorten(f"{type(error).__name__}: {error}", 200)
        raise NotCompiled(f"{model.name} cannot be compiled: {reason}") from error
    dtype = str(model.dtype).removeprefix("torch.")
    record = {"aux_layers": list(aux_layers), "dtype": dtype, "layers": layers, "vocabulary": vocabulary}
    record |= {"packs": packs, "variants": variants}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def variants_of(model: object) -> tuple[Extra, ...]:
    """Return the sets of unusual inputs that a model's forward takes."""
    return getattr(model, "pass_inputs", ({},))


def _sizes(model: TreeModel) -> tuple[list[list[int]], int]:
    """Return heads and dimension of each cached layer's keys and values, and the logits of a node, by a plain pass."""
    session = model.session(rows=1, capacity=4)
    extra = variants_of(model.model)[0].items()
    inputs = {name: torch.zeros(1, *shape, device=model.device, dtype=model.dtype) for name, shape in extra}
    logits = session.append(lay_out_chains([[0]], model.device), None, None, **inputs).flat()
    layers = (layer.buffers for layer in session.cache.layers)
    shapes = [[keys.shape[1], keys.shape[3], values.shape[1], values.shape[3]] for keys, values in layers]
    return shapes, logits.shape[-1]


def _example(model: TreeModel, layers: Sequence[Sequence[int]], extra: Extra, packed: bool) -> exported.Tensors:
    """Return tensors of a pass, all sizes different: two rows, six nodes, 40 of 96 slots, five logits of three."""
    cached, nodes, kv_length, capacity = 2, 6, 40, 96
    rows = 1 if packed else cached

    def zeros(*shape: int, rows: int = rows) -> Tensor:
        return torch.zeros(rows, *shape, dtype=model.dtype, device=model.device)

    slots = torch.arange(kv_length - nodes, kv_length, device=model.device).repeat(rows, 1)
    return exported.Tensors(
        torch.zeros_like(slots),
        [torch.zeros_like(slots)] if packed else [],
        [slots] if model.takes_positions else [],
        [zeros(1, nodes, kv_length) for _ in model.spec.windows],
        slots.clone(),
        torch.arange(3, device=model.device),
        torch.empty(5, dtype=torch.uint8, device=model.device),
        [zeros(heads, capacity, dim, rows=cached) for heads, dim, _, _ in layers],
        [zeros(heads, capacity, dim, rows=cached) for _, _, heads, dim in layers],
        [zeros(nodes, *shape) for _, shape in sorted(extra.items())],
    )


def check(model: TreeModel, compiled: CompiledPass, widths: Sequence[int] = ()) -> float:
    """Compare compiled passes with plain ones: prompts, trees, chains of some widths, each over its cache.

    Returns:
        the largest error of a node's logits or auxiliary hidden states, root mean square over that of the plain ones.

    Raises:
        NotCompiled: the error is more than rounding explains; or states are rounded, and a tree's logits are not those
            of its tokens one after the other, bit by bit.
    """
    try:
        with comparable(model.model):
            worst = max(_difference(model, compiled, extra, widths) for extra in variants_of(model.model))
    except RuntimeError as error:
        raise NotCompiled(f"compiled passes of {model.name} fail: {shorten(str(error), 200)}") from error
    if not worst <= (limit := limit_of(model, compiled.form)):
        raise NotCompiled(f"compiled passes of {model.name} are off by {worst:.1e} where rounding explains {limit:.0e}")
    if compiled.form == ROUNDED_STATES and not _has_same_bits(model, compiled):
        raise NotCompiled(f"compiled passes of {model.name} with rounded states depend on what else a pass holds")
    return worst


def limit_of(model: TreeModel, form: str) -> float:
    """Return the largest error of a model's compiled passes that rounding explains, as `check` measures it."""
    if form in ("dynamic_int8", "rounded", ROUNDED_STATES):
        return ROUNDED
    return PACKED if is_packed(model.model) else ROUNDING.get(model.dtype, 1e-4)


@torch.inference_mode()
def _has_same_bits(model: TreeModel, compiled: CompiledPass) -> bool:
    """Whether a tree's nodes get the logits, bit by bit, that their tokens get one after the other."""
    ids = torch.randint(model.vocab_size, (30,), generator=torch.Generator().manual_seed(1), device="cpu").tolist()
    tree = toy_tree(ids[: len(BRANCHES) + 1], BRANCHES)
    trees, chains = (_session(model, compiled, 1, 64, compiled) for _ in range(2))
    for session in (trees, chains):
        session.prefill([ids[8:]])
    found = trees.append(lay_out_trees([tree], model.device)).row(0)
    for leaf in {*range(len(tree))} - {*BRANCHES}:
        path = tree.ancestors(leaf)
        for node in path:
            alone = chains.append(lay_out_chains([[int(tree.tokens[node])]], model.device)).row(0)[0]
            if not torch.equal(alone, found[node]):
                return False
            chains.commit([(0,)])
        chains.cache.forget([len(path)])
    return True


@torch.inference_mode()
def _difference(model: TreeModel, compiled: CompiledPass, extra: Extra, widths: Sequence[int]) -> float:
    """Compare three rows: one token, a prompt, a tree; then one of them: a tree, and chains.  All logits, or half."""
    generator, device, longest = torch.Generator().manual_seed(0), model.device, max(widths, default=0)
    ids = torch.randint(model.vocab_size, (3, 24 + longest), generator=generator, device="cpu").tolist()
    trees = [toy_tree(row[12:18], BRANCHES) for row in (*ids, ids[0][6:])]
    prompts = [ids[0][1:12], ids[1][1:9], ids[2][1:6]]
    steps: list[tuple[Layout, Columns, Sequence[Sequence[int] | None]]] = [
        (lay_out_chains([row[:1] for row in ids], device), None, [(0,)] * 3),
        (lay_out_chains(prompts, device), [range(1, 3)] * 3, [range(len(prompt)) for prompt in prompts]),
        (lay_out_trees(trees[:3], device), None, [(0, 1, 4), None, None]),
        (lay_out_trees(trees[3:], device), None, [(0, 3)]),
        *((lay_out_chains([ids[0][:width]], device), None, [()]) for width in widths),
    ]
    sessions = [_session(model, run, 3, 24 + longest, compiled) for run in (model.ways.usual, compiled)]
    share = NEARLY_ALL if is_packed(model.model) else MOST if torch.finfo(model.dtype).bits < 32 else 1.0
    worst = 0.0
    for number, (layout, columns, paths) in enumerate(steps):
        words = model.vocab_size // 2 if number % 2 else None
        given = {
            name: torch.randn(*layout.tokens.shape, *shape, generator=generator).to(device, model.dtype)
            for name, shape in extra.items()
        }
        plain, found = (session.append(layout, columns, words, **given).flat()[:, :words] for session in sessions)
        states = [session.aux_states[0].flat().flatten(1) for session in sessions if session.aux_states]
        worst = max(worst, _error(plain, found, share), _error(states[0], states[1], share) if states else 0.0)
        for session in sessions:
            session.commit(paths)
    return worst


def _session(model: TreeModel, run: Pass, rows: int, capacity: int, compiled: CompiledPass) -> TreeSession:
    """Return a session that a pass runs, and that returns all hidden states of the compiled ones."""
    return TreeSession(model, run.cache(model, rows, capacity, None, False), compiled.aux_layers, run)


def _error(plain: Tensor, found: Tensor, share: float) -> float:
    """Return the largest error of a share of the nodes, root mean square over that of the plain values."""
    plain, found = plain.double(), found.double()
    spread = (plain - plain.mean(-1, keepdim=True)).square().mean(-1)
    errors = ((plain - found).square().mean(-1) / spread.clamp(min=1e-24)).sqrt().flatten()
    worst = float(errors.quantile(share))
    return worst if worst == worst else inf
