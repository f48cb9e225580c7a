"""The steps of `gpu.py` that need models: ids, and what passes, steps and texts of two models cost.

All weights are random and made on the device: nothing is downloaded.  Ids are compared on a random model of
SmolLM2-135M's shape, whose draft is a noisy copy.  Costs are those of models that count (`targets`).

Knows: what is compared with what, in which order.  Does not know: clocks, processes, files.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import product
from time import perf_counter
from typing import Any

from device import CUDA, NULL, bandwidth
from identity import DISTRIBUTIONS, compared
from report import Case, Row
from steps import Ids, generated, pass_rows, step_row, text_row
from targets import SHAPES, TINY, Subject, counting_head, shape, stand_in

from specinfer import BestFirst, Chain, SpeculativeDecoder
from specinfer.errors import ModelError

TREE = BestFirst(16, 8)
SHALLOW = {"tree": BestFirst(16, 4), "chain": Chain(4)}  # whose ids are compared: their draft is as slow as the target
ACCEPTANCE = 0.7  # of the draft that agrees
DTYPE = "bfloat16"
WAYS: dict[str, dict[str, Any]] = {  # to run passes, and the decoder's options for them
    "as they are": {"compile": False},
    "graphs": {"compile": False, "graphs": True},
    "compiled": {"compile": True, "graphs": True},
}
OURS = {"plain": None, "auto": "auto"}  # and their trees
THEIRS: dict[str, dict[str, Any]] = {"generate": {}, "generate, static": {"cache_implementation": "static"}}


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        models: configurations by name: the first one is for ids, the others for costs.
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
SMALL = Sizes({"tiny": TINY["tiny"], "tiny 2": TINY["tiny"], "tiny 3": TINY["tiny"]}, 32, (1, 8), (1, 2), 8, (2, 8), 3)


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


def case(step: str, measure: Callable[..., list[Row]], way: str = "", **what: Any) -> Case:
    """Return a case whose rows say what it is of; where there is no GPU, one with graphs says so."""

    def rows() -> list[Row]:
        found = [{"null": NULL}] if "graphs" in WAYS.get(way, {}) and not CUDA else measure()
        return [{**what, **({"way": way} if way else {}), **row} for row in found]

    return Case(", ".join([*map(str, what.values()), *[way] * bool(way)]), step, rows)


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

    def measure(dtype: str, distribution: str, method: str, way: str) -> list[Row]:
        subject = made(dtype)
        decoder = SpeculativeDecoder(subject.model, None, subject.drafts, SHALLOW.get(method), **WAYS[way])
        results = [decoder.generate(prompt, **options[distribution]) for prompt in subject.prompts(count, 0)]
        others = ["generate"] * (distribution == "greedy") + ["plain"] * (method != "plain")
        lines = {other: reference(dtype, distribution, other) for other in others}
        return [
            {"against": other, **compared(subject.model, distribution, method, results, line)}
            for other, line in lines.items()
        ]

    first, second, *_ = WAYS
    ways = [("plain", first), ("tree", second), ("tree", first), ("chain", first)]
    for distribution, dtype, (method, way) in product(options, ("float32", DTYPE), ways):
        if (distribution, method) != ("T=1", "plain"):  # generate draws with other random numbers
            run = partial(measure, dtype, distribution, method, way)
            yield case("ids", run, way, dtype=dtype, distribution=distribution, method=method)


# ---- costs: passes, steps, texts ----


def small(tiny: bool) -> Iterator[Case]:
    """Measure what the smaller model costs."""
    yield from costs_of([*sizes_of(tiny).models][1], tiny)


def large(tiny: bool) -> Iterator[Case]:
    """Measure what the larger model costs."""
    yield from costs_of([*sizes_of(tiny).models][2], tiny)


def costs_of(name: str, tiny: bool) -> Iterator[Case]:
    """Measure passes, steps and texts of one model, the fastest ways first."""
    sizes = sizes_of(tiny)

    def passes(way: str) -> Case:
        return case("passes", lambda: pass_cases(name, way, tiny), way, target=name)

    def steps(draft: str, way: str) -> Case:
        return case("steps", lambda: [step_case(name, draft, way, tiny)], way, target=name, draft=draft)

    def texts(method: str, way: str, rows: int) -> Case:
        return case(
            "texts", lambda: [text_case(name, method, way, rows, tiny)], way, target=name, method=method, rows=rows
        )

    usual, graphs, compiled = WAYS
    one, many = sizes.rows
    yield passes(graphs)
    yield passes(compiled)
    yield steps("agreeing", compiled)
    yield from (texts(method, compiled, one) for method in OURS)
    yield texts("generate", "", one)
    yield from (texts(method, compiled, many) for method in OURS)
    yield texts("generate", "", many)
    yield from (texts(method, graphs, one) for method in OURS)
    yield from (texts(method, usual, one) for method in OURS)
    yield steps("head", compiled)
    yield texts("generate, static", "", one)
    yield steps("agreeing", usual)
    yield steps("head", usual)
    yield from (texts(method, usual, many) for method in OURS)
    yield texts("generate, static", "", many)
    yield passes(usual)


def decoder_of(subject: Subject, drafts: list[Any], tree: Any, way: str) -> SpeculativeDecoder:
    """Return a decoder whose passes run in a way.

    Raises:
        ModelError: they could not be compiled.
    """
    made = SpeculativeDecoder(subject.model, None, drafts, tree, **WAYS[way])
    if WAYS[way]["compile"] and made.target.ways.fast is None:
        raise ModelError(made.passes)
    return made


def pass_cases(name: str, way: str, tiny: bool) -> list[Row]:
    """Measure passes over different numbers of nodes, beside what reading the weights takes."""
    sizes, started = sizes_of(tiny), perf_counter()
    decoder = decoder_of(counting(name, tiny), [], None, way)
    seconds, graphs = perf_counter() - started, WAYS[way].get("graphs", False)
    rows = pass_rows(decoder.target, graphs, sizes.context, sizes.nodes, rate(tiny))
    return [{"seconds to compile": seconds, **row} if WAYS[way]["compile"] else row for row in rows]


def step_case(name: str, draft: str, way: str, tiny: bool) -> Row:
    """Measure where the time of a step goes, with a draft that costs nothing or with a head."""
    subject, sizes = counting(name, tiny), sizes_of(tiny)
    drafts = subject.drafts if draft == "agreeing" else [counting_head(subject.model)]
    return step_row(decoder_of(subject, drafts, TREE, way), subject.prompts(1, sizes.context), sizes.steps)


def text_case(name: str, method: str, way: str, rows: int, tiny: bool) -> Row:
    """Measure tokens a second, and count the texts that are right."""
    subject, sizes = counting(name, tiny), sizes_of(tiny)
    prompts = subject.prompts(rows, sizes.context)
    if method in THEIRS:
        write = partial(generated, subject.model, prompts, sizes.new, **THEIRS[method])
    else:
        write = partial(_written, decoder_of(subject, subject.drafts, OURS[method], way), prompts, sizes.new)
    row, found = text_row(write)
    right = [subject.text(prompt, sizes.new) for prompt in prompts]
    return row | {"right": sum(own == known for own, known in zip(found, right, strict=True))}


def _written(decoder: SpeculativeDecoder, prompts: Ids, new: int) -> Ids:
    return [result.token_ids for result in decoder.generate(prompts, max_new_tokens=new, do_sample=False)]
