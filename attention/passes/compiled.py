"""The compiled passes of a model: made once into a folder, compared with the plain model, called in its place.

Knows: the compiler (AOTInductor), packages, when a package may be used for a model.
Does not know: what the graph contains (`exported`), where packages are kept (`packages`), text.

A package holds code and no weights: every call passes it the model's weights, those of linear layers packed.  The model
is only read.  A package is used while the model is the one it was compared with: the same modules with the same
settings, no hooks, no patched forwards.  Weights may be written or replaced; they are packed again.  If the model
changed in another way, the plain model runs, and `TreeModel.plain` says why.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from textwrap import shorten
from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from specinfer.attention.cache import TreeCache
from specinfer.attention.check import toy_tree
from specinfer.attention.compiler import attend, exported, linear
from specinfer.attention.compiler.linear import BYTES, FORMS, IN_FLOAT32, ROUNDED_STATES, form_of, free_bytes, pack
from specinfer.attention.compiler.watch import Watch, altered, named_tensors
from specinfer.attention.layout import Layout, lay_out_chains, lay_out_trees
from specinfer.attention.model import Columns, TreeModel, TreeSession
from specinfer.attention.torch_private import compile_package, load_package, writes
from specinfer.errors import NotCompiled

# Largest error of a pass's logits, root mean square over that of the logits, that rounding explains.  A wrong mask,
# position or weight costs 1e-2 (random weights) to 1.  Bfloat16 itself moves the logits of SmolLM2 by 0.05 to 0.36 from
# those in float32, so in 16 bits only gross mistakes are seen.
ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 4e-1, torch.float16: 1e-1}
ROUNDED = 0.3  # the same where weights or states are rounded
MOST = 0.75  # of a pass's nodes must be within that in 16 bits; the others may be outliers
SAMPLED = 32  # entries of a weight that are compared before every call
SPARE = 1.2  # bytes of free memory that packing needs, per byte of packed weights
RECORD = "package.json"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
BRANCHES = (0, 1, 0, 3, 4)  # parents of a tree: two chains below the root, one two deep, one three
USUAL = {"input_ids", "position_ids", "attention_mask", "logits_to_keep", "slots", "cache_rows", "cache_slots"}

Outputs = tuple[Tensor, ...]
Graph = tuple[torch.fx.GraphModule, tuple[exported.Source, ...]]
Group = tuple[str, tuple[str, ...]]  # kind and names of a `Source`


class CompiledPass:
    """A model's passes, from a package.

    Args:
        model: whose passes they are; all of its weights are read, none is written.
        folder: holds what `make` wrote.

    Raises:
        NotCompiled: the package is damaged.
    """

    def __init__(self, model: TreeModel, folder: Path) -> None:
        self.network: Callable[[], Any] = ref(model.model)  # alive while it is used
        try:
            record = json.loads((folder / RECORD).read_text())
            self.aux_layers: list[int] = record["aux_layers"]
            self.layers: list[list[int]] = record["layers"]  # heads and dimension of keys, then of values
            self.dtype = DTYPES[record["dtype"]]  # that passes compute in
            self.runners = {tuple(each["extra"]): _Runner(folder, each, model.device) for each in record["variants"]}
            self.packs: bool = record["packs"]  # whether it takes the nodes of all rows as one row
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise NotCompiled(f"the package in {folder} is damaged ({shorten(str(error), 200)})") from error
        self.kinds = sorted(model.spec.windows)
        self.lock = Lock()
        self.watch = Watch(model.model)
        self.stamps: list[tuple[int, int]] = []  # of the weights when they were packed
        self.samples: list[Tensor] = []  # some entries of each weight, as views
        self.sampled = torch.empty(0, device="cpu")  # their values when the weights were packed

    def serving(self, network: Any) -> "CompiledPass":
        """Return the same passes for another network of the same architecture; code is shared, weights are not."""
        other = copy(self)
        other.network, other.watch, other.lock = ref(network), Watch(network), Lock()
        other.runners = {extra: copy(runner) for extra, runner in self.runners.items()}
        other.stamps, other.samples = [], []
        return other

    def refresh(self) -> str:
        """Pack weights that changed; return why the passes cannot be used, or "" if the model is the same."""
        if reason := altered(self.network()):
            return reason
        if self.watch.changed(self.network()):
            return "the model changed since its passes were compiled"
        try:
            with self.lock:
                return self._bind()
        except (RuntimeError, ValueError) as error:
            return f"its weights cannot be packed ({shorten(str(error), 200)})"

    def _bind(self) -> str:
        """Give the runners the current weights of the model."""
        sources = {source for runner in self.runners.values() for source in runner.sources}
        names = sorted({name for source in sources for name in source.names})
        tensors = dict(named_tensors(self.network()))
        weights = {name: tensors[name].detach() for name in names}
        stamps = [(tensors[name].data_ptr(), writes(tensors[name])) for name in names]
        if stamps == self.stamps and torch.equal(_joined(self.samples), self.sampled):
            return ""
        groups = {(source.kind, source.names) for source in sources if source.kind in FORMS}
        parts = [(weights[name], form) for form, group in groups for name in group]
        needed = SPARE * sum(weight.numel() * BYTES.get(form, weight.itemsize) for weight, form in parts)
        if needed > free_bytes():
            return f"packed weights need {needed / 1e9:.1f} GB of memory, and less is free"
        packed: dict[Group, Tensor] = {}
        for form, group in groups:
            packed[form, group] = pack([weights[name] for name in group], form)
        for runner in self.runners.values():
            runner.weights = [self._input(source, weights, packed) for source in runner.sources]
        flat = [weight.view(-1) for weight in weights.values() if weight.is_contiguous()]
        self.samples = [weight[:: len(weight) // SAMPLED + 1] for weight in flat]
        self.stamps, self.sampled = stamps, _joined(self.samples)
        return ""

    def _input(
        self,
        source: exported.Source,
        weights: Mapping[str, Tensor],
        packed: Mapping[Group, Tensor],
    ) -> Tensor:
        if (source.kind, source.names) in packed:
            return packed[source.kind, source.names]
        dtype = DTYPES[source.dtype]
        if source.kind == "sizes":
            return torch.zeros(1, dtype=dtype, device="cpu").expand(source.shape)
        if source.kind == "joined":
            return torch.cat([weights[name] for name in source.names]).to(dtype)
        return weights[source.names[0]].to(dtype)

    def __call__(self, inputs: Mapping[str, Any], cache: TreeCache, aux_layers: Sequence[int]) -> Outputs:
        """Run a pass: logits (B, C, V), and the auxiliary hidden states (B, T, K, H) if there are aux_layers.

        Args:
            inputs: of the model's forward, as `TreeSession` makes them; of a packed pass, as `Packing` does.
            cache: with the slots of the pass staged.
            aux_layers: hidden states wanted, some of the package's.
        """
        ids, masks = inputs["input_ids"], inputs["attention_mask"]
        columns = inputs.get("logits_to_keep")
        extra = {name: inputs[name] for name in sorted(inputs.keys() - USUAL)}
        masks = [masks] if isinstance(masks, Tensor) else [masks[kind] for kind in self.kinds]
        cache.open_layers(self.layers, self.dtype, ids.device)
        tensors = exported.Tensors(
            ids,
            [inputs["cache_rows"]] if self.packs else [],
            [inputs["position_ids"]] if "position_ids" in inputs else [],
            masks,
            inputs["cache_slots"] if self.packs else cache.staged(ids.device),
            torch.arange(ids.shape[1], device=ids.device) if columns is None else columns,
            *cache.buffers(),
            [value.to(self.dtype) for value in extra.values()],
        )
        outputs = self.runners[tuple(extra)](tensors)
        if not aux_layers:
            return (outputs[0],)
        indices = [self.aux_layers.index(layer) for layer in aux_layers]
        return outputs[0], outputs[1] if indices == list(range(len(self.aux_layers))) else outputs[1][:, :, indices]


class _Runner:
    """One compiled graph, and the model's tensors that every call passes to it."""

    def __init__(self, folder: Path, record: Mapping[str, Any], device: torch.device) -> None:
        path = folder / record["file"]
        if hashlib.sha256(path.read_bytes()).hexdigest() != record["sha256"]:
            raise ValueError(f"{path.name} is not the file that was written")
        self.sources = [
            exported.Source(kind, tuple(names), tuple(shape), dtype) for kind, names, shape, dtype in record["sources"]
        ]
        self.weights: list[Tensor] = []
        self.run, self.lock = load_package(path, device), Lock()

    def __call__(self, tensors: exported.Tensors) -> Outputs:
        parts = (part if isinstance(part, list) else [part] for part in tensors)
        given = [tensor.contiguous() for tensor in chain(*parts)]
        with self.lock:
            return tuple(self.run([*given, *self.weights]))


def _joined(samples: Sequence[Tensor]) -> Tensor:
    return torch.cat([sample.float() for sample in samples]) if samples else torch.empty(0, device="cpu")


# ---- making a package ----


@torch.inference_mode(False)  # so that writes to the copy's weights are counted
def computing(model: TreeModel) -> TreeModel:
    """Return the model whose passes are compiled: itself, or a copy in float32 if passes of its form are.

    Linear layers of the copy round their states where the form does.

    Raises:
        NotCompiled: the copy does not fit into memory.
    """
    if model.form not in IN_FLOAT32 or model.dtype == torch.float32:
        return model
    needed = SPARE * sum(4 * tensor.numel() for tensor in model.model.parameters())
    if needed > free_bytes():
        raise NotCompiled(f"compiling {model.name} takes {needed / 1e9:.1f} GB of memory, and less is free")
    copied = TreeModel(deepcopy(model.model).float())
    copied.form = model.form
    for module in copied.model.modules():
        if model.form == ROUNDED_STATES and type(module) is torch.nn.Linear:
            module.__class__ = _RoundingLinear
    return copied


class _RoundingLinear(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(torch.bfloat16).to(input.dtype))


def make(model: TreeModel, aux_layers: Sequence[int], folder: Path, stored: Any) -> None:
    """Export and compile a model's passes into an existing folder.

    Args:
        model: in evaluation mode; only read.
        aux_layers: hidden states that passes return.
        folder: gets one file for each set of inputs that the forward takes, and a record of the files.
        stored: the network that it computes, maybe in another dtype; passes read its embeddings as they are.

    Raises:
        NotCompiled: the model cannot be exported, or the compiler fails; it says why.
    """
    if reason := altered(model.model):
        raise NotCompiled(reason)
    if model.spec.implementation == "flex_attention":
        raise NotCompiled("flex attention's masks are not tensors")
    try:
        linear.teach_compiler()
        attend.teach_compiler()
        layers, variants = _layers(model), []
        graphs, packs = _graphs(model, aux_layers, layers, stored)
        for number, (extra, (graph, sources)) in enumerate(zip(variants_of(model.model), graphs, strict=True)):
            path = folder / f"pass-{number}.pt2"
            compile_package(graph, path)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            variants.append({"extra": sorted(extra), "file": path.name, "sha256": digest, "sources": sources})
    except Exception as error:  # of any kind: torch cannot trace or compile some models
        reason = shorten(f"{type(error).__name__}: {error}", 200)
        raise NotCompiled(f"{model.name} cannot be compiled: {reason}") from error
    dtype = str(model.dtype).removeprefix("torch.")
    record = {"aux_layers": list(aux_layers), "dtype": dtype, "layers": layers, "packs": packs, "variants": variants}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def _graphs(
    model: TreeModel, aux_layers: Sequence[int], layers: Sequence[Sequence[int]], stored: Any
) -> tuple[list[Graph], bool]:
    """Export a model's passes, packed if they can be; return them, and whether they are."""
    dtypes = {name: tensor.dtype for name, tensor in named_tensors(stored)}

    def export(packed: bool) -> list[Graph]:
        found = []
        for extra in variants_of(model.model):
            kinds, names = sorted(model.spec.windows), sorted(extra)
            one = exported.Pass(model.model, kinds, aux_layers, model.takes_logits_to_keep, names)
            given = _example(model, layers, extra, packed), partial(form_of, form=model.form), dtypes
            found.append(exported.export_pass(one.eval(), *given))
        return found

    if model.device.type == "cpu" and model.dtype == torch.float32 and model.spec.implementation == "sdpa":
        with suppress(Exception):  # of any kind: a model may look at the rows of its cache
            return export(packed=True), True
    return export(packed=False), False


def variants_of(model: Any) -> tuple[dict[str, tuple[int, ...]], ...]:
    """Return the sets of unusual inputs that a model's forward takes: name -> shape after (B, T)."""
    return getattr(model, "pass_inputs", ({},))


def _layers(model: TreeModel) -> list[list[int]]:
    """Return heads and dimension of each cached layer's keys and values, as a plain pass writes them."""
    session = model.session(rows=1, capacity=4)
    extra = variants_of(model.model)[0].items()
    inputs = {name: torch.zeros(1, 1, *shape, device=model.device, dtype=model.dtype) for name, shape in extra}
    session.append(lay_out_chains([[0]], model.device), None, **inputs)
    layers = (layer.buffers for layer in session.cache.layers)
    return [[keys.shape[1], keys.shape[3], values.shape[1], values.shape[3]] for keys, values in layers]


def _example(
    model: TreeModel, layers: Sequence[Sequence[int]], extra: Mapping[str, tuple[int, ...]], packed: bool
) -> exported.Tensors:
    """Return tensors of a pass, all sizes different: two rows, six nodes, 40 columns of 96 slots, logits of three."""
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
        [zeros(heads, capacity, dim, rows=cached) for heads, dim, _, _ in layers],
        [zeros(heads, capacity, dim, rows=cached) for _, _, heads, dim in layers],
        [zeros(nodes, *shape) for _, shape in sorted(extra.items())],
    )


# ---- is it right? ----


def check(model: TreeModel, compiled: CompiledPass, widths: Sequence[int] = ()) -> float:
    """Compare compiled passes with plain ones: prompts, trees, chains of some widths, each over its cache.

    Returns:
        the largest error of a node's logits or auxiliary hidden states, root mean square over that of the plain ones.

    Raises:
        NotCompiled: the error is more than rounding explains; or states are rounded, and a tree's logits are not those
            of its tokens one after the other, bit by bit.
    """
    try:
        worst = max(_difference(model, compiled, extra, widths) for extra in variants_of(model.model))
    except RuntimeError as error:
        raise NotCompiled(f"compiled passes of {model.name} fail: {shorten(str(error), 200)}") from error
    if not worst <= (limit := limit_of(model)):
        raise NotCompiled(f"compiled passes of {model.name} are off by {worst:.1e} where rounding explains {limit:.0e}")
    if model.form == ROUNDED_STATES and not _has_same_bits(model, compiled):
        raise NotCompiled(f"compiled passes of {model.name} with rounded states depend on what else a pass holds")
    return worst


def limit_of(model: TreeModel) -> float:
    """Return the largest error of a model's compiled passes that rounding explains, as `check` measures it."""
    return ROUNDED if model.form in ("dynamic_int8", "rounded", ROUNDED_STATES) else ROUNDING.get(model.dtype, 1e-4)


@torch.inference_mode()
def _has_same_bits(model: TreeModel, compiled: CompiledPass) -> bool:
    """Whether a tree's nodes get the logits, bit by bit, that their tokens get one after the other."""
    ids = torch.randint(model.vocab_size, (30,), generator=torch.Generator().manual_seed(1), device="cpu").tolist()
    tree = toy_tree(ids[: len(BRANCHES) + 1], BRANCHES)
    trees, chains = (
        TreeSession(model, TreeCache(1, 64, uniform_layers=model.uniform_layers), compiled.aux_layers, compiled)
        for _ in range(2)
    )
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
def _difference(model: TreeModel, compiled: CompiledPass, extra: Mapping[str, Any], widths: Sequence[int]) -> float:
    """Compare three rows: one token, a prompt, a tree; then one of them: a tree, and chains."""
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
    caches = (TreeCache(3, 24 + longest, uniform_layers=model.uniform_layers) for _ in range(2))
    passes = zip(caches, (None, compiled), strict=True)
    sessions = [TreeSession(model, cache, compiled.aux_layers, each) for cache, each in passes]
    worst = 0.0
    for layout, columns, paths in steps:
        given = {
            name: torch.randn(*layout.tokens.shape, *shape, generator=generator).to(device, model.dtype)
            for name, shape in extra.items()
        }
        results = [session.append(layout, columns, **given).flat() for session in sessions]
        states = [session.aux_states[0].flat().flatten(1) for session in sessions if session.aux_states]
        worst = max(worst, _error(*results), _error(*states) if states else 0.0)
        for session in sessions:
            session.commit(paths)
    return worst


def _error(plain: Tensor, found: Tensor) -> float:
    """Return the largest error of a node, root mean square over that of the plain values; in 16 bits of most nodes."""
    few_bits = torch.finfo(plain.dtype).bits < 32
    plain, found = plain.double(), found.double()
    spread = (plain - plain.mean(-1, keepdim=True)).square().mean(-1)
    errors = ((plain - found).square().mean(-1) / spread.clamp(min=1e-24)).sqrt().flatten()
    worst = float(errors.quantile(MOST) if few_bits else errors.max())
    return worst if worst == worst else inf
