"""A model's passes, compiled: made once into a folder, compared with the plain model, called in the model's place.

Knows: the compiler (AOTInductor), packages, when one may stand for a model.
Does not know: what the graph looks like inside (`exported`), where packages are kept (`packages`), text.

A package holds code and no weights: it gets the model's own, and linear layers' weights packed, with every call.  The
model is only read.  A package is used while the model is what it was when it was compared: the same modules with the
same settings, no hooks, no patched forwards; weights may be written or replaced, and are packed anew.  Otherwise the
plain model runs, and `TreeModel.plain` says why.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from specinfer.attention import exported
from specinfer.attention.cache import TreeCache
from specinfer.attention.layout import Layout, lay_out_chains, lay_out_trees
from specinfer.attention.linear import free_bytes, pack, packable, teach_compiler
from specinfer.attention.model import TreeModel, TreeSession
from specinfer.attention.watch import Watch, altered
from specinfer.errors import NotCompiled
from specinfer.tree import Draw, TokenTree

# Error of a pass's logits, root mean square over that of the logits, that rounding explains.  A wrong mask, position or
# weight costs 1e-2 (random weights) to 1.  Bfloat16 itself moves those of SmolLM2 by 0.05 to 0.36 from float32's, so
# in 16 bits only gross mistakes are seen.
ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 4e-1, torch.float16: 1e-1}
MOST = 0.75  # of a pass's nodes, in 16 bits, must be as near as that; the others may be outliers
SAMPLED = 32  # entries of a weight that are looked at before every call
SPARE = 1.2  # free memory that packing asks for, in bytes per byte of weights
OPTIONS = {"cpp.dynamic_threads": True, "aot_inductor.precompile_headers": False}
RECORD = "package.json"
USUAL = {"input_ids", "position_ids", "attention_mask", "logits_to_keep", "slots"}

Outputs = tuple[Tensor, ...]


class CompiledPass:
    """A model's passes, from a package.

    Args:
        model: whose passes they are; all of its weights are read, none is written.
        folder: holds what `make` wrote.

    Raises:
        NotCompiled: the package is damaged.
    """

    def __init__(self, model: TreeModel, folder: Path) -> None:
        self._network = ref(model.model)
        try:
            record = json.loads((folder / RECORD).read_text())
            self.aux_layers: list[int] = record["aux_layers"]
            self.layers: list[list[int]] = record["layers"]  # heads and dimension of keys, then of values
            self.runners = {
                tuple(own["extra"]): _Runner(folder / own["file"], own, model.device) for own in record["variants"]
            }
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise NotCompiled(f"the package in {folder} is damaged ({_line(error)})") from error
        self.kinds = sorted(model.spec.windows)
        self.lock = Lock()
        self.watch = Watch(self.network)
        self.stamps: list[tuple[int, int]] = []  # of the weights as they were packed ...
        self.samples: list[Tensor] = []  # ... some entries of each, views ...
        self.sketch = torch.empty(0)  # ... and what those were
        self.packed: dict[tuple[str, ...], Tensor] = {}

    @property
    def network(self) -> Any:
        """The model, which is alive while it is used."""
        return self._network()

    def refresh(self) -> str:
        """Look whether the model is what it was, and pack weights that changed; return why it is not, or nothing."""
        if reason := altered(self.network):
            return reason
        if self.watch.changed(self.network):
            return "the model changed since its passes were compiled"
        try:
            with self.lock:
                return self._bind()
        except RuntimeError as error:
            return f"its weights cannot be packed ({_line(error)})"

    def _bind(self) -> str:
        """Give the runners the model's weights as they are now."""
        sources = {source for runner in self.runners.values() for source in runner.sources}
        own_weights = self.network.named_parameters(remove_duplicate=False)
        weights = {**dict(own_weights), **dict(self.network.named_buffers(remove_duplicate=False))}
        names = sorted({name for source in sources for name in source.names})
        stamps = [_stamp(weights[name]) for name in names]
        if stamps == self.stamps and torch.equal(_joined(self.samples), self.sketch):
            return ""
        found = {name: weights[name].detach() for name in names}
        wanted = {source.names for source in sources if source.kind == "packed"}
        needed = SPARE * sum(found[name].nbytes for name in {name for own in wanted for name in own})
        if needed > free_bytes():
            return f"packed weights need {needed / 1e9:.1f} GB of memory, and less is free"
        self.packed = {own: pack([found[name] for name in own]) for own in wanted}
        for runner in self.runners.values():
            runner.own = [self._input(source, found) for source in runner.sources]
        flat = [own.view(-1) for own in found.values() if own.is_contiguous()]
        self.samples = [own[:: len(own) // SAMPLED + 1] for own in flat]
        self.stamps, self.sketch = stamps, _joined(self.samples)
        return ""

    def _input(self, source: exported.Source, found: Mapping[str, Tensor]) -> Tensor:
        if source.kind == "packed":
            return self.packed[source.names]
        if source.kind == "sizes":
            return torch.zeros(1, dtype=self.network.dtype).expand(source.shape)
        if source.kind == "joined":
            return torch.cat([found[name] for name in source.names])
        return found[source.names[0]]

    def __call__(self, inputs: Mapping[str, Any], cache: TreeCache, aux_layers: Sequence[int]) -> Outputs:
        """Run a pass: logits (B, C, V), and the aux_states states (B, T, K, H) if there are aux_layers.

        Args:
            inputs: of the model's forward, as `TreeSession` makes them.
            cache: with the pass's slots staged.
            aux_layers: hidden states wanted, some of the package's.
        """
        ids, masks = inputs["input_ids"], inputs["attention_mask"]
        columns = inputs.get("logits_to_keep")
        cache.open_layers(self.layers, self.network.dtype, ids.device)
        example = exported.Example(
            ids,
            [inputs["position_ids"]] if "position_ids" in inputs else [],
            [masks] if isinstance(masks, Tensor) else [masks[kind] for kind in self.kinds],
            cache.staged(ids.device),
            torch.arange(ids.shape[1], device=ids.device) if columns is None else columns,
            *cache.buffers(),
            [value.to(self.network.dtype) for name, value in sorted(inputs.items()) if name not in USUAL],
        )
        outputs = self.runners[extra_names(inputs)](exported.tensors(example))
        if not aux_layers:
            return (outputs[0],)
        places = [self.aux_layers.index(layer) for layer in aux_layers]
        return outputs[0], outputs[1] if places == list(range(len(self.aux_layers))) else outputs[1][:, :, places]


class _Runner:
    """One compiled graph, and the model's tensors that it is given with every call."""

    def __init__(self, path: Path, record: Mapping[str, Any], device: torch.device) -> None:
        if hashlib.sha256(path.read_bytes()).hexdigest() != record["sha256"]:
            raise ValueError(f"{path.name} is not the file that was written")
        self.sources = [exported.Source(kind, tuple(names), tuple(shape)) for kind, names, shape in record["sources"]]
        self.own: list[Tensor] = []
        index, alone = (
            (device.index or 0, True) if device.type == "cuda" else (-1, False)
        )  # graphs want no other stream
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", alone, 1, index)
        self.run, self.lock = loader.run, Lock()

    def __call__(self, given: list[Tensor]) -> Outputs:
        with self.lock:
            return tuple(self.run([*given, *self.own]))


def extra_names(inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a forward is given that a plain causal LM's is not."""
    return tuple(sorted(name for name in inputs if name not in USUAL))


def _stamp(weight: Tensor) -> tuple[int, int]:
    """Return what changes when a weight is replaced, or written in place but through ``.data``."""
    return weight.data_ptr(), weight._version


def _joined(samples: Sequence[Tensor]) -> Tensor:
    return torch.cat([sample.float() for sample in samples]) if samples else torch.empty(0)


# ---- making a package ----


def make(model: TreeModel, aux_layers: Sequence[int], folder: Path) -> None:
    """Export and compile a model's passes into a folder that is there.

    Args:
        model: in evaluation mode; only read.
        aux_layers: hidden states that passes hand out.
        folder: gets one file for each set of inputs that the forward takes, and a record of them.

    Raises:
        NotCompiled: the model does not export, or the compiler fails; says why.
    """
    if reason := altered(model.model):
        raise NotCompiled(reason)
    if model.spec.implementation == "flex_attention":
        raise NotCompiled("flex attention's masks are not tensors")
    try:
        teach_compiler()
        layers, variants = _layers(model), []
        for number, extra in enumerate(variants_of(model.model)):
            kinds = sorted(model.spec.windows)
            own = exported.Pass(model.model, kinds, aux_layers, model.takes_logits_to_keep, sorted(extra))
            graph = exported.exported(own.eval(), _example(model, layers, extra), packable)
            path = folder / f"pass-{number}.pt2"
            _compile(graph.graph, path)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            variants.append({"extra": sorted(extra), "file": path.name, "sha256": digest, "sources": graph.sources})
    except Exception as error:  # whatever torch cannot trace or compile in other people's models
        raise NotCompiled(f"{model.name} cannot be compiled: {type(error).__name__}: {_line(error)}") from error
    record = {"aux_layers": list(aux_layers), "layers": layers, "variants": variants}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def variants_of(model: Any) -> tuple[dict[str, tuple[int, ...]], ...]:
    """Return the sets of inputs that a model's forward takes beside the usual ones: name -> shape after (B, T)."""
    return getattr(model, "pass_inputs", ({},))


def _compile(graph: torch.fx.GraphModule, path: Path) -> None:
    from torch._inductor import aot_compile
    from torch._inductor.package import package_aoti
    from torch._inductor.utils import fresh_cache

    inputs = tuple(node.meta["val"] for node in graph.graph.find_nodes(op="placeholder"))
    with torch.no_grad(), fresh_cache(dir=str(path.parent)), warnings.catch_warnings(action="ignore"):
        files: Any = aot_compile(graph, inputs, options={**OPTIONS, "aot_inductor.package": True})
        package_aoti(str(path), files)


def _layers(model: TreeModel) -> list[list[int]]:
    """Return heads and dimension of each cached layer's keys and values, as a plain pass writes them."""
    session = model.session(rows=1, capacity=4)
    extra = {name: torch.zeros(1, 1, *shape) for name, shape in variants_of(model.model)[0].items()}
    layout = lay_out_chains([[0]], model.device)
    session.append(layout, **{name: value.to(model.device, model.dtype) for name, value in extra.items()})
    return [
        [n for buffer in layer.buffers for n in (buffer.shape[1], buffer.shape[3])] for layer in session.cache.layers
    ]


def _example(model: TreeModel, layers: Sequence[Sequence[int]], extra: Mapping[str, tuple[int, ...]]) -> Any:
    """Return tensors of a pass, no two sizes alike: two rows, six nodes, 40 columns of 96 slots, logits of three."""
    rows, nodes, kv_length, slots, kept = 2, 6, 40, 96, 3
    numbers: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
    whole: dict[str, Any] = {"device": model.device}
    places = torch.arange(kv_length - nodes, kv_length, **whole).repeat(rows, 1)
    keys, values = ([torch.zeros(rows, own[at], slots, own[at + 1], **numbers) for own in layers] for at in (0, 2))
    return exported.Example(
        torch.zeros(rows, nodes, dtype=torch.long, **whole),
        [places] if model.takes_positions else [],
        [torch.zeros(rows, 1, nodes, kv_length, **numbers) for _ in model.spec.windows],
        places.clone(),
        torch.arange(kept, **whole),
        keys,
        values,
        [torch.zeros(rows, nodes, *shape, **numbers) for _, shape in sorted(extra.items())],
    )


# ---- is it right? ----


def check(model: TreeModel, own: CompiledPass, widths: Sequence[int] = ()) -> float:
    """Compare compiled passes with plain ones: prompts, trees, chains of some widths, over what each left in its cache.

    Returns:
        the largest error of a node's logits or aux_states states, root mean square over that of the plain ones'.

    Raises:
        NotCompiled: more than rounding explains.
    """
    try:
        worst = max(_difference(model, own, extra, widths) for extra in variants_of(model.model))
    except RuntimeError as error:
        raise NotCompiled(f"compiled passes of {model.name} fail: {_line(error)}") from error
    limit = ROUNDING.get(model.dtype, 1e-4)
    if not worst <= limit:
        raise NotCompiled(f"compiled passes of {model.name} are off by {worst:.1e} where rounding explains {limit:.0e}")
    return worst


@torch.inference_mode()
def _difference(model: TreeModel, own: CompiledPass, extra: Mapping[str, Any], widths: Sequence[int]) -> float:
    """Compare three rows: one token, a prompt, a tree; then one of them: a tree, and chains."""
    chance, device, longest = torch.Generator().manual_seed(0), model.device, max(widths, default=0)
    ids = torch.randint(model.vocab_size, (3, 24 + longest), generator=chance).tolist()
    trees = [_branching(row[12:18]) for row in (*ids, ids[0][6:])]
    few = torch.tensor([0, 2], device=device)
    prompts = [ids[0][1:12], ids[1][1:9], ids[2][1:6]]
    steps: list[tuple[Layout, Tensor | None, Sequence[Sequence[int] | None]]] = [
        (lay_out_chains([row[:1] for row in ids], device), None, [(0,)] * 3),
        (lay_out_chains(prompts, device), few, [range(len(prompt)) for prompt in prompts]),
        (lay_out_trees(trees[:3], device), None, [(0, 1, 4), None, None]),
        (lay_out_trees(trees[3:], device), None, [(0, 3)]),
        *((lay_out_chains([ids[0][:width]], device), None, [()]) for width in widths),
    ]
    caches = (TreeCache(3, 24 + longest, uniform_layers=model.uniform_layers) for _ in range(2))
    both = [TreeSession(model, cache, own.aux_layers, each) for cache, each in zip(caches, (None, own), strict=True)]
    worst = 0.0
    for layout, columns, paths in steps:
        shapes = {name: (*layout.tokens.shape, *shape) for name, shape in extra.items()}
        given = {name: torch.randn(shape, generator=chance).to(device, model.dtype) for name, shape in shapes.items()}
        results = [session.append(layout, columns, **given) for session in both]
        states = [torch.cat(session.aux_states, 1).flatten(2) for session in both if session.aux_states]
        worst = max(worst, _error(*results), _error(*states) if states else 0.0)
        for session in both:
            session.commit(paths)
    return worst


def _error(plain: Tensor, own: Tensor) -> float:
    """Return the largest error of a pass's nodes, root mean square in that of the plain values; in 16 bits of most."""
    few_bits = torch.finfo(plain.dtype).bits < 32
    plain, own = plain.double(), own.double()
    spread = (plain - plain.mean(-1, keepdim=True)).square().mean(-1)
    errors = ((plain - own).square().mean(-1) / spread.clamp(min=1e-24)).sqrt().flatten()
    worst = float(errors.quantile(MOST) if few_bits else errors.max())
    return worst if worst == worst else float("inf")


def _branching(tokens: Sequence[int]) -> TokenTree:
    """Return a tree of six nodes: two chains below the root, one two deep, one three."""
    first, *others = tokens
    others[2] = others[2] if others[2] != others[0] else (others[0] + 1) % 2  # siblings differ
    draws = [[Draw(0, place)] for place in (0, 0, 1, 0, 0)]
    return TokenTree.from_nodes(first, others, (0, 1, 0, 3, 4), [-1.0, -2.0, -3.0, -4.0, -5.0], draws)


def _line(error: BaseException) -> str:
    """Return an error's message as one short line."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:197]}..."
