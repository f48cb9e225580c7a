"""``specinfer compare`` and ``specinfer bench``: methods side by side, the latter with a benchmark's defaults."""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from specinfer.cli.options import (
    CountOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    PromptOption,
    PromptsOption,
    SplitOption,
    TargetOption,
    TokensOption,
)
from specinfer.cli.terminal import print_json, quieten

GREEDY = [0.0]
METHODS = "autoregressive,sequence,tree,assisted,prompt-lookup"
BENCH_METHODS = "autoregressive,sequence,tree,auto,one-draft,gate,generate,assisted,prompt-lookup"


def compare(
    out: Annotated[Path, typer.Option(help="Folder for a record per finished prompt; a killed run goes on.")],
    prompts: PromptsOption = None,
    prompt: PromptOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    assistant: Annotated[
        str | None,
        typer.Option(help="Small model for transformers' assisted generation.", show_default="the draft, if it is one"),
    ] = None,
    methods: Annotated[str, typer.Option(help=f"Of {BENCH_METHODS.replace(',', ', ')}, graphs (GPU).")] = METHODS,
    temperature: Annotated[list[float], typer.Option(help="0 = greedy. Repeat.")] = GREEDY,
    nodes: Annotated[int, typer.Option(help="Drafted nodes at most, of every fixed tree.")] = 16,
    depth: Annotated[int, typer.Option(help="Levels at most, of every fixed tree and of the sequence.")] = 8,
    max_new_tokens: TokensOption = 64,
    count: CountOption = 5,
    split: SplitOption = "dev",
    hits: Annotated[bool, typer.Option(help="Count how often each draft ranks the target's choice high.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    report_only: Annotated[bool, typer.Option("--report", help="Run nothing: report what the folder holds.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare tree with sequence speculation and others, prompt by prompt: tokens per pass, speed, identity."""
    from tqdm import tqdm

    from specinfer.evaluation.compare import Comparison
    from specinfer.evaluation.compare import compare as run

    if report_only:
        found = Comparison.read(out)
    else:
        quieten()
        bar: dict[str, Any] = {"unit": "prompt", "disable": not sys.stderr.isatty()}
        found = run(
            [*(prompts or ()), *(prompt or ())],
            target=target,
            drafts=draft or (),
            methods=methods.split(","),
            assistant=assistant,
            temperatures=temperature,
            nodes=nodes,
            depth=depth,
            max_new_tokens=max_new_tokens,
            count=count,
            split=split,
            out=out,
            dtype=dtype,
            device=device,
            hits=hits,
            progress=lambda jobs, done: tqdm(jobs, initial=done, total=done + len(jobs), **bar),
        )
    print_json(found.summary()) if as_json else print(found)


def _preset(command: Callable[..., None], doc: str, **defaults: Any) -> Callable[..., None]:
    """Return a command that differs in its defaults."""

    @wraps(command)
    def preset(**options: Any) -> None:
        command(**options)

    signature = inspect.signature(command)
    parameters = [p.replace(default=defaults.get(p.name, p.default)) for p in signature.parameters.values()]
    preset.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    preset.__doc__ = doc
    return preset


bench = _preset(
    compare,
    "Compare all methods, greedy and sampling, with hit rates: `compare` with a benchmark's defaults.",
    methods=BENCH_METHODS,
    temperature=[0.0, 1.0],
    nodes=32,
    max_new_tokens=128,
    count=10,
    hits=True,
)
