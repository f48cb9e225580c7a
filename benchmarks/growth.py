"""How speed grows with the batch, the context, the tree and the text, on a CPU: `auto` beside our plain loop.

    python benchmarks/growth.py --prompts prompts/chat.jsonl prompts/code.jsonl [--out out/growth.json]
        [--parts batch context nodes tokens] [--minutes 11] [--target DIR --draft NAME ...] [--dtype float32]
    python benchmarks/growth.py --report growth.json      prints tables in Markdown
    python benchmarks/growth.py --tiny                    a random tiny model, in seconds

Greedy; texts do not end: the end-of-sequence token is suppressed.  The methods take turns within a text, a slice of
some tokens each, so that a noisy minute affects both.  Figures are those after the prompt, over whole texts: tokens a
second of all rows, the median over texts; "auto / plain" is the median ratio, "worst" that of the worst text, "prompt
s" the median seconds to read the prompts.

    batch     rows that are decoded together, other prompts for every text
    context   the prompts joined, or other text, and cut, then a question: as many tokens in all as asked for
    nodes     best-first trees of 8 levels: milliseconds of a step without the passes of target and drafts, the median;
              those of a drafted node in microseconds; and how they grow: the power of the nodes from the row above
    tokens    new tokens of a text, from the first one

The file is written after every case; what did not fit into the time is named in "left_out".
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from common import decoder, print_rows, read_prompts
from report import Case, Report, Row, table
from steps import Ids
from targets import PROMPTS, Subject, pair

from specinfer import BestFirst, SpeculativeDecoder
from specinfer.common.versions import versions
from specinfer.loading import resolve_device, resolve_dtype

FIRST, SECOND = "auto", "plain"
LEVELS = 8
SHARES = {"batch": 0.2, "context": 0.35, "nodes": 0.1, "tokens": 0.35}  # of the time
RATES = "texts", "auto", "plain", "auto / plain", "worst", "tokens/pass"
TABLES = {  # and the columns that are printed
    "batch": ("rows", *RATES),
    "context": ("context", *RATES, "auto prompt s", "plain prompt s"),
    "nodes": ("nodes", "drafted", "host ms", "us a node", "power", "draft ms", "target ms"),
    "tokens": ("new tokens", *RATES),
    "left_out": ("phase", "case", "reason"),
}


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        slice: tokens of a row that a method emits before the other one's turn.
        slices: of a text of batch and context; one more comes first and is not counted.
        texts: of each number of new tokens, and batches; contexts have as many as the longest one holds, at most.
        alone: texts of a batch of one; larger batches have fewer, but not fewer than that.
        steps: of each tree; two more come first.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] = (512, 2048, 4096, 8192)
    nodes: tuple[int, ...] = (8, 32, 128, 512, 1024)
    tokens: tuple[int, ...] = (128, 512, 2048)
    slice: int = 16
    slices: int = 4
    texts: int = 3
    alone: int = 8
    steps: int = 8


REAL = Sizes()
SMALL = Sizes((1, 2), (32, 64), (4, 16), (8, 16), slice=4, slices=2, texts=2, alone=2, steps=2)


class Slice(NamedTuple):
    """What one turn of a method gave."""

    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0  # over rows: a pass over a batch counts once for each

    def __add__(self, other: Any) -> "Slice":
        return Slice(*(a + b for a, b in zip(self, other, strict=True)))


class Race(NamedTuple):
    """One text, or one batch of texts, of every method."""

    slices: dict[str, list[Slice]]
    prompt: dict[str, float]  # seconds to read the prompts

    def rate(self, method: str, last: int | None = None) -> float:
        """Return tokens a second up to a slice."""
        whole = sum(self.slices[method][:last], Slice())
        return whole.tokens / whole.seconds


def race(decoders: dict[str, SpeculativeDecoder], prompts: Ids, stops: Sequence[int], skipped: int = 0) -> Race:
    """Decode prompts with several methods by turns.

    Args:
        decoders: by method; the texts of their target do not end.
        prompts: token ids of each row.
        stops: mean new tokens of a row after which the others have their turn.
        skipped: first slices that do not count.
    """
    budget = 2 * stops[-1]  # rows are not equally fast, and none is to end before the last stop
    tokenizer = decoders[SECOND].tokenizer
    endless = {"suppress_tokens": [tokenizer.eos_token_id]} if tokenizer else {}
    options = {"max_new_tokens": budget, "do_sample": False, **endless}
    runs = {method: made.open(prompts, **options) for method, made in decoders.items()}
    slices: dict[str, list[Slice]] = {method: [] for method in runs}
    for stop in stops:
        for method, run in runs.items():
            done = sum(slices[method], Slice()).tokens
            slices[method].append(_turn(iter(run), len(prompts) * stop - done))
    for run in runs.values():
        run.close()
    return Race(
        {method: found[skipped:] for method, found in slices.items()},
        {method: run.requests[0].spent.seconds.prefill for method, run in runs.items()},
    )


def _turn(steps: Iterator[Any], tokens: int) -> Slice:
    """Take steps until this many tokens were emitted."""
    turn = Slice()
    while turn.tokens < tokens:
        rows = next(steps)
        emitted = sum(len(step.tokens) for _, step in rows)
        turn += Slice(emitted, rows[0][1].seconds.decoding, len(rows))
    return turn


def rates_row(races: Sequence[Race], last: int | None = None) -> Row:
    """Return the figures of texts, each up to a slice."""
    ratios = [one.rate(FIRST, last) / one.rate(SECOND, last) for one in races]
    drafted = sum((turn for one in races for turn in one.slices[FIRST][:last]), Slice())
    methods = list(races[0].slices)
    return {
        "texts": len(races),
        **{method: median(one.rate(method, last) for one in races) for method in methods},
        f"{FIRST} / {SECOND}": median(ratios),
        "worst": min(ratios),
        "ratios": ratios,
        "tokens/pass": drafted.tokens / drafted.passes,
        **{f"{method} prompt s": median(one.prompt[method] for one in races) for method in methods},
    }


@dataclass(frozen=True)
class Growth:
    """One target with its drafts, measured in all ways.

    Attributes:
        subject: the target, its drafts, and prompts that suit long texts.
        texts: prompts for batches.
        long: a text that contexts are cut from.
        sizes: what is measured.
        decoders: by method.
    """

    subject: Subject
    texts: Sequence[str]
    long: str
    sizes: Sizes
    decoders: dict[str, SpeculativeDecoder]

    def ids(self, text: str, raw: bool) -> list[int]:
        """Return a text's token ids; with a chat template, unless raw."""
        if self.subject.tokenizer is None:
            return [byte % self.subject.model.config.vocab_size for byte in text.encode()]
        return self.decoders[SECOND].read(text, raw).rows[0]

    def cases(self, part: str) -> Iterator[Case]:
        """Small sizes come first."""
        parts: dict[str, tuple[Callable[..., list[Row]], Sequence[Any]]] = {
            "batch": (self.batch, self.sizes.batches),
            "context": (self.context, self.sizes.contexts),
            "nodes": (self.nodes, [self.sizes.nodes]),
            "tokens": (self.tokens, [self.sizes.tokens]),
        }
        measure, sizes = parts[part]
        for size in sizes:
            yield Case(f"{part} {size}", part, partial(measure, size))

    def stops(self) -> range:
        """Return the stops of a text, the first slice included."""
        return range(self.sizes.slice, self.sizes.slice * (self.sizes.slices + 1) + 1, self.sizes.slice)

    def batch(self, rows: int) -> list[Row]:
        """Measure a batch of this many rows."""
        prompts = [self.ids(text, raw=False) for text in self.texts]
        groups = [
            [prompts[(number * rows + row) % len(prompts)] for row in range(rows)]
            for number in range(max(self.sizes.texts, self.sizes.alone // rows))
        ]
        return [{"rows": rows, **rates_row([race(self.decoders, group, self.stops(), 1) for group in groups])}]

    def context(self, length: int) -> list[Row]:
        """Measure after a prompt of this many tokens, or of as many as leave room for the text."""
        joined = self.ids(self.long, raw=True)
        room = self.subject.model.config.max_position_embeddings - 2 * self.stops()[-1]
        cut = min(length, room, len(joined))
        count = min(self.sizes.texts, max(1, min(self.sizes.contexts[-1], len(joined)) // length))
        asked = [ids[-cut:] for ids in self.subject.prompts(count, 0)]
        prompts = [joined[i * cut : (i + 1) * cut - len(ids)] + ids for i, ids in enumerate(asked)]
        return [
            {"context": len(prompts[-1]), **rates_row([race(self.decoders, [ids], self.stops(), 1) for ids in prompts])}
        ]

    def tokens(self, counts: Sequence[int]) -> list[Row]:
        """Measure long texts, from their first token."""
        stops = range(self.sizes.slice, counts[-1] + 1, self.sizes.slice)
        prompts = self.subject.prompts(self.sizes.texts, 0)
        races = [race(self.decoders, [ids], stops) for ids in prompts]
        return [{"new tokens": count, **rates_row(races, count // self.sizes.slice)} for count in counts]

    def nodes(self, counts: Sequence[int]) -> list[Row]:
        """Measure steps of trees of several sizes, which take turns step by step."""
        (prompt,), drafts, found = self.subject.prompts(1, 0), self.subject.drafts, dict[int, list[Any]]()
        trees = {
            count: decoder(self.subject.model, self.subject.tokenizer, drafts, BestFirst(count, LEVELS))
            for count in counts
        }
        budget = (LEVELS + 1) * (self.sizes.steps + 3)  # the last trees are as deep as they may be, like all others
        runs = {count: made.open(prompt, max_new_tokens=budget, do_sample=False) for count, made in trees.items()}
        for turn in range(self.sizes.steps + 2):
            for count, run in runs.items():
                step = next(iter(run))[0][1]
                found.setdefault(count, []).extend([step] if turn > 1 else [])
        for run in runs.values():
            run.close()
        rows = [_host_row(count, steps) for count, steps in found.items()]
        for smaller, row in pairwise(rows):
            row["power"] = log(row["host ms"] / smaller["host ms"]) / log(row["drafted"] / smaller["drafted"])
        return rows


def _host_row(nodes: int, steps: Sequence[Any]) -> Row:
    """Return what the host does in steps of one size of tree."""
    names = {"host ms": "bookkeeping", "draft ms": "draft", "target ms": "target"}
    drafted = median(step.tree.num_drafted for step in steps)
    figures = {name: 1e3 * median(getattr(step.seconds, part) for step in steps) for name, part in names.items()}
    return {"nodes": nodes, "drafted": drafted, **figures, "us a node": 1e3 * figures["host ms"] / (drafted or 1)}


def measure(args: argparse.Namespace) -> Row:
    """Measure the parts that were asked for; return the file's content."""
    dtype = "float32" if args.tiny else str(resolve_dtype(args.dtype, resolve_device("auto"))).removeprefix("torch.")
    subject = pair(args.target, args.draft, dtype, args.tiny)
    trees: dict[str, Any] = {FIRST: "auto", SECOND: None}
    decoders = {name: decoder(subject.model, subject.tokenizer, subject.drafts, tree) for name, tree in trees.items()}
    texts = read_prompts(args.prompts, args.count) if args.prompts else PROMPTS
    texts = random.Random(0).sample(texts, len(texts))  # every batch has prompts of all files
    long = [path.read_text() for path in args.context] or texts
    growth = Growth(subject, texts, "\n\n".join(long), SMALL if args.tiny else REAL, decoders)
    facts = {
        "target": subject.name,
        "dtype": dtype,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "passes": decoders[FIRST].passes,
        **versions(),
    }
    report = Report(args.out, 60 * args.minutes, TABLES, **facts)
    whole = sum(SHARES[part] for part in args.parts)
    for part in args.parts:
        report.phase(part, SHARES[part] / whole, growth.cases(part))
    return report.data


def tables(data: Row) -> str:
    """Return the file's rows as tables in Markdown."""
    facts = ", ".join(f"{name} {data[name]}" for name in ("target", "dtype", "cpu", "threads", "torch"))
    parts = [f"{facts}; {data['passes']}; {data['failures']} cases failed"]
    return "\n\n".join(parts + [table(name, data[name], TABLES[name]) for name in TABLES if data[name]])


def main() -> None:
    """Measure, or print the tables of a file."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompts", nargs="+", type=Path, default=[], help='JSON lines with "prompt" and "split"')
    p.add_argument("--count", type=int, default=320, help="prompts in all, split evenly between the files")
    p.add_argument("--context", nargs="+", type=Path, default=[], help="files of text that contexts are cut from")
    p.add_argument("--parts", nargs="+", choices=[*SHARES], default=[*SHARES])
    p.add_argument("--minutes", type=float, default=11.0, help="after which no case begins")
    p.add_argument("--target", help="hub name or folder; default SmolLM2-135M-Instruct")
    p.add_argument("--draft", action="append", default=[], help="repeat to merge")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--out", type=Path, help="a JSON file")
    p.add_argument("--json", action="store_true", help="print a JSON object a row in place of the tables")
    p.add_argument("--tiny", action="store_true", help="a tiny model")
    p.add_argument("--report", type=Path, help="a file that was written before")
    args = p.parse_args()
    if not (args.prompts or args.tiny or args.report):
        p.error("batches and contexts are made of real text: give --prompts")
    data = json.loads(args.report.read_text()) if args.report else measure(args)
    print_rows(row for part in SHARES for row in data[part]) if args.json else print(tables(data))
    sys.exit(int(data["failures"] > 0))


if __name__ == "__main__":
    main()
