"""``specinfer generate`` and ``specinfer tree``: text as it is written, files of prompts, and the tree of one step.

Knows: options, standard input and output.  Does not know: how text is decoded.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from specinfer.cli import options
from specinfer.cli.terminal import print_json, stage_bars
from specinfer.errors import InputError


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
    html: Annotated[Path | None, typer.Option(help="File for the result as a page.")] = None,
    as_json: options.Json = False,
    steps: Annotated[bool, typer.Option("--steps", help="With --json: every step and its tree, too.")] = False,
) -> None:
    """Generate text, streamed, with a summary of what speculation did; or for whole files, into a folder."""
    check_source(prompt, prompts, out, tensor_parallel, show_tree)
    if as_json and show_tree:
        raise InputError("--show-tree draws beside the text, and --json --steps has every tree: leave one out")
    if steps and not as_json:
        raise InputError("--steps is of --json: add it, or draw a tree with --show-tree")
    if prompts and (save or html):
        raise InputError("--save and --html are of one prompt's result: leave them out, the folder has all texts")
    if profile and tree != "auto":
        raise InputError(f"--profile is of what --tree auto learns, and --tree {tree} learns nothing: leave one out")
    if save_drafts and not online:
        raise InputError("--save-drafts writes what heads have learnt, and nothing learns: add --online")
    given = profile if profile and profile.exists() else None
    policy = build_policy(tree, nodes, depth, expansion, given)
    models: dict[str, Any] = {"dtype": dtype, "device": device, "confidence_gate": confidence_gate, "online": online}
    models |= {
        "tensor_parallel": tensor_parallel,
        "quantize": quantize,
        **options.placement(device_map, max_memory, offload_folder),
    }
    models["memory"] = read_memory(memory)
    asked: dict[str, Any] = {"raw": raw, "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    asked |= {"top_p": top_p, "top_k": top_k, "penalty_alpha": penalty_alpha}
    result: Any
    if prompts and out:
        lines = read_files(prompts)
        decoder = options.load_decoder(target, draft, tree=policy, **models)
        result = generate_files(decoder, lines, out, max_rows, asked)
    else:
        text, decoder = prepare(str(prompt), target, draft, policy, **models)
        result = streamed(decoder.stream(text, **asked), quiet=as_json)
    if not decoder.target.ranks.is_first:
        return
    if profile and not given:
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
    if as_json:
        every = {"steps": [step.to_dict() for step in result.steps]} if steps and not prompts else {}
        print_json(result.to_dict() | every)
    elif prompts:
        print(result)
    else:
        summarise(decoder, result, show_tree)


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

    return generate_files(decoder, lines, out, max_rows=max_rows, progress=stage_bars(), **asked)


def streamed(stream: Any, quiet: bool) -> Any:
    """Print the pieces of a text as they come; return the result."""
    for piece in stream:
        if not quiet:
            print(piece, end="", flush=True)
    return stream.result


def summarise(decoder: Any, result: Any, show_tree: bool) -> None:
    """Print what speculation did, and the tree that gained most."""
    print()
    stats = result.stats
    contributions = stats.drafts if len(stats.drafts) > 1 else ()
    notes = [f"note: {note}" for note in stats.notes]
    print("", stats, *contributions, *notes, sep="\n", file=sys.stderr, flush=True)
    if show_tree:
        from specinfer.results import best_step

        print(f"\n{drawn(result, best_step(result.steps))}")


def tree(
    prompt: options.PromptText,
    target: options.Target = None,
    draft: options.Drafts = None,
    tree: options.Tree = "auto",
    nodes: options.Nodes = None,
    depth: options.Depth = None,
    expansion: options.Expansion = "3,2,1,1",
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
    as_json: options.Json = False,
) -> None:
    """Draw the tree of one step: the first in which anything was drafted, else the last of --max-new-tokens."""
    policy = build_policy(tree, nodes, depth, expansion)
    models: dict[str, Any] = {"dtype": dtype, "device": device, "tensor_parallel": tensor_parallel}
    models |= {"quantize": quantize} | options.placement(device_map, max_memory, offload_folder)
    text, decoder = prepare(prompt, target, draft, policy, **models)
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    run = decoder.open(text, raw=raw, max_new_tokens=max_new_tokens, **sampling)
    for ((_, step),) in run:
        if len(step.tree) > 1:
            break
    run.close()
    (result,) = run.results()
    number = len(result.steps)
    print_json({"step": number, **step.to_dict()}) if as_json else print(drawn(result, number - 1))


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
        raise InputError(f"--tree {tree!r} is unknown: choose {', '.join(makers)}")
    return makers[tree]()


def read_memory(path: Path | None) -> Any:
    """Return the memory that a file holds, or a new one if there is no such file."""
    from specinfer.drafts.memory import Memory

    return path and (Memory.load(path) if path.exists() else Memory())


def prepare(prompt: str, target: str | None, drafts: list[str] | None, policy: Any, **models: Any) -> tuple[str, Any]:
    """Read the prompt, from standard input if it is "-", then load the models; return the text and a decoder."""
    if prompt == "-" and (count := models["tensor_parallel"]) > 1:
        raise InputError(f"--tensor-parallel {count} starts {count} processes, and one standard input: give the prompt")
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()  # bytes that are not text may arrive as halves of surrogate pairs
    except UnicodeError as error:
        source = "standard input" if prompt == "-" else "the prompt"
        raise InputError(f"{source} is not text in UTF-8 ({error}): convert it first") from error
    if not text.strip():
        raise InputError("the prompt is empty: there is nothing to continue")
    return text, options.load_decoder(target, drafts, tree=policy, **models)


def drawn(result: Any, number: int) -> str:
    """Draw one step's tree with its accepted path and bonus token, as standard output can show it."""
    from specinfer import viz

    step = result.steps[number]
    gained = f"{len(step.path)} of {step.tree.num_drafted} drafted tokens accepted on a path"
    return f"step {number + 1}: {gained}\n{viz.text(result, sys.stdout, step=number)}"
