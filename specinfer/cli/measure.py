"""``specinfer compare``: methods side by side, and the presets of its options.

Knows: the options and their defaults.  Does not know: how anything is measured.
"""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from specinfer.cli import options
from specinfer.cli.terminal import loading, print_json, resumable
from specinfer.common.progress import Bars, busy
from specinfer.errors import InputError

METHODS = "autoregressive, sequence, tree, assisted, prompt-lookup"
BENCH_METHODS = "autoregressive, sequence, tree, auto, one-draft, gate, generate, assisted, prompt-lookup"
GREEDY = [0.0]
COMPARED = "assistant nodes depth max_new_tokens count split out hits max_rows"
PRESETS: dict[str, dict[str, object]] = {  # name -> option -> default
    "bench": {
        "methods": BENCH_METHODS,
        "temperature": [0.0, 1.0],
        "nodes": 32,
        "max_new_tokens": 128,
        "count": 10,
        "hits": True,
    }
}


def _take_defaults(context: typer.Context, preset: str | None) -> str | None:
    """Use a preset's defaults for all options that are not given."""
    if preset and preset not in PRESETS:
        raise InputError(f"--preset {preset!r} is unknown: choose {', '.join(PRESETS)}")
    context.default_map = PRESETS[preset] if preset else context.default_map
    return preset


def compare(
    out: Annotated[Path, Option(help="Folder for a record per finished prompt; the same command resumes.")],
    preset: Annotated[
        str | None,
        Option(
            help="Other defaults: bench compares all methods, greedy and sampling, with hit rates.",
            callback=_take_defaults,
            is_eager=True,
        ),
    ] = None,
    prompts: options.PromptFiles = None,
    prompt: options.Prompts = None,
    *,
    models: options.Pair,
    assistant: Annotated[
        str | None,
        Option(help="Small model for transformers' assisted generation.", show_default="the draft, if it is one"),
    ] = None,
    methods: Annotated[str, Option(help=f"Some of {BENCH_METHODS}, graphs (GPU).")] = METHODS,
    temperature: Annotated[list[float], Option(help="0 = greedy. Repeat.")] = GREEDY,
    nodes: Annotated[int, Option(help="Drafted nodes at most, of every fixed tree.")] = 16,
    depth: Annotated[int, Option(help="Levels at most, of every fixed tree and of the sequence.")] = 8,
    max_new_tokens: options.NewTokens = 64,
    count: options.Count = 5,
    split: options.Split = "dev",
    max_rows: Annotated[
        int, Option(help="Prompts that our methods decode at a time; tokens/s are then of all together.", min=1)
    ] = 1,
    hits: Annotated[
        bool,
        Option(help="Count how often each draft ranks the target's choice high.", show_default="no-hits; bench: hits"),
    ] = False,
    report_only: Annotated[bool, Option("--report", help="Run nothing: report what the folder holds.")] = False,
    as_json: options.Json = False,
) -> None:
    """Compare tree with sequence speculation and others, prompt by prompt: tokens per pass, speed, identity."""
    given = locals()
    if not (prompts or prompt or report_only):
        raise InputError("there is nothing to compare: give --prompts FILE or --prompt TEXT, or --report")
    with loading():
        from specinfer.evaluation.compare import Comparison
        from specinfer.evaluation.compare import compare as run
    if report_only:
        found = Comparison.read(out)
    else:
        asked = options.chosen(given, COMPARED) | models.loading()
        names, drafts = [name.strip() for name in methods.split(",")], asked.pop("draft", ())
        with busy("loading the models"), resumable(out):
            texts = [*(prompts or ()), *(prompt or ())]
            found = run(texts, drafts=drafts, methods=names, temperatures=temperature, progress=Bars(), **asked)
    print_json(found.summary()) if as_json else print(found)
