"""The plan of a comparison: the checked arguments, the jobs in order, and the settings that all figures share.

Knows: prompts and their sets, the machine.  Does not know: how anything is measured or kept.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specinfer import loading
from specinfer.common.files import weights_digest
from specinfer.common.values import checked_count, checked_flag, checked_names, checked_temperature
from specinfer.common.versions import versions
from specinfer.errors import InputError
from specinfer.evaluation.compare.methods import METHODS
from specinfer.evaluation.compare.prompts import read_prompt_file
from specinfer.evaluation.paper_figures import ALL
from specinfer.evaluation.provenance import machine
from specinfer.prompts import OnePrompt

TEXTS = "texts"  # the set of prompts that were given as text


class Job(NamedTuple):
    """One prompt at one temperature."""

    number: int  # in the order of the work
    set: str
    seed: int  # the prompt's index in its set
    id: str
    prompt: OnePrompt
    temperature: float

    @property
    def key(self) -> tuple[str, int, float]:
        """The key that tells it from the others of a comparison, and its record from theirs."""
        return self.set, self.seed, self.temperature

    @property
    def where(self) -> dict[str, object]:
        """The fields of its record that name it."""
        return {"set": self.set, "place": self.seed, "id": self.id, "temperature": self.temperature}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The arguments of `compare`; its docstring describes them.

    Raises:
        InputError: a value of a wrong type or size, an unknown method, or the same set twice.
    """

    prompts: list[str | Path]
    target: str | None
    drafts: list[str]
    methods: list[str]
    assistant: str | None
    temperatures: list[float]
    nodes: int
    depth: int
    max_new_tokens: int
    count: int
    split: str
    dtype: str
    device: str
    hits: bool
    max_rows: int

    def __post_init__(self) -> None:
        for name, least in (("count", 0), ("max_new_tokens", 2), ("nodes", 1), ("depth", 1), ("max_rows", 1)):
            checked_count(name, getattr(self, name), least, "leaves nothing to compare")
        for name in ("prompts", "drafts", "methods"):
            checked_names(name, *getattr(self, name))
        for name in ("target", "assistant", "split", "dtype", "device"):
            checked_names(name, *[value for value in [getattr(self, name)] if value is not None])
        checked_flag("hits", self.hits)
        for temperature in self.temperatures:
            checked_temperature(temperature)
        for name in self.methods:
            if name not in METHODS:
                raise InputError(f"method {name!r} is unknown: choose among {', '.join(METHODS)}")
        sets = [*(path.stem for path in self.files), *([TEXTS] if self.texts else [])]
        if ALL in sets:
            raise InputError(f"a set of prompts is called {ALL!r}, as all of them together are: rename its file")
        for name, values in (("prompts", sets), ("methods", self.methods), ("temperatures", self.temperatures)):
            if not values or len(set(values)) < len(values):
                raise InputError(f"{name} {list(values)}: give at least one, and none twice")

    @property
    def files(self) -> list[Path]:
        """The prompt files."""
        return [prompt for prompt in self.prompts if isinstance(prompt, Path)]

    @property
    def texts(self) -> list[str]:
        """The prompts that were given as text."""
        return [prompt for prompt in self.prompts if not isinstance(prompt, Path)]

    def sets(self) -> dict[str, list[tuple[str, OnePrompt]]]:
        """Return set -> (id, prompt), read from the files; texts are a set of their own.

        Raises:
            InputError: a file is unusable (`read_prompt_file`), or a text was meant as a file.
        """
        sets = {path.stem: read_prompt_file(path, self.split, self.count) for path in self.files}
        for number, text in enumerate(self.texts, 1):
            if text.endswith(".jsonl") and len(text.split()) == 1:
                raise InputError(
                    f"prompt {number} is {text!r}, which looks like a file: give it as pathlib.Path, or --prompts"
                )
            sets.setdefault(TEXTS, []).append((str(number), text))
        return sets

    def jobs(self) -> list[Job]:
        """Return the work in order: the first prompt of every set, then the second, so that sets fill up together."""
        sets = self.sets()
        order = [
            (name, index, *prompts[index], temperature)
            for index in range(max(map(len, sets.values())))
            for name, prompts in sets.items()
            if index < len(prompts)
            for temperature in self.temperatures
        ]
        return [Job(number, *job) for number, job in enumerate(order)]

    def blocks(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Return the jobs, `max_rows` of one temperature at a time, in order.

        They do not depend on what is done already, so that a run that goes on decodes the same rows together.
        """
        columns = [[job for job in jobs if job.temperature == temperature] for temperature in self.temperatures]
        rows = self.max_rows
        blocks = [column[start : start + rows] for column in columns for start in range(0, len(column), rows)]
        return sorted(blocks, key=lambda block: block[0].number)

    def settings(self, jobs: Sequence[Job]) -> dict[str, object]:
        """Return the settings that all figures of one folder share, JSON-ready: models, methods, prompts, machine."""
        device, target = loading.resolve_device(self.device), self.target or loading.DEFAULT_TARGET
        named = {name: loading.local_folder(name) for name in (target, *self.drafts, self.assistant) if name}
        digests = {
            name: hashlib.sha256(json.dumps([job.prompt for job in jobs if job.set == name]).encode()).hexdigest()[:16]
            for name in dict.fromkeys(job.set for job in jobs)
        }
        same = ("assistant", "methods", "nodes", "depth", "max_new_tokens", "temperatures", "count", "hits", "max_rows")
        return {
            "target": target,
            "drafts": self.drafts or "default",
            "weights": {name: weights_digest(folder) for name, folder in named.items() if folder is not None},
            "dtype": str(loading.resolve_dtype(self.dtype, device)).removeprefix("torch."),
            **{name: getattr(self, name) for name in same},
            "prompts": digests,
            **machine(device),
            **versions(),
        }
