"""What the measuring scripts share: models, prompts, first differences, and workers to compare.

A worker is a process with its own interpreter, so that two versions of specinfer can take turns.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from specinfer import BestFirst, Chain, Expansion, ModelDraft, SpeculativeDecoder
from specinfer.decoder import DEFAULT_TREE, WORDS
from specinfer.evaluation.compare.runner import common_prefix
from specinfer.loading import load


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts take."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", help="hub name or folder; default SmolLM2-135M-Instruct")
    p.add_argument("--draft", action="append", default=[], help="a model, ngram, bundled or auto; repeat to merge")
    p.add_argument("--prompts", nargs="+", type=Path, required=True, help='JSON lines with "prompt" and "split"')
    p.add_argument("--count", type=int, default=20, help="prompts in all, split evenly between the files")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--nodes", type=int, default=12)
    p.add_argument("--depth", type=int, default=5)
    return p


def read_prompts(files: list[Path], count: int) -> list[str]:
    """Return the first `dev` prompts of each file, ``count`` in all."""
    from specinfer.evaluation.compare.prompts import read_prompt_file  # workers may be other versions

    each = -(-count // len(files))
    return [prompt for file in files for _, prompt in read_prompt_file(file, "dev", each)][:count]


def load_target(name: str | None, dtype: str, activations: str | None = None) -> tuple[Any, Any]:
    """Return a target model and its tokenizer."""
    loaded = load(name, dtype, activations=activations)
    return loaded.model, loaded.tokenizer


def weight_bytes(model: Any) -> int:
    """Return the bytes of a model's weights, each counted once; a quantised file's are buffers."""
    packed = {buffer for name, buffer in model.named_buffers() if name.endswith(".packed")}
    return sum(weight.nbytes for weight in {*model.parameters(), *packed})


def load_models(args: argparse.Namespace, dtype: str) -> tuple[Any, Any, list[Any]]:
    """Return target model, its tokenizer and the drafts."""
    drafts = [name if name in WORDS else ModelDraft(*load(name, dtype)) for name in args.draft or ["auto"]]
    return *load_target(args.target, dtype, getattr(args, "activations", None)), drafts


def policies(nodes: int, depth: int) -> dict[str, Any]:
    """Return the tree policies that are compared."""
    best_first = BestFirst(nodes, depth, DEFAULT_TREE.min_probability)
    return {"auto": "auto", "best-first": best_first, "expansion": Expansion((2, 2, 1)), "chain": Chain(depth)}


def difference(a: list[int], b: list[int]) -> int | None:
    """Return where two lists of ids first differ, None if they do not."""
    return None if a == b else common_prefix(a, b)


def decoder(model: Any, tokenizer: Any, drafts: list[Any], tree: Any) -> SpeculativeDecoder:
    """Return a decoder; ``tree`` None decodes without speculation."""
    return all_or_none(SpeculativeDecoder(model, tokenizer, drafts=drafts, tree=tree))


def all_or_none(made: SpeculativeDecoder) -> SpeculativeDecoder:
    """Return a decoder; end the script unless all of its models' passes are compiled, or none are."""
    if len({network.ways.fast is None for network in made.networks}) > 1:
        raise SystemExit(f"{made.passes}: figures would be of neither; run `specinfer compile` for these models")
    return made


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Worker:
    """A script as a process that answers one question at a time.

    Args:
        python: its interpreter.
        script: calls `serve` when it is run with ``--worker`` and these arguments.
    """

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        self.process = subprocess.Popen(
            [python, "-P", script, "--worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, **question: Any) -> Any:
        """Return the worker's answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended: see above")
        return json.loads(line)


def print_rows(rows: Iterable[dict[str, Any]]) -> None:
    """Print a table for programs: a JSON object a line, as `figures.py` reads it."""
    for row in rows:
        print(json.dumps(row), flush=True)


def serve(answer: Callable[..., Any]) -> None:
    """Answer the questions on stdin; anything else that is printed goes to stderr."""
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=out, flush=True)
