"""All that is measured on a GPU, in one command of minutes: tests, ids, speed, the bound, host waits; in one file.

    python benchmarks/gpu.py --out DIR [--minutes 9] [--bandwidth 4.8e12] [--assistant DIR] [--target DIR --draft NAME]
    python benchmarks/gpu.py --out DIR --train 8 --prompts prompts/chat.jsonl  trains a head instead (DIR/train.json)
    python benchmarks/gpu.py --report DIR/gpu.json                          prints tables in Markdown
    python benchmarks/gpu.py --out DIR --tiny                               tiny models, on any machine

`DIR/gpu.json` is written after every case, so a run that is cut keeps what it has.  What did not fit into the time or
the memory, or failed, is named in "left_out".  Phases: the tests marked cuda; ids with and without speculation and
graphs; the default pair; targets of real shapes (`targets`).  Where the default target is not at hand, a random model
of its shape and a noisy copy stand in for the pair.

The bound is the bytes of the weights that a pass reads over the bandwidth, which is that of a copy, or --bandwidth.
"no kernel" is the share of a step without a kernel: one minus the time of its kernels.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from importlib.metadata import version
from itertools import product
from math import nan
from pathlib import Path
from typing import Any

import torch
from identity import DISTRIBUTIONS, compared, plain_ids
from report import Case, Report, table
from steps import CUDA, Ids, Row, bandwidth, generate_row, pass_times, steps_row, weight_bytes
from targets import SHAPES, TINY, Subject, pair, shape, unread

from specinfer import BestFirst, Chain, SpeculativeDecoder
from specinfer.errors import InputError

ROOT = Path(__file__).parent.parent
GRAPHS = (False, True) if CUDA else (False,)
NULL = None if CUDA else "no CUDA device: no graphs; host waits, kernels and peak memory are null"
CHAIN = 8  # levels
TABLES = {  # and the columns that are printed
    "tests": ("passed", "failed", "error", "skipped", "names", "finished"),
    "identity": (
        *("target", "dtype", "distribution", "method", "batch", "graphs", "prompts", "equal"),
        "top2_gap_where_different",
    ),
    "speed": (
        *("target", "method", "batch", "context", "graphs", "tokens_per_second", "x plain", "x generate"),
        *("tokens_per_pass", "ms_per_step", "of_bound", "no_kernel_share", "host_waits_per_step", "peak GB"),
    ),
    "passes": ("target", "batch", "context", "graphs"),
    "train": ("out", "texts", "tokens"),
    "left_out": ("phase", "case", "reason"),
}


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    shapes: dict[str, Any]
    batches: tuple[int, ...] = (1, 4, 16)
    contexts: tuple[int, ...] = (512, 4096, 16384)  # tokens before the first new one
    nodes: tuple[int, ...] = (16, 64, 256)  # of best-first trees
    fed: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of the passes that are timed alone
    steps: int = 20
    new_tokens: int = 48
    prompts: int = 4  # whose ids are compared
    dtype: str = "bfloat16"


REAL = Sizes({name: config for name, config in SHAPES.items() if name != "SmolLM2-135M"})
SMALL = Sizes(TINY, (1, 3), (32,), (8,), (1, 8), 8, 8, 2)


# ---- tests and training, in processes of their own ----


def test_cases(log: Path, left: Callable[[], float]) -> Iterator[Case]:
    """Run the tests marked cuda; if the time ends before they do, those that are over count."""

    def measure() -> list[Row]:
        files = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.cuda" in path.read_text()]
        command = [sys.executable, "-u", "-P", "-m", "pytest", "-v", "-m", "cuda", *map(str, files)]
        finished = True
        with log.open("w") as printed:
            try:
                subprocess.run(command, cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT, timeout=left())
            except subprocess.TimeoutExpired:
                finished = False
        outcomes = re.findall(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", log.read_text(), re.MULTILINE)
        counts = Counter(outcome.lower() for _, outcome in outcomes)
        names = [name for name, outcome in outcomes if outcome in ("FAILED", "ERROR")]
        counted = {name: counts[name] for name in ("passed", "failed", "error", "skipped")}
        return [{**counted, "names": names, "finished": finished}]

    yield Case("pytest -m cuda", "tests", measure)


def train_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Train a head with the public command, which keeps its text and checkpoints, and goes on with them if repeated."""

    def measure() -> list[Row]:
        options = ["--out", str(args.out / "train"), "--time", str(args.train), "--drafts", "1", "--json"]
        options += [part for file in args.prompts for part in ("--prompts", str(file))]
        options += ["--target", args.target] if args.target else []
        command = [sys.executable, "-P", "-m", "specinfer", "distill", *options]
        return [json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)]

    yield Case("distill", "train", measure)


# ---- ids ----


def identity_cases(made: Callable[[str], Subject], new_tokens: int, count: int) -> Iterator[Case]:
    """Compare ids with those of decoding without speculation: each prompt alone, and a ragged batch."""
    options = {name: {"max_new_tokens": new_tokens, "seed": 7, **DISTRIBUTIONS[name]} for name in ("greedy", "T=1")}
    trees = {"plain": None, "chain": Chain(CHAIN), "best-first": BestFirst(16, CHAIN)}

    @cache
    def reference(dtype: str, mode: str) -> Ids:
        plain = SpeculativeDecoder(made(dtype).model, made(dtype).tokenizer, [], None)
        prompts = made(dtype).prompts(count, 0)
        return [plain_ids(plain, plain.target.model, prompt, mode, options[mode]) for prompt in prompts]

    def measure(dtype: str, mode: str, graphs: bool, method: str, batch: int) -> list[Row]:
        subject = made(dtype)
        decoder = SpeculativeDecoder(subject.model, subject.tokenizer, subject.drafts, trees[method], graphs=graphs)
        prompts = subject.prompts(count, 0)
        groups = [prompts[start : start + batch] for start in range(0, count, batch)]
        results = [result for group in groups for result in decoder.generate(group, **options[mode])]
        line = compared(subject.model, mode, method, results, reference(dtype, mode))
        return [{"target": subject.name, "dtype": dtype, "batch": batch, "graphs": graphs, **line}]

    for dtype, mode, graphs, method, batch in product(("float32", "bfloat16"), options, GRAPHS, trees, (1, count)):
        label = f"{dtype}, {mode}, {method}, batch {batch}{', graphs' * graphs}"
        yield Case(label, "identity", partial(measure, dtype, mode, graphs, method, batch))


# ---- speed ----


@dataclass(frozen=True)
class Speed:
    """One target, measured in all ways; it is made when the first one is.

    Attributes:
        made: returns the target and its drafts.
        sizes: what is measured.
        rate: bytes a second.
        trees: our methods.
        theirs: transformers' methods; but the first one, for single rows only.
    """

    made: Callable[[], Subject]
    sizes: Sizes
    rate: float
    trees: dict[str, Any]
    theirs: Sequence[str] = ("generate",)

    def cases(self) -> Iterator[Case]:
        """Small batches and contexts come first."""
        grid = product(enumerate(self.sizes.batches), enumerate(self.sizes.contexts))
        for (_, batch), (_, context) in sorted(grid, key=lambda cell: (cell[0][0] + cell[1][0], cell)):
            label = f"batch {batch}, context {context}"
            for method in self.theirs if batch == 1 else self.theirs[:1]:
                yield Case(f"{method}, {label}", "speed", partial(self.generated, method, batch, context))
            for graphs in GRAPHS:
                where = f"{label}{', graphs' * graphs}"
                for method in self.trees:
                    yield Case(f"{method}, {where}", "speed", partial(self.decoded, method, batch, context, graphs))
                yield Case(f"passes, {where}", "passes", partial(self.passes, batch, context, graphs))

    def decoded(self, method: str, batch: int, context: int, graphs: bool) -> list[Row]:
        """Measure our decoder."""
        subject, tree = self.made(), self.trees[method]
        decoder = SpeculativeDecoder(subject.model, subject.tokenizer, subject.drafts, tree, graphs=graphs)
        prompts = subject.prompts(batch, context)
        row, ids = steps_row(decoder, prompts, self.sizes.steps, subject.prepared())
        bound = 1e3 * weight_bytes(subject.model) / self.rate
        row |= {"bound_ms": bound, "of_bound": bound / row["ms_per_step"]}
        return [_placed(subject, method, prompts, graphs) | row | {"right": _right(subject, prompts, ids)}]

    def generated(self, method: str, batch: int, context: int) -> list[Row]:
        """Measure transformers' generate."""
        subject = self.made()
        if method == "assisted" and subject.assistant is None:
            raise InputError("no assistant was given: name one with --assistant")
        assisted = {"assistant_model": subject.assistant}
        extra = {"generate": {}, "lookup": {"prompt_lookup_num_tokens": 10}, "assisted": assisted}[method]
        prompts, held = subject.prompts(batch, context), partial(subject.held, batch, context)
        row, ids = generate_row(subject.model, prompts, self.sizes.new_tokens, held, **extra)
        return [_placed(subject, method, prompts, False) | row | {"right": _right(subject, prompts, ids)}]

    def passes(self, batch: int, context: int, graphs: bool) -> list[Row]:
        """Measure target passes alone."""
        subject = self.made()
        times = pass_times(subject.model, batch, context, graphs, self.sizes.fed, unread())
        return [{"target": subject.name, "batch": batch, "context": context, "graphs": graphs, "ms": times}]


def _placed(subject: Subject, method: str, prompts: Ids, graphs: bool) -> Row:
    """Return what a row is of."""
    where = {"batch": len(prompts), "context": max(map(len, prompts)), "graphs": graphs}
    return {"target": subject.name, "method": method, **where}


def _right(subject: Subject, prompts: Ids, ids: Ids) -> bool | None:
    """Return whether the texts are those that must follow; None where these are not known."""
    pairs = list(zip(prompts, ids, strict=True))
    return all(own == subject.text(prompt, len(own)) for prompt, own in pairs) if subject.text else None


# ---- tables ----


def tables(data: Row) -> str:
    """Return the file's rows as tables in Markdown."""
    base = {name: _rates(data["speed"], name) for name in ("plain", "generate")}
    speed = [
        row
        | {f"x {name}": row["tokens_per_second"] / rates.get(_cell(row), nan) for name, rates in base.items()}
        | {"peak GB": (row.get("peak_bytes") or nan) / 1e9}
        for row in data["speed"]
    ]
    passes = [row | {f"{nodes} nodes": ms for nodes, ms in row["ms"].items()} for row in data["passes"]]
    rows = data | {"speed": speed, "passes": passes}
    sizes = [name for name in (passes[0] if passes else ()) if name.endswith("nodes")]
    columns = TABLES | {"passes": (*TABLES["passes"], *sizes)}
    rate = f"{data['bandwidth'] / 1e9:.0f} GB/s"
    parts = [f"{data['device']}, torch {data['torch']}, {rate}; {data['failures']} cases failed"]
    return "\n\n".join(parts + [table(name, rows[name], columns[name]) for name in TABLES if rows[name]])


def _rates(rows: Sequence[Row], method: str) -> dict[Any, float]:
    """Return the tokens a second of a method, without graphs."""
    return {_cell(row): row["tokens_per_second"] for row in rows if row["method"] == method and not row["graphs"]}


def _cell(row: Row) -> tuple[Any, ...]:
    return row["target"], row["batch"], row["context"]


# ---- all ----


def measure_all(args: argparse.Namespace, sizes: Sizes) -> Row:
    """Run the phases; return the file's content."""
    args.out.mkdir(parents=True, exist_ok=True)
    rate = args.bandwidth or bandwidth(1 << (20 if args.tiny else 32))
    device = torch.cuda.get_device_name() if CUDA else "CPU"
    versions = {name: version(name) for name in ("torch", "transformers", "specinfer")}
    facts = {"device": device, **versions, "bandwidth": rate, "acceptance": args.acceptance, "null": NULL}
    report = Report(args.out / ("train.json" if args.train else "gpu.json"), 60 * args.minutes, TABLES, **facts)
    if args.train:
        report.phase("train", 1.0, train_cases(args))
        return report.data
    made = lru_cache(1)(lambda dtype: pair(args.target, args.draft, args.assistant, dtype, args.tiny))
    report.phase("tests", 0.15, test_cases(args.out / "tests.log", report.left))
    report.phase("identity", 0.12, identity_cases(made, sizes.new_tokens, sizes.prompts))
    trees = {"plain": None, f"chain {CHAIN}": Chain(CHAIN)}
    trees |= {f"tree {nodes}": BestFirst(nodes, 2 * nodes.bit_length()) for nodes in sizes.nodes}
    alone = replace(sizes, contexts=sizes.contexts[:1])  # its prompts are as long as they are
    ways = ("generate", "lookup", "assisted")
    report.phase("pair", 0.13, Speed(partial(made, sizes.dtype), alone, rate, trees | {"auto": "auto"}, ways).cases())
    made.cache_clear()
    for name, config in sizes.shapes.items():
        subject = cache(partial(shape, name, config, sizes.dtype, args.acceptance))
        report.phase(name, 0.6 / len(sizes.shapes), Speed(subject, sizes, rate, trees).cases())
    return report.data


def main() -> None:
    """Measure, or print the tables of a file."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, help="a folder")
    p.add_argument("--minutes", type=float, default=9.0)
    p.add_argument("--bandwidth", type=float, help="of the memory, in bytes a second; default: measured")
    p.add_argument("--acceptance", type=float, default=0.7, help="of the draft that agrees")
    p.add_argument("--target", help="of the pair; default SmolLM2-135M-Instruct")
    p.add_argument("--draft", action="append", default=[], help="of the pair; repeat to merge")
    p.add_argument("--assistant", help="of transformers' assisted generation")
    p.add_argument("--train", type=float, metavar="MINUTES", help="train a head for the pair's target instead")
    p.add_argument("--prompts", nargs="+", type=Path, default=[], help="of --train, JSON lines")
    p.add_argument("--tiny", action="store_true", help="tiny models")
    p.add_argument("--report", type=Path, help="a file that was written before")
    args = p.parse_args()
    if not args.report and not args.out:
        p.error("give a folder, --out, or a file to read, --report")
    if args.train and not args.prompts:
        p.error("--train learns from text that the target writes: give --prompts")
    data = json.loads(args.report.read_text()) if args.report else measure_all(args, SMALL if args.tiny else REAL)
    print(tables(data))
    sys.exit(int(data["failures"] > 0))


if __name__ == "__main__":
    main()
