"""Models and methods at work: one record per prompt and temperature, every method in turn.

Knows: what is compared with what, and in which order.  Does not know: files, how a method decodes (`methods`).
"""

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from specinfer import loading
from specinfer.common.records import Record
from specinfer.decoder import SpeculativeDecoder
from specinfer.engine.options import Options
from specinfer.engine.sampling import whole_distribution
from specinfer.errors import InputError, one_line
from specinfer.evaluation.compare.methods import OURS, THEIRS, HitRates, Method, build_methods
from specinfer.evaluation.compare.plan import Job, Plan
from specinfer.tree import BestFirst

log = logging.getLogger(__name__)


class Prompted(NamedTuple):
    """A job whose prompt can be used."""

    job: Job
    ids: list[int]


class Runner:
    """Loaded models and methods.

    Args:
        plan: of the comparison.

    Raises:
        ModelError: a model cannot be loaded, or a draft has other tokens than the target.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        tree = BestFirst(plan.nodes, plan.depth)
        self.decoder = SpeculativeDecoder.from_pretrained(
            plan.target, plan.drafts or "auto", tree, dtype=plan.dtype, device=plan.device
        )
        self.hit_rates = HitRates(self.decoder) if plan.hits else None
        self.assistant = None
        if "assisted" in plan.methods and plan.assistant is not None:
            self.assistant = loading.load(plan.assistant, plan.dtype, plan.device)
        self.skipped: dict[str, str] = {}  # method -> why it cannot run
        self.methods: dict[float, dict[str, Method]] = {}  # by temperature: "auto" learns, and texts differ

    def measure(self, jobs: Sequence[Job]) -> list[Record]:
        """Return the records of jobs of one temperature: every method in turn, none always first.

        Before the first ones every method runs once, at every temperature, without being measured.

        Raises:
            InputError: no method can run.
        """
        read = [self._read(job) for job in jobs]
        rows = [row for row in read if isinstance(row, Prompted)]
        measured = iter(self._measured(rows) if rows else ())
        return [next(measured) if isinstance(row, Prompted) else row for row in read]

    def _measured(self, rows: Sequence[Prompted]) -> Iterator[Record]:
        """Yield the records of prompts that can be used."""
        job = rows[0].job
        if not self.methods:
            self.methods = self._ready(rows)
        methods, options = self.methods[job.temperature], self._options(job.temperature)
        names = list(methods)
        first = job.number // self.plan.max_rows % len(names)
        found = {name: _run(methods[name], rows, options) for name in (*names[first:], *names[:first])}
        for index, row in enumerate(rows):
            records = {name: found[name][index] for name in names}
            self._compare(row, records, {name: record.pop("ids") for name, record in records.items()})
            yield {
                **row.job.where,
                "prompt_tokens": len(row.ids),
                "methods": records,
                "skipped": self.skipped,
                **({"hits": self.hit_rates.count(row.ids, row.job.seed, options)} if self.hit_rates else {}),
            }

    def _compare(self, row: Prompted, records: dict[str, Record], ids: dict[str, list[int]]) -> None:
        """Note in each record how many ids autoregressive decoding shares, and the gap of the target's choice there."""
        if "autoregressive" not in ids:
            return
        model, reference = self.decoder.target.model, ids["autoregressive"]
        gap = cache(lambda same: top2_gap(model, [*row.ids, *reference[:same]]))
        for name, new in ids.items():
            if name not in OURS and row.job.temperature:  # transformers samples with other noise
                continue
            same = records[name]["same_as_autoregressive"] = common_prefix(new, reference)
            if new != reference and not row.job.temperature:
                records[name]["gap"] = gap(same)

    def _ready(self, rows: Sequence[Prompted]) -> dict[float, dict[str, Method]]:
        """Return the methods that run, by temperature: built, and each tried once."""
        plan, ready = self.plan, {}
        for temperature in plan.temperatures:
            ready[temperature], skipped = build_methods(
                plan.methods, self.decoder, plan.nodes, plan.depth, self.assistant, plan.max_rows
            )
            self.skipped |= skipped | self._refusals(ready[temperature], rows, temperature)
        for name, reason in self.skipped.items():
            log.warning("%s is left out: %s", name, reason)
        ready = {t: {n: run for n, run in methods.items() if n not in self.skipped} for t, methods in ready.items()}
        if not all(ready.values()):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.skipped.items())
            raise InputError(f"none of the methods can run ({reasons}): choose others")
        return ready

    def _refusals(self, methods: dict[str, Method], rows: Sequence[Prompted], temperature: float) -> dict[str, str]:
        """Run each method once, to warm it up; return why transformers refused, where it did."""
        refusals = {}
        for name, method in methods.items():
            try:
                _run(method, rows, self._options(temperature))
            except Exception as error:
                if name not in THEIRS:
                    raise
                refusals[name] = f"transformers refuses: {one_line(error)}"
        return refusals

    def _options(self, temperature: float) -> Options:
        return whole_distribution(temperature, self.plan.max_new_tokens)

    def _read(self, job: Job) -> Prompted | Record:
        """Return a prompt's ids, or the record of one that cannot be used."""
        try:
            ids = self.decoder.read(job.prompt).only
            self.decoder.check_lengths([ids], [self.plan.max_new_tokens])
        except InputError as error:
            log.warning("prompt %s of %s is left out: %s", job.id, job.set, error)
            return {**job.where, "error": f"prompt {job.id} of {job.set}: {error}"}
        return Prompted(job, ids)


def _run(method: Method, rows: Sequence[Prompted], options: Options) -> list[Record]:
    return method([row.ids for row in rows], [row.job.seed for row in rows], options)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two texts share from their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@torch.inference_mode()
def top2_gap(model: PreTrainedModel, ids: Sequence[int]) -> float:
    """Return the gap between the two largest logits after ``ids`` in a plain pass, in logits."""
    first, second = model(input_ids=torch.tensor([list(ids)], device=model.device)).logits[0, -1].float().topk(2).values
    return float(first - second)
