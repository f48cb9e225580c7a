"""Methods side by side on one machine, prompt by prompt, into a folder that a killed run continues.

    from pathlib import Path
    from specinfer import compare
    print(compare([Path("code.jsonl"), "Why is the sky blue?"], methods=["autoregressive", "sequence", "tree"]))

Knows: the order of the work.
Does not know: what the work is (`plan`), models (`runner`), how a method decodes (`methods`), how a folder is kept
(`files`), what the counts amount to (`report`, `result`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specinfer.common.files import locked
from specinfer.common.values import checked_names, plain
from specinfer.evaluation.compare.files import append, begin
from specinfer.evaluation.compare.plan import Job, Plan
from specinfer.evaluation.compare.result import Comparison
from specinfer.evaluation.compare.runner import Runner

__all__ = ["Comparison", "compare"]

Progress = Callable[[list[Job], int], Iterator[Job]]  # (jobs left, jobs done) -> the jobs, one by one


def compare(
    prompts: str | Path | Sequence[str | Path],
    *,
    target: str | None = None,
    drafts: str | Sequence[str] = (),
    methods: Sequence[str] = ("autoregressive", "sequence", "tree", "assisted", "prompt-lookup"),
    assistant: str | None = None,
    temperatures: Sequence[float] = (0.0,),
    nodes: int = 16,
    depth: int = 8,
    max_new_tokens: int = 64,
    count: int = 5,
    split: str = "dev",
    out: str | Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
    hits: bool = False,
    progress: Progress = lambda jobs, _: iter(jobs),
) -> Comparison:
    """Run every method on every prompt, interleaved, and compare.

    Args:
        prompts: strings are prompts; paths are files of JSON lines with "prompt", and optionally "id" and "split", each
            a set that is named by the file's stem.
        target: hub name or folder; None is the default target.
        drafts: names as the command line takes them; none means the default.
        methods: names of `methods.METHODS`.  Those that cannot run for this pair are left out, with the reason.
        assistant: a small language model for transformers' assisted generation; None takes a draft that is one.
        temperatures: 0 is greedy; others sample from the whole distribution (top_k 0, top_p 1), our methods coupled to
            the seed.
        nodes: drafted nodes at most, of every fixed tree.
        depth: levels at most, of every fixed tree and of the sequence: as many draft passes a step at most.
        max_new_tokens: per prompt.
        count: prompts per file at most, from its top.
        split: the rows that are taken, where rows have a "split".
        out: folder for the records; one of the same settings and machine is continued.  None keeps none.
        dtype, device: as `models.load`.
        hits: also count how often each draft ranks the target's choice high, in one more plain run per prompt.
        progress: wraps the jobs, for a bar.

    Raises:
        InputError: a prompt file or prompt is unusable or too long, no method can run, or the folder belongs to other
            settings or another run, or cannot be written.
        ModelError: a model cannot be loaded; and what decoding raises.  The folder keeps what was finished.
    """
    checked_names("out", "" if out is None else out)
    plan = Plan(
        prompts=_listed(prompts),
        target=target,
        drafts=_listed(drafts),
        methods=_listed(methods),
        assistant=assistant,
        temperatures=_listed(temperatures),
        nodes=plain(nodes),
        depth=plain(depth),
        max_new_tokens=plain(max_new_tokens),
        count=plain(count),
        split=split,
        dtype=dtype,
        device=device,
        hits=plain(hits),
    )
    with nullcontext(out) if out is not None else TemporaryDirectory() as folder, locked(folder):
        return _run(plan, Path(folder), progress)


def _run(plan: Plan, folder: Path, progress: Progress) -> Comparison:
    """Measure what the folder does not hold yet, appending each finished prompt to it."""
    jobs = plan.jobs()
    settings = plan.settings(jobs)
    records = begin(folder, settings)
    done = {(record["set"], record["place"], record["temperature"]) for record in records}
    left = [job for job in jobs if (job.set, job.place, job.temperature) not in done]
    if left:
        runner = Runner(plan, left)
        for job in progress(left, len(records)):
            records.append(runner.measure(job))
            append(folder, records[-1])
    return Comparison(settings, records)


def _listed(values: Any) -> list[Any]:
    """Return values as a list; one may stand alone."""
    own = plain(values)
    return list(own) if isinstance(own, list | tuple) else [own]
