"""``specinfer record``, ``replay`` and ``paper-tables``: traces, and verification replayed on them.

Knows: the options, which trees and verifiers a replay tries.  Does not know: how a trace is recorded or replayed.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from specinfer.cli import options
from specinfer.cli.terminal import loading, print_json, resumable, show
from specinfer.common.progress import Bars, tracked
from specinfer.common.tables import aligned, interval
from specinfer.errors import InputError

if TYPE_CHECKING:
    from specinfer.evaluation.traces import HitTable, Replay, Trace
    from specinfer.tree import Policy

TREES = ["chain", "expansion", "sampled", "best-first"]
BUDGETS = [4, 8, 16, 32, 64]
WIDEST = 5
RANKS = 8  # columns of hit rates
EDGES = 31  # nodes of the trees whose probabilities are checked, at most
BEST = (
    "\nof the best rule: the tokens that multi-step sampling accepts, over the most that any rule with the target's "
    "distribution could accept\nat the nodes visited; not known for more than 2 draws without replacement"
)


def record(
    out: Annotated[Path, Option(help="Folder for the trace; the same command resumes.")],
    prompts: options.PromptFiles = None,
    prompt: options.Prompts = None,
    *,
    models: options.Pair,
    max_new_tokens: options.NewTokens = 64,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    nodes: Annotated[int, Option(help="Largest best-first tree that can be replayed; 0 = none.")] = 64,
    depth: Annotated[int, Option(help="Most levels that can be replayed.")] = 8,
    top: Annotated[
        int, Option(help="Candidates kept per node, tokens per distribution; 0 = whole distributions.")
    ] = 16,
    draws: Annotated[int, Option(help="Draws per node that multi-step sampling can be replayed with.")] = 5,
    count: options.Count = 5,
    split: options.Split = "dev",
    batch: options.Batch = 4,
    as_json: options.Json = False,
) -> None:
    """Record texts of the target, and what the drafts would have proposed along them, for `replay`."""
    given = locals()
    with loading():
        from specinfer.evaluation.compare.prompts import read_prompt_file
        from specinfer.evaluation.traces import record

    texts = [text for path in prompts or () for _, text in read_prompt_file(path, split, count)]
    texts += prompt or []
    if not texts:
        raise InputError("there is nothing to record: give --prompts FILE or --prompt TEXT")
    sizes = options.chosen(given, "max_new_tokens temperature seed nodes depth draws batch out")
    with resumable(out):
        trace = record(models.decoder(), texts, top=top or None, progress=Bars(), **sizes)
    found = {"folder": str(out), "texts": len(trace.texts), "tokens": trace.tokens, "refused": trace.refused}
    print_json({**found, "settings": trace.settings}) if as_json else print(trace)


def replay(
    folder: Annotated[Path, Argument(help="Folder of `specinfer record`, or of a trace of `paper-tables`.")],
    tree: Annotated[list[str] | None, Option(help=f"One of {', '.join(TREES)}. Repeat.", show_default="all")] = None,
    nodes: Annotated[
        list[int] | None, Option(help="Nodes of best-first trees. Repeat.", show_default="4, 8, ... as recorded")
    ] = None,
    depth: Annotated[
        int | None, Option(help="Levels of chains and best-first trees.", show_default="as recorded")
    ] = None,
    expansion: Annotated[
        list[str] | None,
        Option(help="Children per level (expansion, sampled). Repeat.", show_default="1,1,k,1,... for k = 1 to 5"),
    ] = None,
    draft: Annotated[
        list[str] | None,
        Option(help="Which recorded drafts propose, by name or index (from 0). Repeat.", show_default="all"),
    ] = None,
    costs: Annotated[
        Path | None, Option(help="Folder of `specinfer compare`: check the cost model of chains against it.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Replay a trace, without any model: tokens per target pass by tree and verifier, hits, calibration, costs."""
    with loading("the trace"):
        from specinfer.evaluation.compare import Comparison
        from specinfer.evaluation.traces import Trace, calibration, cost_model, edge_calibration, hits, measured
        from specinfer.tree import BestFirst

        trace = Trace.load(folder)
    drafts = list(dict.fromkeys(map(trace.draft, draft or range(len(trace.drafts)))))
    policies = _policies(trace, tree or TREES, nodes, depth, expansion)
    if not policies:
        raise InputError(f"{folder} holds too little for trees of these kinds and sizes: choose others, or record more")
    replays = _replays(trace, policies, drafts)
    tables = [(hits(trace, index), calibration(trace, index).error) for index in drafts]
    most, levels = min(EDGES, trace.settings["nodes"]), trace.settings["depth"]
    edges = edge_calibration(trace, BestFirst(most, levels), drafts=drafts) if most else None
    name = trace.drafts[drafts[0]]
    times = costs and measured(Comparison.read(costs), name, trace.settings["temperature"])
    model = times and cost_model(trace, times, draft=drafts[0])
    if as_json:
        known = [
            {"draft": t.draft, "hits": t.rates.tolist(), "tried": t.tried.tolist(), "calibration_error": error}
            for t, error in tables
        ]
        found = {"settings": trace.settings, "replays": [row.to_dict() for row in replays], "drafts": known}
        found |= {"edges": edges.to_dict()} if edges else {}
        print_json(found | ({"costs": model.to_dict()} if model else {}))
        return
    print(trace)
    show([_row(row) for row in replays])
    if any(row.policy.startswith("Sampled") for row in replays):
        print(BEST)
    for table, error in tables:
        print(_hit_table(table, error))
    if edges:
        print(f"\n{edges}")
    if model:
        print(f"\nchains of {name}: {model}")


def _row(row: "Replay") -> dict[str, object]:
    """Return a line of the table of replays."""
    names = {"tree": row.policy, "verifier": row.verifier, "drafts": ", ".join(row.drafts)}
    figures = {"tokens/pass": interval(row.tokens_per_pass), "how": row.how}
    if row.bound is None:
        return {**names, **figures, "of the best rule": "", "by depth": ""}
    pairs = zip(row.bound.accepted, row.bound.most, strict=True)
    by_depth = " ".join(f"{accepted / most:.2f}" if most else "-" for accepted, most in pairs)
    return {**names, **figures, "of the best rule": interval(row.bound.share), "by depth": by_depth}


def _hit_table(table: "HitTable", error: float) -> str:
    """Return a draft's hit rates, a line per depth, under the error of its probabilities."""
    head = f"\n{table.draft}: the target's token by depth and place among candidates; calibration error {error:.3f}"
    rows = enumerate(table.rates[:, :RANKS], 1)
    return "\n".join([head, *aligned([["", str(depth), *(f"{rate:.2f}" for rate in row)] for depth, row in rows])])


def paper_tables(
    prompts: Annotated[
        list[Path], Option(help='JSON lines with "prompt", optionally "id" and "split"; a set each. Repeat.')
    ],
    *,
    models: options.Pair,
    count: options.Count = 5,
    max_new_tokens: options.NewTokens = 64,
    split: options.Split = "dev",
    batch: options.Batch = 4,
    out: Annotated[
        Path | None, Option(help="Folder for the traces, which `replay` reads; the same command resumes.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Print SpecInfer's Tables 1 to 3 for this pair (the first draft), beside the paper's figures."""
    given = locals()
    with loading():
        from specinfer.evaluation.compare.prompts import read_prompt_file
        from specinfer.evaluation.traces import paper_tables

    sets = {path.stem: [text for _, text in read_prompt_file(path, split, count)] for path in prompts}
    if len(sets) < len(prompts):
        raise InputError(f"two sets would have one name, after their files {[*map(str, prompts)]}: rename one")
    with resumable(out) if out else nullcontext():
        sizes = options.chosen(given, "max_new_tokens batch out")
        made = paper_tables(models.decoder(), sets, progress=Bars(), **sizes)
    print_json(made.to_dict()) if as_json else print(made)


def _policies(
    trace: "Trace", trees: list[str], nodes: list[int] | None, depth: int | None, expansion: list[str] | None
) -> "list[Policy]":
    """Return the policies that the options name, by default those that the trace can answer for."""
    from specinfer.tree import BestFirst, Chain, Expansion, Sampled

    if unknown := [name for name in trees if name not in TREES]:
        raise InputError(f"--tree {unknown[0]!r} is unknown: choose {', '.join(TREES)}")
    levels = trace.settings["depth"] if depth is None else depth
    budgets = nodes or [n for n in BUDGETS if n <= trace.settings["nodes"]]
    widest = min(WIDEST, trace.settings["top"] or WIDEST, trace.settings["draws"] if trace.sampling else WIDEST)
    usual = dict.fromkeys(tuple([1, 1, k, *[1] * levels][:levels]) for k in range(1, widest + 1))
    shapes = [options.expansion_widths(text) for text in expansion or ()] or usual
    makers: dict[str, Iterable[Policy]] = {
        "chain": [Chain(levels)],
        "expansion": map(Expansion, shapes),
        "sampled": [Sampled(s, r) for s in shapes for r in (True, False)] if trace.sampling else [],
        "best-first": [BestFirst(n, levels) for n in budgets],
    }
    return [policy for name in trees for policy in makers[name]]


def _replays(trace: "Trace", policies: "Sequence[Policy]", drafts: list[int]) -> "list[Replay]":
    """Replay every policy with every verifier that is exact for it, then the bounds of best-first trees."""
    from specinfer.engine.verify import ExactMatch
    from specinfer.evaluation.traces import oracle, replay
    from specinfer.tree import BestFirst, Expansion, Kind

    replays = []
    for policy in tracked(policies, "trees", Bars()):
        if policy.kind is Kind.RANKED:
            ways = (True, False) if trace.sampling and isinstance(policy, Expansion) else (True,)
            replays += [replay(trace, policy, drafts=drafts, coupled=coupled) for coupled in ways]
        else:
            rules = (None, ExactMatch()) if policy.kind is Kind.IID else (None,)
            replays += [replay(trace, policy, rule, drafts=[index]) for rule in rules for index in drafts]
    return replays + [oracle(trace, policy, drafts=drafts) for policy in policies if isinstance(policy, BestFirst)]
