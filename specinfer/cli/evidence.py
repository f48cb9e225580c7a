"""``specinfer record``, ``replay`` and ``paper-tables``: traces, and what verification makes of them."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specinfer.cli.options import (
    CountOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    PromptOption,
    PromptsOption,
    SeedOption,
    SplitOption,
    TargetOption,
    TemperatureOption,
    TokensOption,
)
from specinfer.cli.terminal import print_json, quieten, show
from specinfer.cli.text import numbers
from specinfer.common.tables import interval
from specinfer.errors import InputError

if TYPE_CHECKING:
    from specinfer.evaluation.traces.replaying import Replay
    from specinfer.evaluation.traces.trace import Trace
    from specinfer.tree import Policy

BatchOption = Annotated[int, typer.Option(help="Texts at a time.")]
TREES = ["chain", "expansion", "sampled", "best-first"]
BUDGETS = [4, 8, 16, 32, 64]
WIDEST = 5


def record(
    out: Annotated[Path, typer.Option(help="Folder for the trace; a killed run goes on.")],
    prompts: PromptsOption = None,
    prompt: PromptOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    max_new_tokens: TokensOption = 64,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    nodes: Annotated[int, typer.Option(help="Largest best-first tree that can be replayed; 0 = none.")] = 64,
    depth: Annotated[int, typer.Option(help="Most levels that can be replayed.")] = 8,
    top: Annotated[
        int, typer.Option(help="Candidates kept per node, tokens per distribution; 0 = whole distributions.")
    ] = 16,
    draws: Annotated[int, typer.Option(help="Draws per node that multi-step sampling can be replayed with.")] = 5,
    count: CountOption = 5,
    split: SplitOption = "dev",
    batch: BatchOption = 4,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Record texts of the target, and what the drafts would have proposed along them, for `replay`."""
    from specinfer.evaluation.compare.files import read_prompts
    from specinfer.evaluation.traces.recording import record

    texts = [text for path in prompts or () for _, text in read_prompts(path, split)[:count]] + (prompt or [])
    if not texts:
        raise InputError("there is nothing to record: give --prompts FILE or --prompt TEXT")
    trace = record(
        _decoder(target, draft, dtype, device),
        texts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        nodes=nodes,
        depth=depth,
        top=top or None,
        draws=draws,
        batch=batch,
        out=out,
        progress=_Bar(len(texts)),
    )
    tokens = sum(len(text.token_ids) for text in trace.texts)
    told = {"folder": str(out), "texts": len(trace.texts), "tokens": tokens, "settings": trace.settings}
    print_json(told) if as_json else print(trace)


def replay(
    folder: Annotated[Path, typer.Argument(help="Of `specinfer record`, or a trace of `paper-tables`.")],
    tree: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(TREES)}. Repeat.", show_default="all")] = None,
    nodes: Annotated[
        list[int] | None,
        typer.Option(help="Nodes of best-first trees. Repeat.", show_default="4, 8, ... as recorded"),
    ] = None,
    depth: Annotated[
        int | None, typer.Option(help="Levels of chains and best-first trees.", show_default="as recorded")
    ] = None,
    expansion: Annotated[
        list[str] | None,
        typer.Option(
            help="Children per level (expansion, sampled). Repeat.", show_default="1,1,k,1,... for k = 1 to 5"
        ),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(help="Which recorded drafts propose, by name or place (from 0). Repeat.", show_default="all"),
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Folder of `specinfer compare`: check the cost model of chains against it.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a trace, without any model: tokens per target pass by tree and verifier, hits, calibration, costs."""
    from specinfer.evaluation.compare import Comparison
    from specinfer.evaluation.traces.costs import cost_model, measured
    from specinfer.evaluation.traces.replaying import oracle
    from specinfer.evaluation.traces.statistics import calibration, hits
    from specinfer.evaluation.traces.trace import Trace
    from specinfer.tree import BestFirst

    trace = Trace.load(folder)
    drafts = list(dict.fromkeys(_place(trace, name) for name in draft or range(len(trace.drafts))))
    names = [trace.drafts[place] for place in drafts]
    policies = _policies(trace, tree or TREES, nodes, depth, expansion)
    if not policies:
        raise InputError(f"{folder} holds too little for trees of these kinds and sizes: choose others, or record anew")
    replays = [own for policy in policies for own in _replays(trace, policy, drafts)]
    replays += [oracle(trace, policy, drafts=drafts) for policy in policies if isinstance(policy, BestFirst)]
    curves = [(hits(trace, place), calibration(trace, place)) for place in drafts]
    times = costs and measured(Comparison.read(costs), names[0], trace.settings["temperature"])
    model = times and cost_model(trace, times, draft=drafts[0])
    made = trace, replays, list(zip(names, curves, strict=True)), model
    print_json(_as_dict(*made)) if as_json else _show(*made)


def _place(trace: "Trace", draft: str | int) -> int:
    """Return a draft's place, given its name or, if none is called so, the place in digits."""
    named = isinstance(draft, int) or (draft in trace.drafts and trace.drafts.count(draft) == 1)
    return trace.draft(draft if named or not str(draft).isdecimal() else int(draft))


def _as_dict(trace: "Trace", replays: "Sequence[Replay]", known: Sequence[Any], model: Any) -> dict[str, Any]:
    """Return what `replay` found, JSON-ready; known is each draft's name, with its hits and its calibration."""
    told = [
        {"draft": name, "hits": t.rates.tolist(), "tried": t.tried.tolist(), "calibration_error": c.error}
        for name, (t, c) in known
    ]
    made = {"settings": trace.settings, "replays": [own.to_dict() for own in replays], "drafts": told}
    return made | ({"costs": model.to_dict()} if model else {})


def _show(trace: "Trace", replays: "Sequence[Replay]", known: Sequence[Any], model: Any) -> None:
    """Print the same as text."""
    print(trace)
    show([_row(own) for own in replays], as_json=False)
    for name, (table, curve) in known:
        print(_known(name, table.rates, curve.error))
    if model:
        print(f"\nchains of {known[0][0]}: {model}")


def _known(name: str, rates: Any, error: float) -> str:
    """Return what a draft knows, in words: hit rates (depth, rank), and the error of its probabilities."""
    lines = [f"\n{name}: the target's token by depth and place among candidates; calibration error {error:.3f}"]
    levels = enumerate(rates[:, :8], 1)
    return "\n".join([*lines, *(f"  {level}  " + "  ".join(f"{rate:.2f}" for rate in row) for level, row in levels)])


def _row(own: "Replay") -> dict[str, str]:
    """Return a line of the table of replays."""
    told = {"tree": own.policy, "verifier": own.verifier, "drafts": ", ".join(own.drafts)}
    return {**told, "tokens/pass": interval(own.tokens_per_pass), "how": own.how}


def paper_tables(
    prompts: Annotated[
        list[Path], typer.Option(help='JSON lines with "prompt", optionally "id" and "split"; a set each. Repeat.')
    ],
    target: TargetOption = None,
    draft: DraftOption = None,
    count: CountOption = 5,
    max_new_tokens: TokensOption = 64,
    split: SplitOption = "dev",
    batch: BatchOption = 4,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the traces; a killed run goes on, and `replay` reads them.")
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Print SpecInfer's Tables 1 to 3 for this pair (the first draft), beside the paper's figures."""
    from specinfer.evaluation.compare.files import read_prompts
    from specinfer.evaluation.traces.paper import paper_tables

    sets = {path.stem: [text for _, text in read_prompts(path, split)[:count]] for path in prompts}
    if len(sets) < len(prompts):
        raise InputError(f"two of the files {[str(path) for path in prompts]} have one name, which names the set")
    made = paper_tables(
        _decoder(target, draft, dtype, device),
        sets,
        max_new_tokens=max_new_tokens,
        batch=batch,
        out=out,
        progress=_Bar(2 * sum(map(len, sets.values()))),
    )
    print_json(made.to_dict()) if as_json else print(made)


class _Bar:
    """One progress bar over all texts of one trace or more."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.bar: Any = None

    def __call__(self, batches: list[list[int]], done: int) -> Iterator[list[int]]:
        from tqdm import tqdm

        if self.bar is None:
            self.bar = tqdm(total=self.total, unit="text", disable=not sys.stderr.isatty())
        self.bar.update(done)
        for batch in batches:
            yield batch
            self.bar.update(len(batch))
        if self.bar.n >= self.total:
            self.bar.close()


def _decoder(target: str | None, drafts: list[str] | None, dtype: str, device: str) -> Any:
    from specinfer.decoder import DEFAULT_TREE, SpeculativeDecoder

    quieten()
    return SpeculativeDecoder.from_pretrained(target, drafts or "auto", DEFAULT_TREE, dtype=dtype, device=device)


def _policies(
    trace: "Trace", trees: list[str], nodes: list[int] | None, depth: int | None, expansion: list[str] | None
) -> "list[Policy]":
    """Return the policies that the options name, by default what the trace can answer."""
    from specinfer.tree import BestFirst, Chain, Expansion, Sampled

    if unknown := [name for name in trees if name not in TREES]:
        raise InputError(f"--tree {unknown[0]!r} is unknown: choose {', '.join(TREES)}")
    levels = trace.settings["depth"] if depth is None else depth
    budgets = nodes or [n for n in BUDGETS if n <= trace.settings["nodes"]]
    shapes = [numbers(text) for text in expansion or ()]
    widest = min(WIDEST, trace.settings["top"] or WIDEST, trace.settings["draws"] if trace.sampling else WIDEST)
    shapes = shapes or list(dict.fromkeys(tuple([1, 1, k, *[1] * levels][:levels]) for k in range(1, widest + 1)))
    makers: dict[str, Iterable[Policy]] = {
        "chain": [Chain(levels)],
        "expansion": map(Expansion, shapes),
        "sampled": [Sampled(s, r) for s in shapes for r in (True, False)] if trace.sampling else [],
        "best-first": [BestFirst(n, levels) for n in budgets],
    }
    return [policy for name in trees for policy in makers[name]]


def _replays(trace: "Trace", policy: "Policy", drafts: list[int]) -> "list[Replay]":
    """Replay a policy with every verifier that is exact for it."""
    from specinfer.engine.verify import ExactMatch
    from specinfer.evaluation.traces.replaying import replay
    from specinfer.tree import Expansion, Kind

    if policy.kind is Kind.RANKED:
        made = [replay(trace, policy, drafts=drafts)]
        uncoupled = trace.sampling and isinstance(policy, Expansion)
        return [*made, *([replay(trace, policy, drafts=drafts, coupled=False)] if uncoupled else [])]
    own = [replay(trace, policy, drafts=[place]) for place in drafts]
    naive = [replay(trace, policy, ExactMatch(), drafts=[place]) for place in drafts] if policy.kind is Kind.IID else []
    return own + naive
