"""``specinfer generate`` and ``specinfer tree``: text, streamed, and the tree of one step."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from specinfer.cli.options import (
    DepthOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    ExpansionOption,
    JsonOption,
    NodesOption,
    PromptArgument,
    RawOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    TokensOption,
    TopKOption,
    TopPOption,
    TreeOption,
)
from specinfer.cli.terminal import print_json, quieten
from specinfer.errors import InputError


def generate(
    prompt: PromptArgument,
    target: TargetOption = None,
    draft: DraftOption = None,
    tree: TreeOption = "auto",
    nodes: NodesOption = None,
    depth: DepthOption = 8,
    expansion: ExpansionOption = "3,2,1,1",
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
    profile: Annotated[
        Path | None, typer.Option(help="What auto learnt: used if the file is there, so runs repeat; else written.")
    ] = None,
    raw: RawOption = False,
    show_tree: Annotated[bool, typer.Option("--show-tree", help="Draw the tree that gained most.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Generate text, streamed, with a summary of what speculation did."""
    if as_json and show_tree:
        raise InputError("--show-tree draws beside the text, and --json has every step's tree: leave one out")
    if profile and tree != "auto":
        raise InputError(f"--profile is of what --tree auto learns, and --tree {tree} learns nothing: leave one out")
    given = profile if profile and profile.exists() else None
    policy = build_policy(tree, nodes, depth, expansion, given)
    text, decoder = prepare(prompt, target, draft, policy, dtype, device, confidence_gate)
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    stream = decoder.stream(text, seed=seed, raw=raw, **options)
    for piece in stream:
        if not as_json:
            print(piece, end="", flush=True)
    result = stream.result
    if profile and not given:
        policy.save(profile)
        print(f"profile: wrote {profile}; the next runs start from it", file=sys.stderr)
    if as_json:
        print_json(result.to_dict())
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


def tree(
    prompt: PromptArgument,
    target: TargetOption = None,
    draft: DraftOption = None,
    tree: TreeOption = "auto",
    nodes: NodesOption = None,
    depth: DepthOption = 8,
    expansion: ExpansionOption = "3,2,1,1",
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
    """Draw the tree of one step: the first in which anything was drafted, else the last of --max-new-tokens."""
    policy = build_policy(tree, nodes, depth, expansion)
    text, decoder = prepare(prompt, target, draft, policy, dtype, device)
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    run = decoder.open(text, seed=seed, raw=raw, **options)
    for ((_, step),) in run:
        if len(step.tree) > 1:
            break
    run.close()
    number = len(run.results()[0].steps)
    if as_json:
        print_json({"step": number, **step.to_dict()})
    else:
        print(drawn(decoder, step, number))


def build_policy(tree: str, nodes: int | None, depth: int, expansion: str, profile: Path | None = None) -> Any:
    """Return the growth policy that the options name, or None for no speculation."""
    from specinfer.adaptive.policy import MAX_NODES, Auto
    from specinfer.decoder import DEFAULT_TREE
    from specinfer.tree import BestFirst, Chain, Expansion, Sampled

    for name, value in (("nodes", nodes), ("depth", depth)):
        if value is not None and value < 1:
            raise InputError(f"--{name} {value} drafts nothing: give at least 1, or --tree none")
    levels = numbers(expansion)
    makers = {
        "auto": lambda: Auto(nodes or MAX_NODES, depth, profile),
        "best-first": lambda: BestFirst(nodes or DEFAULT_TREE.max_nodes, depth, DEFAULT_TREE.min_probability),
        "expansion": lambda: Expansion(levels),
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
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()  # bytes that are no text may come as halves of surrogate pairs
    except UnicodeError as error:
        source = "standard input" if prompt == "-" else "the prompt"
        raise InputError(f"{source} is not text in UTF-8 ({error}): convert it first") from error
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


def numbers(text: str) -> tuple[int, ...]:
    """Return the expansion that an option lists."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--expansion {text!r} is not a list of whole numbers such as 1,1,3") from None
    if any(number < 1 for number in found):
        raise InputError(
            f"--expansion {text!r}: every level needs at least one child; leave levels out to stop earlier"
        )
    return found
