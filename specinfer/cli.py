"""The command line: ``specinfer generate | tree | check-model | certify | bench | distill``.

Knows: options, terminals, exit codes.  Results go to stdout; summaries, progress and errors to stderr.  A user's
error is one line and exit code 2, never a traceback.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
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
    typer.Option(help="A model, a trained head, ngram, shipped or auto. Repeat to merge.", show_default="auto"),
]
TreeOption = Annotated[str, typer.Option(help="auto, best-first, widths, chain, sampled or none.")]
NodesOption = Annotated[
    int | None,
    typer.Option(
        help="Drafted nodes per tree at most (auto; best-first, where paths below 5 % are left out).",
        show_default="24 auto, 16 best-first",
    ),
]
DepthOption = Annotated[int, typer.Option(help="Levels per tree at most (auto, best-first), or exactly (chain).")]
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
    tree: TreeOption = "auto",
    nodes: NodesOption = None,
    depth: DepthOption = 8,
    widths: WidthsOption = "3,2,1,1",
    max_new_tokens: TokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    confidence_gate: Annotated[
        float | None, typer.Option(help="Draft only after tokens that the target found at least so probable.")
    ] = None,
    raw: RawOption = False,
    show_tree: Annotated[bool, typer.Option("--show-tree", help="Draw the tree that gained most.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Generate text, streamed, with a summary of what speculation did."""
    policy = build_policy(tree, nodes, depth, widths)
    text, decoder = prepare(prompt, target, draft, policy, dtype, device, confidence_gate)
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
    for contribution in result.stats.drafts if len(result.stats.drafts) > 1 else ():
        print(contribution, file=sys.stderr)
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
    tree: TreeOption = "auto",
    nodes: NodesOption = None,
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


@app.command("bench")
def bench_command(
    out: Annotated[Path, typer.Option(help="JSON lines, one per finished prompt; a killed run goes on.")],
    prompts: Annotated[
        list[Path] | None, typer.Option(help='JSON lines with "prompt", optionally "id" and "split". Repeat for sets.')
    ] = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    assistant: Annotated[str | None, typer.Option(help="Small model for transformers' assisted generation.")] = None,
    count: Annotated[int, typer.Option(help="Prompts per file at most.")] = 10,
    split: Annotated[str, typer.Option(help="The rows taken, where rows have a split.")] = "dev",
    max_new_tokens: TokensOption = 128,
    temperature: Annotated[list[float] | None, typer.Option(help="0 = greedy. Repeat.", show_default="0 and 1")] = None,
    methods: Annotated[
        str, typer.Option(help="Of plain, auto, best-first, one-draft, gate, generate, assisted, prompt-lookup.")
    ] = "plain,auto,best-first,generate,assisted,prompt-lookup,gate",
    nodes: Annotated[int, typer.Option(help="Drafted nodes at most, of every fixed tree.")] = 32,
    hits: Annotated[bool, typer.Option(help="Count how often each draft ranks the target's choice high.")] = True,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    report_only: Annotated[bool, typer.Option("--report", help="Run nothing: report what the file holds.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare methods side by side, prompt by prompt: tokens per pass, speed, hit rates, where the time goes."""
    from tqdm import tqdm

    from specinfer.bench import Plan, bench, read_results, summarise, tables

    if not report_only:
        plan = Plan(
            prompts=prompts or (),
            target=target,
            drafts=draft or (),
            assistant=assistant,
            count=count,
            split=split,
            max_new_tokens=max_new_tokens,
            temperatures=temperature or (0.0, 1.0),
            methods=methods.split(","),
            nodes=nodes,
            hits=hits,
            dtype=dtype,
            device=device,
        )
        quieten()
        bar = {"unit": "prompt", "disable": not sys.stderr.isatty()}
        bench(plan, out, lambda jobs, done: tqdm(jobs, initial=done, total=done + len(jobs), **bar))
    figures = summarise(*read_results(out))
    print(json.dumps(figures) if as_json else tables(figures))


@app.command("distill")
def distill_command(
    prompts: Annotated[
        list[Path], typer.Option(help='JSON lines with "prompt" (and "split": only train), or .txt by line. Repeat.')
    ],
    out: Annotated[Path, typer.Option(help="Folder for drafts and text; the same command goes on after a kill.")],
    target: TargetOption = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Given text to learn from as well: a document a block or line. Repeat.")
    ] = None,
    drafts: Annotated[int, typer.Option(help="Heads, each tuned on what the earlier ones miss.")] = 2,
    arch: Annotated[str, typer.Option(help="head (reads the target's states) or lm (a small causal LM).")] = "head",
    samples: Annotated[
        int | None, typer.Option(help="Texts that the target writes.", show_default="one per prompt")
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="New tokens per text at most.")] = 144,
    temperatures: Annotated[str, typer.Option(help="They take turns; 0 = greedy.")] = "0,0.7,1",
    epochs: Annotated[float, typer.Option(help="Times that every text is seen.")] = 3.0,
    vocabulary: Annotated[int, typer.Option(help="Tokens that a head may propose, the most frequent.")] = 12_000,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, at its peak.")] = 1.5e-3,
    loss: Annotated[str, typer.Option(help="kl (the target's law) or token (its choices).")] = "kl",
    seed: Annotated[int, typer.Option(help="Of texts and training.")] = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Train drafts for a target on text that the target writes."""
    from specinfer.distill import Recipe, Settings, TextSettings, distill, read_documents, read_prompts
    from specinfer.models import load

    own = TextSettings(samples, new_tokens, _temperatures(temperatures), seed)
    training = Settings(epochs, learning_rate=learning_rate, vocabulary=vocabulary, loss=loss, seed=seed)
    recipe = Recipe(drafts, arch, own, training)
    asked, given = read_prompts(prompts), read_documents(text or ())
    quieten()
    loaded = load(target, dtype, device)
    made = distill(loaded.model, loaded.tokenizer, asked, out, recipe, given, loaded.name, progress_bars())
    if as_json:
        print(json.dumps(made))
        return
    rows = [{"draft": draft["folder"], "steps": draft["steps"]} for draft in made["drafts"]]
    for row, draft in zip(rows, made["drafts"], strict=True):
        row |= {f"top-{k}": f"{rate:.3f}" for k, rate in enumerate(draft["hits"][0], 1)}
    show(rows, as_json=False)


def build_policy(tree: str, nodes: int | None, depth: int, widths: str) -> Any:
    """Return the growth policy that the options name, or None for no speculation."""
    from specinfer.adapt import MAX_NODES, Auto
    from specinfer.decoder import DEFAULT_TREE
    from specinfer.tree import BestFirst, Chain, Sampled, Widths

    for name, value in (("nodes", nodes), ("depth", depth)):
        if value is not None and value < 1:
            raise InputError(f"--{name} {value} drafts nothing: give at least 1, or --tree none")
    levels = _numbers(widths)
    makers = {
        "auto": lambda: Auto(nodes or MAX_NODES, depth),
        "best-first": lambda: BestFirst(nodes or DEFAULT_TREE.max_nodes, depth, DEFAULT_TREE.min_probability),
        "widths": lambda: Widths(levels),
        "chain": lambda: Chain(depth),
        "sampled": lambda: Sampled(levels),
        "none": lambda: None,
    }
    if tree not in makers:
        raise InputError(f"--tree {tree!r} is unknown: choose {', '.join(makers)}")
    return makers[tree]()


def prepare(
    prompt: str,
    target: str | None,
    drafts: list[str] | None,
    policy: Any,
    dtype: str,
    device: str,
    confidence_gate: float | None = None,
) -> tuple[str, Any]:
    """Read the prompt, then load the models; return the text and a decoder."""
    from specinfer.decoder import SpeculativeDecoder

    text = read_prompt(prompt)
    quieten()
    options: dict[str, Any] = {"dtype": dtype, "device": device, "confidence_gate": confidence_gate}
    return text, SpeculativeDecoder.from_pretrained(target, drafts or "auto", policy, **options)


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


def progress_bars() -> Any:
    """Return a progress function for `distill`: a bar per stage, with the newest figures after it."""
    from tqdm import tqdm

    bars: dict[str, Any] = {}
    newest: dict[str, str] = {}

    def progress(stage: str, done: int, total: int, figures: dict[str, Any]) -> None:
        if stage not in bars:
            newest.clear()
            bars[stage] = tqdm(desc=stage, initial=done, total=total, disable=not sys.stderr.isatty())
        newest.update({name: _figure(value) for name, value in figures.items()})
        bars[stage].set_postfix(newest, refresh=False)
        bars[stage].update(done - bars[stage].n)
        if done == total:
            bars[stage].close()

    return progress


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


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--temperatures {text!r} is not a list of numbers such as 0,0.7,1") from None


def _figure(value: Any) -> str:
    """Return a number, or the first row of a table of them (hit rates of the first draft step), in few characters."""
    if isinstance(value, list):
        return "/".join(f"{rate:.2f}" for rate in value[0])
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2e}" if isinstance(value, float) else str(value)
