"""Files of prompts in, a folder of results out: any number of prompts, and the same call resumes.

Knows: JSON lines with prompts, the records of a folder.  Does not know: how prompts are decoded a few at a time.

A line of a file is an object with "prompt" (text, chat messages or token ids), and maybe "id" and "options", options of
`SpeculativeDecoder.generate_many` for this prompt alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from specinfer.common.files import locked
from specinfer.common.progress import Progress
from specinfer.common.records import Record, Records
from specinfer.common.values import checked_names
from specinfer.common.versions import versions
from specinfer.decoder import SpeculativeDecoder, row_seeds
from specinfer.engine.scheduler import MAX_ROWS
from specinfer.errors import InputError
from specinfer.evaluation.provenance import machine, models_of
from specinfer.prompts import read_objects

FIELDS = {"number", "file", "line"}  # of every record


class PromptLine(NamedTuple):
    """A line of a file of prompts."""

    number: int  # among all prompts, from 0
    file: str
    line: int  # from 1
    row: Record

    @property
    def where(self) -> Record:
        """What a record says of it."""
        named = {"id": self.row["id"]} if "id" in self.row else {}
        return {"number": self.number, "file": self.file, "line": self.line, **named}

    def asked(self, seed: int) -> Record:
        """Return one of many prompts, as `generate_many` takes it; a line without a prompt is refused in its place."""
        return {"seed": seed + self.number, **self.row.get("options", {}), "prompt": self.row.get("prompt", "")}


@dataclass(frozen=True)
class Summary:
    """What a run over files of prompts did."""

    folder: Path
    prompts: int  # that the folder holds results of
    refused: int  # ... of them, those that have an error in place of a text
    new_prompts: int  # finished in this run
    new_tokens: int  # written in this run
    seconds: float  # of this run

    @property
    def tokens_per_second(self) -> float:
        """Of this run, prompts included; 0 if nothing was left to do."""
        return self.new_tokens / self.seconds if self.new_tokens else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-ready dict."""
        return {**vars(self), "folder": str(self.folder), "tokens_per_second": self.tokens_per_second}

    def __str__(self) -> str:
        """Summarise in a line."""
        speed = f"{self.new_tokens} tokens in {self.seconds:.1f} s ({self.tokens_per_second:.1f} tokens/s)"
        now = f"{self.new_prompts} now, {speed}" if self.new_prompts else "all were finished before"
        refused = f", {self.refused} of them refused (their records say why)" if self.refused else ""
        return f"{self.folder}: {self.prompts} prompts{refused}; {now}"


def read_prompts(files: Sequence[str | Path]) -> list[PromptLine]:
    """Return the lines of files of prompts; whether a prompt can be used is found when it is its turn.

    Raises:
        InputError: a file cannot be read, a line is no object, its options are none, or there is no line.
    """
    found: list[PromptLine] = []
    for path in map(Path, files):
        for line, row in read_objects(path):
            options = row.get("options", {})
            if not isinstance(options, dict) or "prompt" in options:
                raise InputError(f'{path}, line {line}: "options" must be an object such as {{"temperature": 0.7}}')
            found.append(PromptLine(len(found), path.name, line, row))
    if not found:
        raise InputError(f"{', '.join(map(str, files)) or 'no file'}: there are no prompts; write one on each line")
    return found


def generate_files(
    decoder: SpeculativeDecoder,
    prompts: Sequence[PromptLine],
    out: str | Path,
    *,
    max_rows: int = MAX_ROWS,
    seed: int = 0,
    progress: Progress = lambda *_: None,
    **options: Any,
) -> Summary:
    """Generate for every line of files, and write each result to a folder as soon as it is there.

    The folder gets ``records.jsonl``, a line per prompt in the order in which they finish, with "number", "file",
    "line", "id" if there was one, and "text", "token_ids", "finish_reason", "seed" (None if greedy), "prompt_tokens",
    "new_tokens", "target_passes"; or with "error" for a prompt that is refused.  ``settings.json`` says what made it.
    After an interruption the same call resumes: what is in the folder is not made again.

    Args:
        decoder: what decodes.
        prompts: of `read_prompts`.
        out: the folder.
        max_rows: prompts decoded at a time.  In float32 no text depends on it, so it may change when a run goes on.
        seed: of the first prompt; each has one more than the one before it, unless its options say otherwise.
        progress: called with "prompts", how many are done, of how many, and new tokens, once and after each.
        **options: of `SpeculativeDecoder.generate_many`, for all prompts.

    Raises:
        InputError: an option is wrong with every prompt, or cannot be written down; or the folder belongs to other
            settings, another machine or another run, or cannot be written.
        SpecinferError: what decoding raises; the folder keeps what was finished.
    """
    checked_names("out", out)
    first = row_seeds(seed, 1)[0]
    made_by = {**_settings(decoder, prompts, {**options, "seed": first}), **machine(decoder.target.device)}
    with locked(out) as folder:
        records = Records(folder, FIELDS, "a run over prompts")
        records.begin(made_by)
        held = {record["number"]: "error" in record for record in records}  # whether it was refused
        left = [prompt for prompt in prompts if prompt.number not in held]
        rows = (each.asked(first) for each in left)
        found = decoder.generate_many(rows, max_rows=max_rows, **options)
        started, tokens, refused = perf_counter(), 0, sum(held.values())
        progress("prompts", len(held), len(prompts), {"tokens": 0})
        for count, finished in enumerate(found, 1):
            record = left[finished.number].where | finished.to_dict()
            records.append(record)
            tokens, refused = tokens + record.get("new_tokens", 0), refused + ("error" in record)
            progress("prompts", len(held) + count, len(prompts), {"tokens": tokens})
    return Summary(folder, len(prompts), refused, len(left), tokens, perf_counter() - started)


def _settings(
    decoder: SpeculativeDecoder, prompts: Sequence[PromptLine], options: Mapping[str, object]
) -> dict[str, object]:
    """Return what the texts of a folder have in common, JSON-ready."""
    lines = json.dumps([[prompt.file, prompt.line, prompt.row] for prompt in prompts])
    try:
        written = json.loads(json.dumps(dict(options)))
    except TypeError as error:
        raise InputError(f"options of a run over files must be plain values ({error}): leave out functions") from error
    return {
        **models_of(decoder),
        "tree": str(decoder.policy),
        "verifier": str(decoder.verifier),
        "prompts": {"lines": len(prompts), "sha256": sha256(lines.encode()).hexdigest()[:16]},
        "options": written,
        **versions(),
    }
