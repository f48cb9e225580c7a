"""Methods side by side on one machine, prompt by prompt, into a folder from which the same run resumes.

    from pathlib import Path
    from specinfer import compare
    print(compare([Path("code.jsonl"), "Why is the sky blue?"], methods=["autoregressive", "sequence", "tree"]))

Knows: the order of the work.
Does not know: what the work is (`plan`), models (`runner`), how a method decodes (`methods`), how a folder is kept
(`files`), what the counts amount to (`report`, `result`).
"""

from collections.abc import Sequence
from pathlib import Path

from specinfer.common.files import locked
from specinfer.common.progress import Bars, Progress
from specinfer.common.values import checked_names, plain
from specinfer.errors import InputError
from specinfer.evaluation.compare.plan import Plan
from specinfer.evaluation.compare.prompts import records_of
from specinfer.evaluation.compare.result import Comparison
from specinfer.evaluation.compare.runner import Runner

__all__ = ["Comparison", "compare"]

LISTS = ("prompts", "drafts", "methods", "temperatures")  # arguments of which one may stand alone


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
    max_rows: int = 1,
    progress: Progress | None = None,
) -> Comparison:
    """Run every method on every prompt, interleaved, and compare.

    A prompt that cannot be used is reported in its place, and the others go on.  Counts are kept, texts are not.

    Args:
        prompts: strings are prompts.  Paths are files of JSON lines with "prompt", and optionally "id" and "split";
            each file is a set, named by its stem.  A prompt of a file may also be chat messages or token ids.
        target: hub name, folder or GGUF file; None is the default target.
        drafts: names as the command line takes them; none means the default.
        methods: names of `methods.METHODS`.  Those that cannot run for this pair are left out, with the reason.
        assistant: a small language model for transformers' assisted generation; None takes a draft that is one.
        temperatures: 0 is greedy; others sample from the whole distribution (top_k 0, top_p 1).  Our methods sample
            with noise that depends on the seed alone.
        nodes: drafted nodes at most, of every fixed tree.
        depth: levels at most, of every fixed tree and of the sequence.  A step has at most as many draft passes.
        max_new_tokens: per prompt.
        count: prompts per file at most, from its top; 0 is all.
        split: the rows that are taken, where rows have a "split".
        out: folder for the records; one of the same settings and machine is continued.  None keeps none.
        dtype, device: as `loading.load`.
        hits: also count how often each draft ranks the target's choice high, in one more plain run per prompt.
        max_rows: prompts that our methods decode at a time; with more than one, transformers' methods are left out.
            Tokens per second are those of one prompt at a time, or else of all rows together.
        progress: called with "texts", how many are done, of how many, and new tokens, once and after each `max_rows`.
            None shows a bar in a terminal; elsewhere long runs print a line now and then.

    Raises:
        InputError: a prompt file is unusable, no prompt can be used, no method can run, or the folder belongs to other
            settings or another run, or cannot be written.
        ModelError: a model cannot be loaded.
        SpecinferError: decoding failed; the folder keeps the finished prompts.
    """
    given = {name: plain(value) for name, value in locals().items() if name not in ("out", "progress")}
    checked_names("out", "" if out is None else out)
    lists = {name: list(given[name]) if isinstance(given[name], list | tuple) else [given[name]] for name in LISTS}
    plan = Plan(**given | lists)
    with locked(out) as folder:
        return _run(plan, folder, progress or Bars())


def _run(plan: Plan, folder: Path, progress: Progress) -> Comparison:
    """Measure the prompts that the folder does not hold yet, and append each finished one to it."""
    jobs = plan.jobs()
    kept = records_of(folder)
    kept.begin(plan.settings(jobs))
    done = {(record["set"], record["place"], record["temperature"]) for record in kept}
    left = [block for block in plan.blocks(jobs) if any(job.key not in done for job in block)]
    if left:
        runner = Runner(plan)
        kept.begin(plan.settings(jobs))  # weights that were fetched just now have a digest
        tokens = 0
        progress("texts", len(done), len(jobs), {"tokens": tokens})
        for block in left:
            for job, record in zip(block, runner.measure(block), strict=True):
                if job.key not in done:
                    kept.append(record)
                tokens += sum(method["tokens"] for method in record.get("methods", {}).values())
            done.update(job.key for job in block)
            progress("texts", len(done), len(jobs), {"tokens": tokens})
    found = Comparison(*kept.read())
    if not found.summary()["groups"]:
        raise InputError(f"no prompt can be used: {found.summary()['refused'][0]['error']}")
    return found
