"""What the host does between passes, in milliseconds a step, by rows; and the time of steps with very large trees.

    python benchmarks/bookkeeping.py --prompts prompts/code.jsonl prompts/chat.jsonl
        [--rows 1 8 32] [--rounds 5] [--other PYTHON]

The default target with its default drafts decodes batches.  Bookkeeping is a step without the target's and the drafts'
passes: ranking, look-ups, growing, merging, fitting, layout, verification, pruning, learning.  Then a tiny model, as
its own draft, scores trees of 256, 1,024 and 4,096 nodes.  ``--other`` is the interpreter of an environment with
another version of specinfer; both take turns.  Figures are medians.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import Worker, decoder, read_prompts, serve

TREES = {"auto": "auto", "24 nodes": (23, 8)}
LARGE = (256, 1024, 4096)


def tiny() -> Any:
    """Return a model whose passes cost next to nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=5000, max_position_embeddings=8192, initializer_range=0.2, **sizes)
    return LlamaForCausalLM(config).eval()


def worker(target: str | None, dtype: str, prompts: list[str], new_tokens: int) -> None:
    """Decode on request, with the version of specinfer that this interpreter has."""
    from specinfer import BestFirst
    from specinfer.loading import load

    loaded = load(target, dtype)
    decoders = {
        name: decoder(loaded.model, loaded.tokenizer, ["auto"], tree if tree == "auto" else BestFirst(*tree))
        for name, tree in TREES.items()
    }
    small = tiny()

    def answer(tree: str = "", rows: int = 1, nodes: int = 0) -> Any:
        if nodes:
            run = iter(decoder(small, None, [small], BestFirst(nodes, 8)).open([1, 2, 3], max_new_tokens=40))
            next(run)
            return 1e3 * next(run)[0][1].seconds.total
        batch = (prompts * rows)[:rows]
        results = decoders[tree].generate(batch, max_new_tokens=new_tokens)
        steps = max(len(result.steps) for result in results)
        return 1e3 * results[0].stats.seconds.bookkeeping / steps

    serve(answer)


def main() -> None:
    """Measure all in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--other")
    parser.add_argument("--worker", action="store_true")
    args = parser.parse_args()
    if args.worker:
        worker(args.target, args.dtype, read_prompts(args.prompts, max(args.rows)), args.max_new_tokens)
        return
    options = [
        "--dtype",
        args.dtype,
        "--max-new-tokens",
        str(args.max_new_tokens),
        "--prompts",
        *map(str, args.prompts),
    ]
    options += ["--rows", *map(str, args.rows), *(["--target", args.target] if args.target else [])]
    workers = {"": Worker(sys.executable, __file__, *options)}
    if args.other:
        workers["other "] = Worker(args.other, __file__, *options)
    questions: list[dict[str, Any]] = [{"tree": tree, "rows": rows} for rows in args.rows for tree in TREES]
    questions += [{"nodes": nodes} for nodes in LARGE]
    taken: dict[tuple[str, int], list[float]] = {(who, i): [] for i in range(len(questions)) for who in workers}
    for turn in range(args.rounds + 1):
        for who, number in taken:
            milliseconds = workers[who].ask(**questions[number])
            if turn:  # the first one warms up
                taken[who, number].append(milliseconds)
    print(f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads; milliseconds a step")
    for number, question in enumerate(questions):
        what = (
            f"{question['nodes']} nodes, whole step"
            if "nodes" in question
            else "{rows} rows, {tree}".format(**question)
        )
        print(f"{what:24}", *(f"{who}{median(taken[who, number]):.2f}" for who in workers), sep="  ")


if __name__ == "__main__":
    main()
