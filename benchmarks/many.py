"""Tokens a second over many prompts, some rows at a time: specinfer with and without speculation, and transformers.

    python benchmarks/many.py --prompts prompts/code.jsonl prompts/chat.jsonl --count 32 --max-new-tokens 64
        --rows 1 4 16 [--rounds 2] [--vary] [--dtype float32] [--methods auto plain generate generate_batch] [--steps]
        [--out FILE] [--json]

``generate_many`` with ``auto`` and without speculation (plain), transformers' ``generate`` on batches of as many rows,
padded on the left, in the order of the file, and its continuous batching, ``generate_batch``, with as many requests a
batch.  All take turns, greedily, on all prompts, in reverse every other time; prompts count.  The table has all tokens
over all seconds, medians of the rounds, and the median of auto's ratio to plain within a round; tokens after the end of
a text do not count.  With ``--vary`` texts have half to one and a half times as many tokens: else most rows end
together without speculation.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, stdev
from time import perf_counter
from typing import Any

import torch
from common import decoder, print_rows, read_prompts
from transformers import ContinuousBatchingConfig, GenerationConfig

from specinfer import SpeculativeDecoder
from specinfer.loading import load

METHODS = ["auto", "plain", "generate", "generate_batch"]
Method = Callable[[int], int]  # rows at a time -> tokens


def decoders(args: argparse.Namespace) -> dict[str, SpeculativeDecoder]:
    """Return the decoders, with and without speculation, of one target."""
    loaded = load(args.target, args.dtype)
    return {
        "auto": decoder(loaded.model, loaded.tokenizer, ["auto"], "auto"),
        "plain": SpeculativeDecoder(loaded.model, loaded.tokenizer, [], None),
    }


def methods(args: argparse.Namespace) -> dict[str, Method]:
    """Return what answers all prompts, by name."""
    auto, plain = decoders(args).values()
    model: Any = plain.target.model
    prompts = auto.read(read_prompts(args.prompts, args.count)).rows
    limits = [new_tokens(args, number) for number in range(len(prompts))]
    end = model.generation_config.eos_token_id
    ends = {end} if isinstance(end, int) else {*(end or ())}
    pad = min(ends, default=0)

    def ours(decoder: SpeculativeDecoder) -> Method:
        def run(rows: int) -> int:
            asked = ({"prompt": ids, "max_new_tokens": limit} for ids, limit in zip(prompts, limits, strict=True))
            found = decoder.generate_many(asked, max_rows=rows, temperature=0)
            return sum(len(done.result.token_ids) for done in found if done.result)

        return run

    def padded(rows: int) -> int:
        tokens = 0
        for start in range(0, len(prompts), rows):
            batch, most = prompts[start : start + rows], limits[start : start + rows]
            longest = max(map(len, batch))
            ids = torch.tensor([[pad] * (longest - len(row)) + row for row in batch])
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch])
            options: dict[str, Any] = {"max_new_tokens": max(most), "do_sample": False, "pad_token_id": pad}
            output = model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()
            tokens += sum(counted(row[:limit], ends) for row, limit in zip(output, most, strict=True))
        return tokens

    def continuous(rows: int) -> int:
        config = GenerationConfig(
            do_sample=False, max_new_tokens=args.max_new_tokens, eos_token_id=[*ends], pad_token_id=pad
        )
        limit = ContinuousBatchingConfig(max_requests_per_batch=rows)
        options: dict[str, Any] = {"generation_config": config, "continuous_batching_config": limit}
        found = model.generate_batch(prompts, **options, progress_bar=False)
        return sum(counted(list(output.generated_tokens), ends) for output in found.values())

    found = {"auto": ours(auto), "plain": ours(plain), "generate": padded, "generate_batch": continuous}
    return {name: found[name] for name in args.methods}


def in_turns(args: argparse.Namespace, made: dict[str, SpeculativeDecoder], rows: int) -> list[dict[str, float]]:
    """Return the seconds that each decoder takes for all prompts, by round; they take turns step by step."""
    prompts = made["plain"].read(read_prompts(args.prompts, args.count)).rows

    def steps(decoder: SpeculativeDecoder) -> Iterator[None]:
        scheduler = decoder.scheduler(rows)
        for number, ids in enumerate(prompts):
            scheduler.add(decoder.prepare(ids, max_new_tokens=new_tokens(args, number), temperature=0))
        while scheduler.step():
            yield

    rounds = []
    for number in range(args.rounds):
        running = {name: steps(made[name]) for name in list(made)[:: 1 - 2 * (number % 2)]}
        spent = dict.fromkeys(made, 0.0)
        while running:
            for name in list(running):
                started, ended = perf_counter(), object()
                if next(running[name], ended) is ended:
                    del running[name]
                spent[name] += perf_counter() - started
        rounds.append(spent)
    return rounds


def compare_steps(args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Yield the ratio of auto to plain for each number of rows, and its standard error."""
    made = decoders(args)
    for rows in args.rows:
        ratios = [spent["plain"] / spent["auto"] for spent in in_turns(args, made, rows)[1:]]
        yield {"rows": rows, "ratio": median(ratios), "error": stdev(ratios) / len(ratios) ** 0.5}


def new_tokens(args: argparse.Namespace, number: int) -> int:
    """Return how many tokens a prompt's text may have."""
    usual: int = args.max_new_tokens
    return usual // 2 + 7 * number % usual if args.vary else usual


def counted(ids: list[int], ends: set[int]) -> int:
    """Return how many tokens a text has, its end included."""
    return next((place for place, token in enumerate(ids, 1) if token in ends), len(ids))


def main() -> None:
    """Measure, print a line for each number of rows, and maybe write JSON."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", help="hub name or folder; default SmolLM2-135M-Instruct")
    p.add_argument("--prompts", nargs="+", type=Path, required=True, help='JSON lines with "prompt" and "split"')
    p.add_argument("--count", type=int, default=32, help="prompts in all, split evenly between the files")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--vary", action="store_true", help="texts of half to one and a half times as many tokens")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS[:3])
    p.add_argument("--steps", action="store_true", help="auto and plain alone, step by step in turns; 3 rounds or more")
    p.add_argument("--out", type=Path)
    p.add_argument("--json", action="store_true", help="print a JSON object a row in place of the table")
    args = p.parse_args()
    if args.steps and args.rounds < 3:
        p.error("--steps leaves the first round out: ask for --rounds 3 or more")
    if args.vary and "generate_batch" in args.methods and not args.steps:
        p.error("generate_batch takes one length for all texts: leave it out, or --vary")
    measured = []
    for row in compare_steps(args) if args.steps else compare_runs(args):
        measured.append(row)
        print_rows([row]) if args.json else print(" | ".join(f"{key} {value:.4g}" for key, value in row.items()))
    if args.out:
        args.out.write_text(json.dumps(measured, indent=1))


def compare_runs(args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Yield the rates of the methods for each number of rows."""
    runs = methods(args)
    for rows in args.rows:
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(args.rounds):
            for name, run in list(runs.items())[:: 1 - 2 * (number % 2)]:
                started = perf_counter()
                tokens = run(rows)
                rates[name].append(tokens / (perf_counter() - started))
        row = {"rows": rows, **{name: median(found) for name, found in rates.items()}}
        if {"auto", "plain"} <= rates.keys():
            row["ratio"] = median(a / b for a, b in zip(rates["auto"], rates["plain"], strict=True))
        yield row


if __name__ == "__main__":
    main()
