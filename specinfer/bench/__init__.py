"""The benchmark: methods side by side on one machine, prompt by prompt, into a file that a killed run continues.

Knows: the settings and the order of the work.
Does not know: how files are kept (`files`), how a method decodes (`methods`), what the counts amount to (`report`).

The file is JSON lines.  The first holds the settings; each other one is a prompt at one temperature, with the counts
and seconds of every method, and how often each draft ranked the target's choice high.
"""

import hashlib
import logging
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specinfer import models
from specinfer.bench.files import append, begin, opened, read_prompts, read_results
from specinfer.bench.methods import (
    DEPTH,
    METHODS,
    OURS,
    HitRates,
    Method,
    build_methods,
    generation_options,
)
from specinfer.bench.report import summarise, tables
from specinfer.decoder import SpeculativeDecoder
from specinfer.errors import InputError
from specinfer.tree import BestFirst

__all__ = ["Plan", "bench", "read_results", "summarise", "tables"]

log = logging.getLogger(__name__)


class Job(NamedTuple):
    """One prompt at one temperature."""

    number: int  # in the order of the work
    set: str
    place: int  # in its set, from 0; also the seed
    id: str
    prompt: str
    temperature: float


@dataclass(frozen=True)
class Plan:
    """What is compared, on what.

    Args:
        prompts: files of JSON lines with "prompt", and optionally "id" and "split"; a set is named by its file's stem.
        target: hub name or folder; None is the default target.
        drafts: names as the command line takes them; none means the default.
        assistant: a small language model for transformers' assisted generation; without one that method is left out.
        count: prompts per set at most, from the top of the file.
        split: the rows that are taken, where rows have a "split".
        max_new_tokens: per prompt.
        temperatures: 0 is greedy; others sample from the whole law (top_k 0, top_p 1).
        methods: names of `METHODS`.
        nodes: drafted nodes at most, of every fixed tree.
        hits: also count each draft's hits, in one more plain run per prompt.
        dtype, device: as `models.load`.

    Raises:
        InputError: a count that is none, an unknown method.
    """

    prompts: Sequence[Path]
    target: str | None = None
    drafts: Sequence[str] = ()
    assistant: str | None = None
    count: int = 10
    split: str = "dev"
    max_new_tokens: int = 128
    temperatures: Sequence[float] = (0.0, 1.0)
    methods: Sequence[str] = ("plain", "auto", "best-first", "generate", "assisted", "prompt-lookup", "gate")
    nodes: int = 32
    hits: bool = True
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("max_new_tokens", 2), ("nodes", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name}={getattr(self, name)} leaves nothing to compare: give at least {least}")
        for name in self.methods:
            if name not in METHODS:
                raise InputError(f"method {name!r} is unknown: choose among {', '.join(METHODS)}")
        for name in ("prompts", "methods", "temperatures"):
            values = [path.stem for path in self.prompts] if name == "prompts" else getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise InputError(f"{name} {list(values)}: give at least one, and none twice")
        if not self.runnable():
            raise InputError("the one method is assisted generation, and no assistant was given: name a small model")
        if not all(0 <= temperature < float("inf") for temperature in self.temperatures):
            raise InputError(f"temperatures {list(self.temperatures)}: 0 is greedy, others must be positive and finite")

    def sets(self) -> dict[str, list[tuple[str, str]]]:
        """Return set -> (id, prompt), read from the files."""
        return {path.stem: read_prompts(path, self.split)[: self.count] for path in self.prompts}

    def jobs(self) -> list[Job]:
        """Return the work in order: the first prompt of every set, then the second, so that sets fill up together."""
        sets = self.sets()
        order = [
            (name, place, *prompts[place], temperature)
            for place in range(max(map(len, sets.values())))
            for name, prompts in sets.items()
            if place < len(prompts)
            for temperature in self.temperatures
        ]
        return [Job(number, *rest) for number, rest in enumerate(order)]

    def runnable(self) -> list[str]:
        """Return the methods that can run: assisted generation needs an assistant."""
        return [name for name in self.methods if name != "assisted" or self.assistant]

    def settings(self, jobs: Sequence[Job]) -> dict[str, Any]:
        """Return everything that figures of one file have in common, JSON-ready: models, methods, prompts, machine."""
        device = models.resolve_device(self.device)
        digests = {
            name: hashlib.sha256("\n".join(job.prompt for job in jobs if job.set == name).encode()).hexdigest()[:16]
            for name in dict.fromkeys(job.set for job in jobs)
        }
        return {
            "target": self.target or models.DEFAULT_TARGET,
            "drafts": list(self.drafts) or "default",
            "assistant": self.assistant,
            "dtype": str(models.resolve_dtype(self.dtype, device)).removeprefix("torch."),
            "methods": self.runnable(),
            "nodes": self.nodes,
            "max_new_tokens": self.max_new_tokens,
            "temperatures": list(self.temperatures),
            "count": self.count,
            "prompts": digests,
            "hits": self.hits,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            **{package: version(package) for package in ("specinfer", "torch", "transformers")},
        }


Progress = Callable[[list[Job], int], Iterator[Job]]  # (jobs left, jobs done) -> the jobs, one by one


def bench(plan: Plan, out: Path, progress: Progress = lambda jobs, _: iter(jobs)) -> None:
    """Measure what the file does not hold yet, appending each finished prompt to it.

    Args:
        plan: what to compare.
        out: the file; one of the same plan and machine is continued.
        progress: wraps the jobs, for a bar.

    Raises:
        InputError: a prompt file or prompt is unusable, or the file belongs to other settings or cannot be written.
        ModelError: a model cannot be loaded; and what decoding raises.  The file keeps what was finished.
    """
    jobs = plan.jobs()
    for name in plan.methods:
        if name not in plan.runnable():
            log.warning("%s is left out: no assistant was given", name)
    done = begin(out, plan.settings(jobs))
    left = [job for job in jobs if (job.set, job.place, job.temperature) not in done]
    if not left:
        return
    runner = _Runner(plan, left)
    with opened(out) as file:
        for job in progress(left, len(jobs) - len(left)):
            append(file, runner.measure(job))


class _Runner:
    """Loaded models and methods, warmed up."""

    def __init__(self, plan: Plan, jobs: Sequence[Job]) -> None:
        self.plan = plan
        options: dict[str, Any] = {"drafts": plan.drafts} if plan.drafts else {}
        options |= {"tree": BestFirst(plan.nodes, DEPTH), "dtype": plan.dtype, "device": plan.device}
        self.decoder = SpeculativeDecoder.from_pretrained(plan.target, **options)
        temperatures = dict.fromkeys(job.temperature for job in jobs)
        self.methods = self._methods(temperatures)  # by temperature: "auto" learns, and greedy and sampled text differ
        self.hit_rates = HitRates(self.decoder) if plan.hits else None
        self.ids = {job: self._encoded(job) for job in jobs}
        for temperature, methods in self.methods.items():
            for method in methods.values():
                self._run(method, next(job for job in jobs if job.temperature == temperature))

    def measure(self, job: Job) -> dict[str, Any]:
        """Return the record of one job: every method in turn, none always first."""
        methods = self.methods[job.temperature]
        names = list(methods)
        first = job.number % len(names)
        records = {name: self._run(methods[name], job) for name in (*names[first:], *names[:first])}
        ids = {name: record.pop("ids") for name, record in records.items()}
        for name in names if "plain" in ids else ():
            if name in OURS or job.temperature == 0:  # transformers draws other tokens from other noise
                records[name]["same_as_plain"] = common_prefix(ids[name], ids["plain"])
        hits = {"hits": self._run(self.hit_rates.count, job)} if self.hit_rates else {}
        told = {"set": job.set, "place": job.place, "id": job.id, "temperature": job.temperature}
        return {**told, "prompt_tokens": len(self.ids[job]), "methods": {n: records[n] for n in names}, **hits}

    def _methods(self, temperatures: Iterable[float]) -> dict[float, dict[str, Method]]:
        names, assistant = self.plan.runnable(), None
        if "assisted" in names:
            loaded = models.load(self.plan.assistant, self.plan.dtype, self.plan.device)
            models.same_tokens(self.decoder.tokenizer, loaded.tokenizer)
            assistant = loaded.model
        return {t: build_methods(names, self.decoder, self.plan.nodes, assistant) for t in temperatures}

    def _run(self, method: Callable[..., Any], job: Job) -> Any:
        return method(self.ids[job], job.place, generation_options(job.temperature, self.plan.max_new_tokens))

    def _encoded(self, job: Job) -> list[int]:
        """Return the prompt's ids, or say which prompt does not fit."""
        try:
            return self.decoder.open(job.prompt, max_new_tokens=self.plan.max_new_tokens, seed=0).rows[0].ids
        except InputError as error:
            raise InputError(f"prompt {job.id} of {job.set}: {error}") from error


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two texts share from their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
