"""Ray Data: a dataset of prompts in, the same dataset with texts out, on as many machines as the cluster has.

Knows: Ray Data's actors and columns.  Does not know: how prompts are decoded, where an actor runs.

Ray places actors, moves blocks, starts a dead actor anew and gives it its block again.  Nothing of that is here.
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from specinfer.common.values import checked_count, checked_names
from specinfer.decoder import SpeculativeDecoder, row_seeds
from specinfer.engine.options import Options
from specinfer.engine.scheduler import MAX_ROWS
from specinfer.errors import InputError

if TYPE_CHECKING:
    import pyarrow
    import ray.data

COLUMNS = {  # of results, and their types in Arrow: "seed" is null if greedy, and "error" beside a text
    "text": "string",
    "token_ids": "list",
    "finish_reason": "string",
    "seed": "int64",
    "target_passes": "int64",
    "error": "string",
}


def generate(
    dataset: "ray.data.Dataset",
    column: str = "prompt",
    *,
    target: str | None = None,
    drafts: object = "auto",
    load: Callable[..., SpeculativeDecoder] = SpeculativeDecoder.from_pretrained,
    load_options: Mapping[str, object] | None = None,
    concurrency: int = 1,
    num_cpus: float = 1,
    num_gpus: float = 0,
    block: int = 64,
    max_rows: int = MAX_ROWS,
    seed: int = 0,
    **options: object,
) -> "ray.data.Dataset":
    """Generate for every row of a dataset of Ray Data, in actors that hold a decoder each.

    Rows keep their order.  A row whose prompt is refused gets the reason in "error", and the others go on.  If an actor
    dies, Ray starts another and repeats what was lost: the block under way, and maybe one that nobody had fetched.  A
    text does not depend on the actor, up to rounding of the machines.

    Args:
        dataset: lazy or not; nothing runs before it is consumed.
        column: of prompts: text, token ids or chat messages.
        target, drafts: of `SpeculativeDecoder.from_pretrained`, which is called once in each actor.
        load: called in its place with target, drafts and ``load_options``, for models of your own.
        load_options: more of its arguments, for example ``{"dtype": "float32", "tree": None}``.
        concurrency: actors.
        num_cpus, num_gpus: of each actor, which computes with ``num_cpus`` threads.
        block: rows that an actor takes at a time.
        max_rows: rows decoded at a time.
        seed: the same for every row, unless the dataset has a column "seed".
        **options: of `SpeculativeDecoder.generate_many`, for all rows.

    Returns:
        the dataset with the columns "text", "token_ids", "finish_reason", "seed", "target_passes" and "error".

    Raises:
        InputError: Ray Data is not installed; this is no dataset, it lacks the column or has one that would be
            overwritten; or a number is out of range.
        ray.exceptions.RayTaskError: later, when it is consumed: every row is refused, or a model cannot be loaded.
    """
    _check(dataset, column)
    from ray.data import ActorPoolStrategy

    for name, value in (("concurrency", concurrency), ("block", block), ("max_rows", max_rows)):
        checked_count(name, value, 1)
    dataset.context.execution_options.preserve_order = True
    return dataset.map_batches(
        _Generator,
        fn_constructor_args=(column, partial(load, target, drafts, **(load_options or {})), row_seeds(seed, 1)[0]),
        fn_constructor_kwargs={"max_rows": max_rows, "options": options},
        batch_format="pyarrow",
        batch_size=block,
        compute=ActorPoolStrategy(size=concurrency),
        num_cpus=num_cpus,
        num_gpus=num_gpus or None,
    )


def _check(dataset: object, column: str) -> None:
    """Raise `InputError` unless this is a dataset of Ray Data that has prompts, and room for results."""
    try:
        from ray.data import Dataset
    except ImportError as error:
        raise InputError('Ray Data is not installed: pip install "specinfer[ray]"') from error
    if not isinstance(dataset, Dataset):
        raise InputError(f"dataset={dataset!r:.60} is not of Ray Data: make one with ray.data.from_items or read_json")
    checked_names("column", column)
    names = dataset.columns() or []
    if column not in names:
        raise InputError(f"the dataset has no column {column!r}, but {', '.join(names) or 'none'}: name the prompts'")
    if taken := sorted({*names} & {*COLUMNS} - {"seed"}):
        raise InputError(f"the dataset has a column {taken[0]!r} already: rename it, or drop it")


class _Generator:
    """An actor's decoder."""

    def __init__(
        self, column: str, load: Callable[[], SpeculativeDecoder], seed: int, max_rows: int, options: Options
    ) -> None:
        self.column, self.seed, self.max_rows, self.options = column, seed, max_rows, options
        self.decoder = load()

    def __call__(self, rows: "pyarrow.Table") -> "pyarrow.Table":
        """Return the rows with the texts that were generated for them."""
        import pyarrow

        prompts = rows.column(self.column).to_pylist()
        seeds = rows.column("seed").to_pylist() if "seed" in rows.column_names else [self.seed] * len(prompts)
        asked = ({"prompt": prompt, "seed": seed} for prompt, seed in zip(prompts, seeds, strict=True))
        found = [*self.decoder.generate_many(asked, max_rows=self.max_rows, **self.options)]
        records = [each.to_dict() for each in sorted(found, key=attrgetter("number"))]
        kept = rows.drop_columns(["seed"]) if "seed" in rows.column_names else rows
        types = {**COLUMNS, "token_ids": pyarrow.list_(pyarrow.int64())}
        for name, kind in types.items():
            kept = kept.append_column(name, pyarrow.array([record.get(name) for record in records], kind))
        return kept
