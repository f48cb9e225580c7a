"""The steps of `gpu.py` that need models: ids, passes, steps, texts, compiled passes.

All weights are random and made on the device: nothing is downloaded.  Ids are compared on a random model of
SmolLM2-135M's shape, whose draft is a noisy copy.  Costs are those of models that count (`targets`).

Knows: what is compared with what, in which order.  Does not know: clocks, processes, files.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import product
from time import perf_counter
from typing import Any
from unittest.mock import patch

from device import CUDA, NULL, bandwidth
from identity import DISTRIBUTIONS, compared
from report import Case, Row
from steps import Ids, generated, pass_rows, step_row, text_row
from targets import SHAPES, TINY, Subject, counting_head, shape, stand_in

from specinfer import BestFirst, Chain, SpeculativeDecoder
from specinfer.attention import TreeModel
from specinfer.attention.compiler import making as compiler

TREE = BestFirst(16, 8)
SHALLOW = {"tree": BestFirst(16, 4), "chain": Chain(4)}  # whose ids are compared: their draft is as slow as the target
ACCEPTANCE = 0.7  # of the draft that agrees
DTYPE = "bfloat16"
OURS: dict[str, tuple[Any, bool]] = {"plain": (None, False), "auto, graphs": ("auto", True), "auto": ("auto", False)}
THEIRS: dict[str, dict[str, Any]] = {"generate": {}, "generate, static": {"cache_implementation": "static"}}


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        models: configurations by name: the first one is for ids and compiled passes, the others for steps and texts.
        context: tokens before the first new one.
        nodes: of passes.
        rows: of texts.
        new: tokens of texts.
        compared: prompts whose ids are compared, and new tokens of each.
        steps: that are measured.
    """

    models: dict[str, Any]
    context: int = 512
    nodes: tuple[int, ...] = (1, 8, 16, 32, 64)
    rows: tuple[int, ...] = (1, 8)
    new: int = 64
    compared: tuple[int, int] = (4, 32)
    steps: int = 20


REAL = Sizes(SHAPES)
SMALL = Sizes({"tiny": TINY["tiny"], "tiny 2": TINY["tiny"]}, 32, (1, 8), (1, 2), 8, (2, 8), 3)


def sizes_of(tiny: bool) -> Sizes:
    """Return what is measured."""
    return SMALL if tiny else REAL


@lru_cache(1)  # the memory of a single model is taken
def counting(name: str, tiny: bool) -> Subject:
    """Return a model of a shape, and the draft that agrees with it."""
    return shape(name, deepcopy(sizes_of(tiny).models[name]), DTYPE, ACCEPTANCE)


@cache
def rate(tiny: bool) -> float:
    """Return bytes a second."""
    return bandwidth(1 << (20 if tiny else 32))


def case(step: str, measure: Callable[..., list[Row]], graphs: bool = False, **what: Any) -> Case:
    """Return a case whose rows say what it is of; where there is no GPU, one with graphs says so."""

    def rows() -> list[Row]:
        found = [{"null": NULL}] if graphs and not CUDA else measure()
        return [{**what, "graphs": graphs, **row} for row in found]

    return Case(", ".join([*map(str, what.values()), *["graphs"] * graphs]), step, rows)


# ---- ids ----


def ids(tiny: bool) -> Iterator[Case]:
    """Compare ids with those without speculation, and with those of generate when greedy."""
    sizes = sizes_of(tiny)
    count, new = sizes.compared
    options = {name: {"max_new_tokens": new, "seed": 7, **DISTRIBUTIONS[name]} for name in ("greedy", "T=1")}

    @lru_cache(1)
    def made(dtype: str) -> Subject:
        return stand_in(deepcopy(next(iter(sizes.models.values()))), dtype)

    @cache
    def reference(dtype: str, distribution: str, method: str) -> Ids:
        subject = made(dtype)
        if method == "generate":
            return [generated(subject.model, [prompt], new)[0] for prompt in subject.prompts(count, 0)]
        plain = SpeculativeDecoder(subject.model, None, [], None)
        return [plain.generate(prompt, **options[distribution]).token_ids for prompt in subject.prompts(count, 0)]

    def measure(dtype: str, distribution: str, method: str, graphs: bool) -> list[Row]:
        subject = made(dtype)
        decoder = SpeculativeDecoder(subject.model, None, subject.drafts, SHALLOW.get(method), graphs=graphs)
        results = [decoder.generate(prompt, **options[distribution]) for prompt in subject.prompts(count, 0)]
        others = ["generate"] * (distribution == "greedy") + ["plain"] * (method != "plain")
        lines = {other: reference(dtype, distribution, other) for other in others}
        return [
            {"against": other, **compared(subject.model, distribution, method, results, line)}
            for other, line in lines.items()
        ]

    ways = [("plain", False), ("tree", True), ("tree", False), ("chain", False)]
    for distribution, dtype, (method, graphs) in product(options, ("float32", DTYPE), ways):
        if (distribution, method) != ("T=1", "plain"):  # generate draws with other random numbers
            run = partial(measure, dtype, distribution, method, graphs)
            yield case("ids", run, graphs, dtype=dtype, distribution=distribution, method=method)


# ---- passes and steps ----


def passes(tiny: bool) -> Iterator[Case]:
    """Measure passes over different numbers of nodes, beside what reading the weights takes."""
    sizes = sizes_of(tiny)

    def measure(name: str, graphs: bool) -> list[Row]:
        target = TreeModel(counting(name, tiny).model)
        return pass_rows(target, graphs, sizes.context, sizes.nodes, rate(tiny))

    for name, graphs in product(sizes.models, (False, True)):
        yield case("passes", partial(measure, name, graphs), graphs, target=name)


def steps(tiny: bool) -> Iterator[Case]:
    """Measure where the time of a step goes, with a draft that costs nothing and with a head."""
    sizes = sizes_of(tiny)

    def measure(name: str, draft: str) -> list[Row]:
        subject = counting(name, tiny)
        drafts = subject.drafts if draft == "agreeing" else [counting_head(subject.model)]
        decoder = SpeculativeDecoder(subject.model, None, drafts, TREE, graphs=CUDA)
        return [step_row(decoder, subject.prompts(1, sizes.context), sizes.steps) | {"graphs": CUDA}]

    for name, draft in product([*sizes.models][1:], ("agreeing", "head")):
        yield case("steps", partial(measure, name, draft), target=name, draft=draft)


# ---- texts ----


def texts(tiny: bool) -> Iterator[Case]:
    """Measure tokens a second; what transformers compiles comes last."""
    sizes = sizes_of(tiny)

    def measure(name: str, method: str, rows: int) -> list[Row]:
        subject = counting(name, tiny)
        prompts = subject.prompts(rows, sizes.context)
        if method in THEIRS:
            write = partial(generated, subject.model, prompts, sizes.new, **THEIRS[method])
        else:
            tree, graphs = OURS[method]
            write = partial(_written, SpeculativeDecoder(subject.model, None, subject.drafts, tree, graphs=graphs))
            write = partial(write, prompts, sizes.new)
        row, found = text_row(write)
        right = [subject.text(prompt, sizes.new) for prompt in prompts]
        return [row | {"right": sum(own == known for own, known in zip(found, right, strict=True))}]

    first = product(sizes.rows, [*sizes.models][1:], ["plain", "auto, graphs", "generate", "auto"])
    last = product(sizes.rows, [*sizes.models][1:], ["generate, static"])
    for rows, name, method in [*first, *last]:
        graphs = method in OURS and OURS[method][1]
        yield case("texts", partial(measure, name, method, rows), graphs, target=name, method=method, rows=rows)


def _written(decoder: SpeculativeDecoder, prompts: Ids, new: int) -> Ids:
    return [result.token_ids for result in decoder.generate(prompts, max_new_tokens=new, do_sample=False)]


# ---- compiled passes ----


def compiled(tiny: bool) -> Iterator[Case]:
    """Compile the passes of the smallest model, and measure them."""
    name = next(iter(sizes_of(tiny).models))
    if CUDA:
        yield Case(name, "compiled", partial(compiled_rows, name, tiny))
    else:
        yield case("compiled", lambda: [{"null": f"{NULL}: compiling for a CPU takes minutes and says nothing of one"}])


def compiled_rows(name: str, tiny: bool) -> list[Row]:
    """Return the seconds that compiling takes, and what passes cost then; or else what the compiler said."""
    model, sizes, said = counting(name, tiny).model, sizes_of(tiny), list[str]()
    compile_graph = compiler.compile_package

    def listening(*args: Any) -> None:
        try:
            compile_graph(*args)
        except Exception as error:
            said.extend(line.strip() for line in str(error).splitlines())
            raise

    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, SPECINFER_CACHE=folder):
        with patch.object(compiler, "compile_package", listening):
            started = perf_counter()
            decoder = SpeculativeDecoder(model, None, [], None, compile=True)
            seconds = perf_counter() - started
        told = [line for line in said if "ld: " in line] or [line for line in said if "error" in line] or said
        rows = [{"target": name, "seconds": seconds, "passes": decoder.passes, "said": told[:1]}]
        for graphs in (False, True)[: (1 + CUDA) * (decoder.target.ways.fast is not None)]:
            found = pass_rows(decoder.target, graphs, sizes.context, sizes.nodes, rate(tiny))
            rows += [{"target": name, "graphs": graphs, **row} for row in found]
    return rows
