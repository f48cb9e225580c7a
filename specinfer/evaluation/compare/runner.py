"""Models and methods at work: one record per prompt and temperature, every method in turn.

Knows: what is compared with what, and in which order.  Does not know: files, how a method decodes (`methods`).
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from specinfer import loading
from specinfer.decoder import SpeculativeDecoder
from specinfer.engine.sampling import whole_distribution
from specinfer.errors import InputError
from specinfer.evaluation.compare.methods import OURS, THEIRS, HitRates, Method, build_methods
from specinfer.evaluation.compare.plan import Job, Plan
from specinfer.tree import BestFirst

log = logging.getLogger(__name__)


class Runner:
    """Loaded models and methods, warmed up.

    Args:
        plan: what is compared.
        jobs: the work that is left; every method runs the first one of each temperature before anything is measured.

    Raises:
        ModelError: a model cannot be loaded, or a draft has other tokens than the target.
        InputError: a prompt is too long for the target, by name; or no method can run.
    """

    def __init__(self, plan: Plan, jobs: Sequence[Job]) -> None:
        self.plan = plan
        options: dict[str, Any] = {"drafts": plan.drafts} if plan.drafts else {}
        options |= {"tree": BestFirst(plan.nodes, plan.depth), "dtype": plan.dtype, "device": plan.device}
        self.decoder = SpeculativeDecoder.from_pretrained(plan.target, **options)
        self.ids = {job: self._encoded(job) for job in jobs}
        self.hit_rates = HitRates(self.decoder) if plan.hits else None
        self.skipped: dict[str, str] = {}  # method -> why it cannot run
        self.methods = self._ready(jobs)  # by temperature: "auto" learns, and greedy and sampled text differ

    def measure(self, job: Job) -> dict[str, Any]:
        """Return the record of one job: every method in turn, none always first."""
        methods = self.methods[job.temperature]
        names = list(methods)
        first = job.number % len(names)
        records = {name: self._run(methods[name], job) for name in (*names[first:], *names[:first])}
        self._compare(job, records, {name: record.pop("ids") for name, record in records.items()})
        return {
            "set": job.set,
            "place": job.seed,
            "id": job.id,
            "temperature": job.temperature,
            "prompt_tokens": len(self.ids[job]),
            "methods": {name: records[name] for name in names},
            "skipped": self.skipped,
            **({"hits": self._run(self.hit_rates.count, job)} if self.hit_rates else {}),
        }

    def _compare(self, job: Job, records: dict[str, dict[str, Any]], ids: dict[str, list[int]]) -> None:
        """Note in each record how many ids autoregressive decoding shares, and the gap of the target's choice there."""
        if "autoregressive" not in ids:
            return
        model, prompt, reference = self.decoder.target.model, self.ids[job], ids["autoregressive"]
        gap = cache(lambda same: top2_gap(model, [*prompt, *reference[:same]]))
        for name, new in ids.items():
            if name not in OURS and job.temperature:  # transformers samples with other noise
                continue
            same = records[name]["same_as_autoregressive"] = common_prefix(new, reference)
            if new != reference and not job.temperature:
                records[name]["gap"] = gap(same)

    def _ready(self, jobs: Sequence[Job]) -> dict[float, dict[str, Method]]:
        """Return the methods that run, by temperature: built, and each tried once."""
        plan, assistant = self.plan, None
        if "assisted" in plan.methods and plan.assistant is not None:
            assistant = loading.load(plan.assistant, plan.dtype, plan.device)
        ready = {}
        for temperature in dict.fromkeys(job.temperature for job in jobs):
            ready[temperature], skipped = build_methods(plan.methods, self.decoder, plan.nodes, plan.depth, assistant)
            job = next(job for job in jobs if job.temperature == temperature)
            self.skipped |= skipped | self._refusals(ready[temperature], job)
        for name, reason in self.skipped.items():
            log.warning("%s is left out: %s", name, reason)
        ready = {t: {n: run for n, run in methods.items() if n not in self.skipped} for t, methods in ready.items()}
        if not all(ready.values()):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.skipped.items())
            raise InputError(f"none of the methods can run ({reasons}): choose others")
        return ready

    def _refusals(self, methods: dict[str, Method], job: Job) -> dict[str, str]:
        """Run each method once, to warm it up; return why transformers refused, where it did."""
        refusals = {}
        for name, method in methods.items():
            try:
                self._run(method, job)
            except Exception as error:
                if name not in THEIRS:
                    raise
                refusals[name] = f"transformers refuses: {' '.join(str(error).split()) or type(error).__name__}"
        return refusals

    def _run(self, method: Callable[..., Any], job: Job) -> Any:
        return method(self.ids[job], job.seed, generation_options(job.temperature, self.plan.max_new_tokens))

    def _encoded(self, job: Job) -> list[int]:
        """Return the prompt's ids, or say which prompt does not fit."""
        try:
            return self.decoder.open(job.prompt, max_new_tokens=self.plan.max_new_tokens, seed=0).rows[0].ids
        except InputError as error:
            raise InputError(f"prompt {job.id} of {job.set}: {error}") from error


def generation_options(temperature: float, max_new_tokens: int) -> dict[str, Any]:
    """Return options that mean the same distribution to every method."""
    return {"max_new_tokens": max_new_tokens, **whole_distribution(temperature)}


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two texts share from their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@torch.inference_mode()
def top2_gap(model: Any, ids: Sequence[int]) -> float:
    """Return the gap between the two largest logits after ``ids`` in a plain pass, in logits."""
    first, second = model(input_ids=torch.tensor([list(ids)], device=model.device)).logits[0, -1].float().topk(2).values
    return float(first - second)
