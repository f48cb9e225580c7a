"""Speed next to transformers' own decoding, interleaved prompt by prompt.

    python benchmarks/side_by_side.py --target DIR --draft ngram --draft DIR --prompts code.jsonl chat.jsonl

Methods, all greedy: `generate`, assisted generation with the first draft model, our loop without speculation, and our
trees.  Prints medians over prompts of tokens per target pass and tokens per second, and the ratio to `generate` with a
95 % bootstrap interval of its median.  Every finished prompt is written to --out at once.
"""

import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from common import decoder, load_models, parser, policies, read_prompts
from tqdm import tqdm

from specinfer import ModelDraft


def main() -> None:
    """Measure and print a table."""
    p = parser(__doc__)
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--out", type=Path, default=Path("side_by_side.jsonl"))
    args = p.parse_args()
    model, tokenizer, drafts = load_models(args, args.dtype)
    methods = build_methods(model, tokenizer, drafts, args)
    prompts = read_prompts(args.prompts, args.count)
    for run in methods.values():
        run(prompts[0])  # warm-up, not counted
    with args.out.open("w") as out:
        for index, prompt in enumerate(tqdm(prompts, unit="prompt")):
            for offset in range(len(methods)):  # rotate, so that no method always comes first
                name = list(methods)[(index + offset) % len(methods)]
                out.write(json.dumps({"prompt": index, "method": name, **methods[name](prompt)}) + "\n")
            out.flush()
    print_table([json.loads(line) for line in args.out.read_text().splitlines()], list(methods))


def build_methods(model: Any, tokenizer: Any, drafts: list[Any], args: Any) -> dict[str, Callable[[str], Any]]:
    """Return name -> function from a prompt to tokens, passes, seconds."""
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    plain = decoder(model, tokenizer, drafts, None)
    trees = decoder(model, tokenizer, drafts, policies(args.nodes, args.depth)["best-first"])

    def ours(engine: Any) -> Callable[[str], Any]:
        def run(prompt: str) -> dict[str, Any]:
            started = perf_counter()
            stats = engine.generate(prompt, **options).stats
            outside = perf_counter() - started  # from the prompt to the text: more than theirs, which starts from ids
            stages = {**stats.seconds.to_dict(), "seconds": outside}
            return {"tokens": stats.new_tokens, "passes": stats.target_passes, **stages}

        return run

    def theirs(**extra: Any) -> Callable[[str], Any]:
        def run(prompt: str) -> dict[str, Any]:
            ids = torch.tensor([plain.open(prompt, **options).rows[0].ids])
            passes = 0

            def count(*_: Any) -> None:
                nonlocal passes
                passes += 1

            hook = model.register_forward_pre_hook(count)
            started = perf_counter()
            output = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **extra)
            seconds = perf_counter() - started
            hook.remove()
            return {"tokens": output.shape[1] - ids.shape[1], "passes": passes, "seconds": seconds}

        return run

    methods = {"generate": theirs()}
    if assistants := [draft for draft in drafts if isinstance(draft, ModelDraft)]:
        methods["assisted generation"] = theirs(assistant_model=assistants[0].model.model)
    methods["specinfer, no speculation"] = ours(plain)
    names = " + ".join(draft.name for draft in trees.drafts)
    methods[f"specinfer, trees of {names}"] = ours(trees)
    return methods


def print_table(lines: list[dict[str, Any]], methods: list[str]) -> None:
    """Print one row per method."""
    rng = np.random.default_rng(0)

    def column(method: str, value: Callable[[dict[str, Any]], float]) -> np.ndarray:
        return np.array([value(line) for line in lines if line["method"] == method])

    base = column(methods[0], lambda line: line["tokens"] / line["seconds"])
    print(f"{'method':44} tokens/pass  tokens/s  ratio [95 % interval]  worst  bookkeeping")
    for method in methods:
        rate = column(method, lambda line: line["tokens"] / line["seconds"])
        tau = column(method, lambda line: line["tokens"] / line["passes"])
        ratio = rate / base
        medians = np.median(rng.choice(ratio, (2000, len(ratio))), axis=1)
        low, high = np.quantile(medians, [0.025, 0.975])
        share = column(method, lambda line: line.get("bookkeeping", float("nan")) / line["seconds"])
        print(
            f"{method:44} {np.median(tau):11.2f} {np.median(rate):9.2f}  {np.median(ratio):5.2f} "
            f"[{low:.2f}, {high:.2f}]    {ratio.min():5.2f}  {np.median(share):10.1%}"
        )


if __name__ == "__main__":
    main()
