"""The command line: ``specinfer generate | tree | check-model | certify``.

Knows: options, terminals, exit codes.  Results go to stdout; summaries, progress and errors to stderr.  A user's
error is one line and exit code 2, never a traceback.
"""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from specinfer.errors import InputError, SpecinferError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Generate text with token trees that a small model drafts and the target verifies, exactly.",
)

PromptArgument = Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")]
TargetOption = Annotated[
    str | None, typer.Option(help="Target model, hub name or folder.", show_default="SmolLM2-135M-Instruct")
]
DraftOption = Annotated[
    list[str] | None,
    typer.Option(help="Draft: a model or 'ngram'. Repeat to merge several.", show_default="ngram"),
]
TreeOption = Annotated[str, typer.Option(help="best-first, widths, chain, sampled or none.")]
NodesOption = Annotated[
    int, typer.Option(help="Drafted nodes per tree at most (best-first; paths below 5 % are left out).")
]
DepthOption = Annotated[int, typer.Option(help="Levels per tree (best-first, chain).")]
WidthsOption = Annotated[str, typer.Option(help="Children per level (widths, sampled).")]
TokensOption = Annotated[int, typer.Option("--max-new-tokens", help="New tokens at most.")]
TemperatureOption = Annotated[float, typer.Option(help="0 = greedy.")]
TopPOption = Annotated[float | None, typer.Option(help="Nucleus; sampling only.", show_default="1.0")]
TopKOption = Annotated[int | None, typer.Option(help="0 = all tokens; sampling only.", show_default="50")]
SeedOption = Annotated[int, typer.Option(help="Same seed, same text: with any tree or none.")]
DtypeOption = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
RawOption = Annotated[bool, typer.Option("--raw", help="Feed the prompt as it is, without the chat template.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def generate(
    prompt: PromptArgument,
    target: TargetOption = None,
    draft: DraftOption = None,
    tree: TreeOption = "best-first",
    nodes: NodesOption = 16,
    depth: DepthOption = 8,
    widths: WidthsOption = "3,2,1,1",
    max_new_tokens: TokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    raw: RawOption = False,
    show_tree: Annotated[bool, typer.Option("--show-tree", help="Draw the tree that gained most.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Generate text, streamed, with a summary of what speculation did."""
    policy = build_policy(tree, nodes, depth, widths)
    text, decoder = prepare(prompt, target, draft, policy, dtype, device)
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    stream = decoder.stream(text, seed=seed, raw=raw, **options)
    for piece in stream:
        if not as_json:
            print(piece, end="", flush=True)
    result = stream.result
    if as_json:
        print(json.dumps(result.to_dict(), ensure_ascii=False))
        return
    print()
    print(f"\n{result.stats}", file=sys.stderr, flush=True)
    for note in result.stats.notes:
        print(f"note: {note}", file=sys.stderr)
    if show_tree:
        best = max(range(len(result.steps)), key=lambda i: (len(result.steps[i].path), len(result.steps[i].tree)))
        print(f"\n{drawn(decoder, result.steps[best], best + 1)}")


@app.command("tree")
def tree_command(
    prompt: PromptArgument,
    target: TargetOption = None,
    draft: DraftOption = None,
    tree: TreeOption = "best-first",
    nodes: NodesOption = 16,
    depth: DepthOption = 8,
    widths: WidthsOption = "3,2,1,1",
    max_new_tokens: TokensOption = 32,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    raw: RawOption = False,
    as_json: JsonOption = False,
) -> None:
    """Draw the tree of one step: the first, within --max-new-tokens, in which anything was drafted."""
    policy = build_policy(tree, nodes, depth, widths)
    text, decoder = prepare(prompt, target, draft, policy, dtype, device)
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    run = decoder.open(text, seed=seed, raw=raw, **options)
    for ((_, step),) in run:
        if len(step.tree) > 1:
            break
    run.close()
    number = len(run.results()[0].steps)
    if as_json:
        print(json.dumps({"step": number, **step.to_dict()}, ensure_ascii=False))
    else:
        print(drawn(decoder, step, number))


@app.command("check-model")
def check_model_command(
    model: Annotated[str, typer.Argument(help="Hub name or folder.")],
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Say whether a model scores token trees exactly: exact, chain only or unsupported, and why."""
    from specinfer.attention import check_model
    from specinfer.models import load

    quieten()
    rows = [check_model(load(model, dtype, device).model)._asdict()]
    show(rows, as_json)


@app.command("certify")
def certify_command(as_json: JsonOption = False) -> None:
    """Enumerate the exact output law of every verifier and tree policy, and of broken ones that must fail."""
    from tqdm import tqdm

    from specinfer.certification import certify

    certificates = certify(progress=lambda pairs: tqdm(pairs, unit="pair", disable=not sys.stderr.isatty()))
    show([certificate.to_dict() for certificate in certificates], as_json)
    if not all(certificate.passed for certificate in certificates):
        raise typer.Exit(1)


def build_policy(tree: str, nodes: int, depth: int, widths: str) -> Any:
    """Return the growth policy that the options name, or None for no speculation."""
    from specinfer.decoder import DEFAULT_TREE
    from specinfer.tree import BestFirst, Chain, Sampled, Widths

    for name, value in (("nodes", nodes), ("depth", depth)):
        if value < 1:
            raise InputError(f"--{name} {value} drafts nothing: give at least 1, or --tree none")
    levels = _numbers(widths)
    makers = {
        "best-first": lambda: BestFirst(nodes, depth, DEFAULT_TREE.min_probability),
        "widths": lambda: Widths(levels),
        "chain": lambda: Chain(depth),
        "sampled": lambda: Sampled(levels),
        "none": lambda: None,
    }
    if tree not in makers:
        raise InputError(f"--tree {tree!r} is unknown: choose {', '.join(makers)}")
    return makers[tree]()


def prepare(
    prompt: str, target: str | None, drafts: list[str] | None, policy: Any, dtype: str, device: str
) -> tuple[str, Any]:
    """Read the prompt, then load the models; return the text and a decoder."""
    from specinfer.decoder import SpeculativeDecoder

    text = read_prompt(prompt)
    quieten()
    return text, SpeculativeDecoder.from_pretrained(target, drafts or ["ngram"], policy, dtype=dtype, device=device)


def read_prompt(prompt: str) -> str:
    """Return the prompt, from standard input if it is "-"."""
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not text.strip():
        raise InputError("the prompt is empty: there is nothing to continue")
    return text


def drawn(decoder: Any, step: Any, number: int) -> str:
    """Draw one step's tree with its accepted path and bonus token."""
    from specinfer.tree import render

    text = decoder.tokenizer.decode
    bonus = None if step.bonus is None else text([step.bonus])
    picture = render(step.tree, lambda token: text([token]), step.path, bonus)
    gained = f"{len(step.path)} of {step.tree.num_drafted} drafted tokens accepted on a path"
    return f"step {number}: {gained}\n{picture}"


def show(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Print rows as a table, or as a JSON list."""
    if as_json:
        print(json.dumps(rows, ensure_ascii=False, default=str))
        return
    columns = list(rows[0])
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def quieten() -> None:
    """Keep transformers' own progress bars and advice off the terminal unless somebody is watching it."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def main() -> None:
    """Run the command line; turn every user's error into one line and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except SpecinferError as error:
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(1) from None
    except Exception as error:
        if not hasattr(error, "format_message"):  # a usage error of click, which typer may carry within itself
            raise
        fail(error.format_message())
    raise SystemExit(code or 0)


def fail(message: str) -> None:
    """Print one line on stderr and exit with code 2."""
    if message:  # typer's help, already printed, is an error without one
        print(f"specinfer: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--widths {text!r} is not a list of whole numbers such as 1,1,3") from None
    if any(number < 1 for number in numbers):
        raise InputError(f"--widths {text!r}: every level needs at least one child; leave levels out to stop earlier")
    return numbers


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2e}" if isinstance(value, float) else str(value)
