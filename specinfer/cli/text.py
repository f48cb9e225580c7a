"""``specinfer generate`` and ``specinfer tree``: text as it is written, files of prompts, and the tree of one step.

Knows: options, standard input and output.  Does not know: how text is decoded.
"""

import sys
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from specinfer.cli import options
from specinfer.cli.terminal import INTERRUPTED, busy, loading, print_json, resumable, stage_bars
from specinfer.common.advice import did_you_mean
from specinfer.errors import InputError

BEST = "best"  # word for a step
UNFINISHED = "unfinished"  # a result's end, if it was interrupted


def generate(
    prompt: options.MaybePrompt = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help='In place of a prompt, files: JSON lines with "prompt", maybe "id" and "options". Repeat.'),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --prompts: folder for the results; a killed run goes on.")
    ] = None,
    max_rows: Annotated[int, typer.Option(help="With --prompts: texts at a time.", min=1)] = 16,
    target: options.Target = None,
    draft: options.Drafts = None,
    tree: options.Tree = "auto",
    nodes: options.Nodes = None,
    depth: options.Depth = None,
    expansion: options.Expansion = "3,2,1,1",
    max_new_tokens: options.NewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    penalty_alpha: Annotated[
        float | None, typer.Option(help="Contrastive search among --top-k candidates: its penalty, 0.6 for example.")
    ] = None,
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantize: options.Quantize = None,
    device_map: options.DeviceMap = None,
    max_memory: options.MaxMemory = None,
    offload_folder: options.OffloadFolder = None,
    confidence_gate: Annotated[
        float | None, typer.Option(help="Draft only after tokens that the target found at least so probable.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="What auto learnt: used if the file is there, so runs repeat; else written.")
    ] = None,
    memory: Annotated[
        Path | None,
        typer.Option(help="Texts to draft from: read if the file is there, and written with this one added."),
    ] = None,
    online: Annotated[bool, typer.Option("--online", help="Heads learn from the text, after it.")] = False,
    save_drafts: Annotated[
        Path | None, typer.Option(help="With --online: write what heads have learnt; --draft reads it.")
    ] = None,
    tensor_parallel: options.TensorParallel = 1,
    raw: options.Raw = False,
    show_tree: Annotated[bool, typer.Option("--show-tree", help="Draw the tree that gained most.")] = False,
    save: Annotated[Path | None, typer.Option(help="File for the result, which specinfer.Result.load reads.")] = None,
    html: options.Html = None,
    svg: options.Svg = None,
    as_json: options.Json = False,
    steps: Annotated[bool, typer.Option("--steps", help="With --json: every step and its tree, too.")] = False,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="With --json or --save: the target's log-probability of each new token.")
    ] = False,
) -> None:
    """Generate text, streamed, with a summary of what speculation did; or for whole files, into a folder."""
    check_source(prompt, prompts, out, tensor_parallel, show_tree)
    if as_json and show_tree:
        raise InputError("--show-tree draws beside the text, and --json --steps has every tree: leave one out")
    if steps and not as_json:
        raise InputError("--steps is of --json: add it, or draw a tree with --show-tree")
    if prompts and (save or html or svg or logprobs):
        raise InputError("--save, --html, --svg and --logprobs are of one prompt's result: leave them out, for many")
    if logprobs and not (as_json or save):
        raise InputError("--logprobs are numbers beside the text: add --json, which prints them, or --save FILE")
    if profile and tree != "auto":
        raise InputError(f"--profile is of what --tree auto learns, and --tree {tree} learns nothing: leave one out")
    if save_drafts and not online:
        raise InputError("--save-drafts writes what heads have learnt, and nothing learns: add --online")
    given = profile if profile and profile.exists() else None
    models: dict[str, Any] = {"dtype": dtype, "device": device, "confidence_gate": confidence_gate, "online": online}
    models |= {"tensor_parallel": tensor_parallel, "quantize": quantize, "device_map": device_map}
    models |= {"max_memory": max_memory, "offload_folder": offload_folder}
    asked: dict[str, Any] = {"raw": raw, "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    asked |= {"top_p": top_p, "top_k": top_k, "penalty_alpha": penalty_alpha}
    text = "" if prompt is None else read_prompt(prompt, tensor_parallel)
    with loading():
        policy = build_policy(tree, nodes, depth, expansion, given)
        lines = read_files(prompts) if prompts else []
        models["memory"] = read_memory(memory)
    decoder = options.load_decoder(target, draft, tree=policy, **models)
    result: Any
    if out:
        result = generate_files(decoder, lines, out, max_rows, asked)
    else:
        result = streamed(decoder.stream(text, **asked, logprobs=logprobs), quiet=as_json)
    interrupted = not out and result.finish_reason == UNFINISHED
    if not decoder.target.ranks.is_first:
        return
    if profile and not (given or interrupted):
        policy.save(profile)
        print(f"profile: wrote {profile}; the next runs start from it", file=sys.stderr)
    if memory:
        decoder.memory.save(memory)
    if save_drafts:
        decoder.save_drafts(save_drafts)
    if save:
        result.save(save)
    if html:
        result.to_html(html)
    if svg:
        result.to_svg(svg)
    if as_json:
        every = {"steps": [step.to_dict() for step in result.steps]} if steps and not prompts else {}
        print_json(result.to_dict() | every)
    elif prompts:
        print(result)
    else:
        summarise(result, show_tree)
    if interrupted:
        raise SystemExit(INTERRUPTED)


def check_source(
    prompt: str | None, prompts: list[Path] | None, out: Path | None, processes: int, show_tree: bool
) -> None:
    """Raise for options that do not say where prompts come from and where texts go."""
    if (prompt is None) == (not prompts):
        raise InputError("give a prompt, or --prompts FILE and --out DIR, one of the two")
    if bool(prompts) != (out is not None):
        raise InputError("--prompts FILE and --out DIR go together: many texts are written to a folder")
    if prompts and processes > 1:
        raise InputError("--prompts is read by one process: leave out --tensor-parallel, or give one prompt")
    if prompts and show_tree:
        raise InputError("--show-tree draws the tree of one text: give one prompt, or leave it out")


def read_files(paths: list[Path]) -> Any:
    """Return the lines of files of prompts."""
    from specinfer.batch import read_prompts

    return read_prompts(paths)


def generate_files(decoder: Any, lines: Any, out: Path, max_rows: int, asked: dict[str, Any]) -> Any:
    """Generate for lines of files into a folder, under a bar; return the summary."""
    from specinfer.batch import generate_files

    with resumable(out):
        return generate_files(decoder, lines, out, max_rows=max_rows, progress=stage_bars(), **asked)


def streamed(stream: Any, quiet: bool) -> Any:
    """Print the pieces of a text as they come; return the result, of what there is when Ctrl-C is pressed."""
    printed = 0
    with busy("generating") as line:
        try:
            for piece in stream:
                if not quiet:
                    line.close()
                    print(piece, end="", flush=True)
                    printed += len(piece)
        except KeyboardInterrupt:
            stream.close()
            if not stream.result.steps:
                raise
    if not quiet:
        print(stream.result.text[printed:], end="")
    return stream.result


def summarise(result: Any, show_tree: bool) -> None:
    """Print what speculation did, and the tree that gained most."""
    print("\n", end="", flush=True)
    print(file=sys.stderr)
    print_stats(result, sys.stderr)
    if show_tree:
        from specinfer.results import best_step

        print(f"\n{drawn(result, best_step(result.steps))}")


def print_stats(result: Any, file: TextIO) -> None:
    """Print what speculation did, and why."""
    stats = result.stats
    contributions = stats.drafts if len(stats.drafts) > 1 else ()
    print(stats, *contributions, *(f"note: {note}" for note in stats.notes), sep="\n", file=file, flush=True)


def tree(
    prompt: options.PromptText,
    target: options.Target = None,
    draft: options.Drafts = None,
    tree: options.Tree = "best-first",
    nodes: options.Nodes = None,
    depth: options.Depth = None,
    expansion: options.Expansion = "3,2,1,1",
    step: Annotated[str, typer.Option(help="Number of a step, or best: the one that gained most.")] = BEST,
    max_new_tokens: options.NewTokens = 32,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantize: options.Quantize = None,
    tensor_parallel: options.TensorParallel = 1,
    device_map: options.DeviceMap = None,
    max_memory: options.MaxMemory = None,
    offload_folder: options.OffloadFolder = None,
    raw: options.Raw = False,
    html: options.Html = None,
    svg: options.Svg = None,
    as_json: options.Json = False,
) -> None:
    """Draw the tree of one step of a text: what was drafted, and what became of it."""
    check_step(step)
    models: dict[str, Any] = {"dtype": dtype, "device": device, "tensor_parallel": tensor_parallel}
    models |= {"quantize": quantize, "device_map": device_map, "max_memory": max_memory}
    models |= {"offload_folder": offload_folder}
    text = read_prompt(prompt, tensor_parallel)
    with loading():
        policy = build_policy(tree, nodes, depth, expansion)
    decoder = options.load_decoder(target, draft, tree=policy, **models)
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    with busy("generating"):
        result = decoder.generate(text, raw=raw, max_new_tokens=max_new_tokens, **sampling)
    if not decoder.target.ranks.is_first:
        return
    number = step_index(step, result)
    if html:
        result.to_html(html)
    if svg:
        result.steps[number].to_svg(svg)
    print_json({"step": number + 1, **result.steps[number].to_dict()}) if as_json else print(drawn(result, number))


def check_step(step: str) -> None:
    """Raise `InputError` for what is neither a step's number nor the word for the best one."""
    if step != BEST and (not step.isdecimal() or int(step) < 1):
        raise InputError(f"step {step!r} is no step: give a number from 1 on, or {BEST}")


def step_index(step: str, result: Any) -> int:
    """Return the number, from 0, of the step that was asked for; raise `InputError` if there is none."""
    from specinfer.results import best_step

    check_step(step)
    if step == BEST:
        return best_step(result.steps)
    if int(step) > (count := len(result.steps)):
        raise InputError(f"step {step}: the text has {count} steps; ask for more tokens, or for an earlier one")
    return int(step) - 1


def build_policy(tree: str, nodes: int | None, depth: int | None, expansion: str, profile: Path | None = None) -> Any:
    """Return the growth policy that the options name, or None for no speculation."""
    from specinfer.adaptive.policy import Auto
    from specinfer.decoder import DEFAULT_TREE
    from specinfer.tree import BestFirst, Chain, Expansion, Sampled

    for name, value in (("nodes", nodes), ("depth", depth)):
        if value is not None and value < 1:
            raise InputError(f"--{name} {value} drafts nothing: give at least 1, or --tree none")
    widths, levels = options.expansion_widths(expansion), depth or DEFAULT_TREE.max_depth
    makers = {
        "auto": lambda: Auto(nodes, depth, profile),
        "best-first": lambda: BestFirst(nodes or DEFAULT_TREE.max_nodes, levels, DEFAULT_TREE.min_probability),
        "expansion": lambda: Expansion(widths),
        "chain": lambda: Chain(levels),
        "sampled": lambda: Sampled(widths),
        "none": lambda: None,
    }
    if tree not in makers:
        advice = did_you_mean(tree, makers, f"choose {', '.join(makers)}")
        raise InputError(f"--tree {tree!r} is unknown: {advice}")
    return makers[tree]()


def read_memory(path: Path | None) -> Any:
    """Return the memory that a file holds, or a new one if there is no such file."""
    from specinfer.drafts.lookup.memory import Memory

    return path and (Memory.load(path) if path.exists() else Memory())


def read_prompt(prompt: str, processes: int) -> str:
    """Return the prompt, from standard input if it is "-"."""
    if prompt == "-" and processes > 1:
        advice = "and one standard input: give the prompt"
        raise InputError(f"--tensor-parallel {processes} starts {processes} processes, {advice}")
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()  # bytes that are not text may arrive as halves of surrogate pairs
    except UnicodeError as error:
        source = "standard input" if prompt == "-" else "the prompt"
        raise InputError(f"{source} is not text in UTF-8 ({error}): convert it first") from error
    if not text.strip():
        raise InputError("the prompt is empty: there is nothing to continue")
    return text


def drawn(result: Any, number: int) -> str:
    """Draw one step's tree with its accepted path and bonus token, as standard output can show it."""
    from specinfer import viz

    step = result.steps[number]
    gained = f"{len(step.path)} of {step.tree.num_drafted} drafted tokens accepted on a path"
    return f"step {number + 1}: {gained}\n{viz.text(result, sys.stdout, step=number)}"
