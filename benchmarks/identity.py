"""Are the ids the same with and without speculation?  On real models and prompts.

    python benchmarks/identity.py --target DIR --draft ngram --draft DIR --prompts prompts/code.jsonl prompts/chat.jsonl

Greedy: ids against `generate(do_sample=False)` for each tree, prompt by prompt and in ragged batches of four.  With
--dtype bfloat16 they are compared with our own loop without speculation, for transformers rounds elsewhere.
Sampling (--sampling): ids for one seed with trees, a chain, no speculation and in batches, at T = 1 and at T = 0.7 with
top_p = 0.9.  A difference is printed with the gap between the two largest logits where it begins.  The exit code is 1
if ids differ where that gap is 0.001 or more (a smaller one is a near-tie that float32 rounding decides).
"""

import json
import sys
from typing import Any

import torch
from common import decoder, difference, load_models, parser, policies, read_prompts
from tqdm import tqdm

from specinfer.evaluation.compare.runner import top2_gap

DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "T=1": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "T=0.7 top_p=0.9": {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9},
}


def main() -> None:
    """Compare and print one JSON line per distribution and method."""
    p = parser(__doc__)
    p.add_argument("--sampling", action="store_true", help="compare sampled ids too")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--activations", help="int8: of a target with packed weights")
    args = p.parse_args()
    model, tokenizer, drafts = load_models(args, args.dtype)
    prompts = read_prompts(args.prompts, args.count)
    trees = policies(args.nodes, args.depth)
    broken = False
    for distribution in DISTRIBUTIONS if args.sampling else ["greedy"]:
        options = {"max_new_tokens": args.max_new_tokens, "seed": 7, **DISTRIBUTIONS[distribution]}
        plain = decoder(model, tokenizer, drafts, None)
        reference = [
            plain_ids(plain, model, prompt, distribution, options)
            for prompt in tqdm(prompts, desc=f"{distribution} plain")
        ]
        for name, tree in trees.items():
            speculative = decoder(model, tokenizer, drafts, tree)
            results = [
                speculative.generate(prompt, **options) for prompt in tqdm(prompts, desc=f"{distribution} {name}")
            ]
            broken |= report(model, distribution, name, results, reference)
        batched = decoder(model, tokenizer, drafts, trees["best-first"])
        groups = [prompts[i : i + 4] for i in range(0, len(prompts), 4)]
        results = [
            r for group in tqdm(groups, desc=f"{distribution} batch") for r in batched.generate(group, **options)
        ]
        broken |= report(model, distribution, "best-first, ragged batch of 4", results, reference)
    sys.exit(int(broken))


def plain_ids(plain: Any, model: Any, prompt: str, distribution: str, options: dict[str, Any]) -> list[int]:
    """Return what decoding without speculation emits: transformers' generate when greedy in float32, else our loop."""
    if distribution != "greedy" or model.dtype != torch.float32:
        return plain.generate(prompt, **options).token_ids
    ids = torch.tensor([plain.open(prompt, **options).rows[0].ids], device=model.device)
    mask = torch.ones_like(ids)  # else ids that are also used as padding would be hidden
    output = model.generate(ids, attention_mask=mask, max_new_tokens=options["max_new_tokens"], do_sample=False)
    return output[0, ids.shape[1] :].tolist()


def report(model: Any, distribution: str, name: str, results: list[Any], reference: list[list[int]]) -> bool:
    """Print how many prompts have equal ids; return whether some differ elsewhere than at a near-tie."""
    line = compared(model, distribution, name, results, reference)
    print(json.dumps(line), flush=True)
    return any(gap >= 1e-3 for gap in line["top2_gap_where_different"].values())


def compared(
    model: Any, distribution: str, name: str, results: list[Any], reference: list[list[int]]
) -> dict[str, Any]:
    """Return how many prompts have equal ids, and where the others first differ."""
    firsts, gaps = {}, {}
    for index, (result, expected) in enumerate(zip(results, reference, strict=True)):
        length = difference(result.token_ids, expected)
        if length is not None:
            firsts[index] = length
            gaps[index] = round(top2_gap(model, result.prompt_ids + expected[:length]), 6)
    passes = sum(r.stats.target_passes for r in results)
    return {
        "distribution": distribution,
        "method": name,
        "prompts": len(results),
        "equal": len(results) - len(gaps),
        "first_difference": firsts,
        "top2_gap_where_different": gaps,
        "tokens_per_target_pass": round(sum(r.stats.new_tokens for r in results) / passes, 3),
    }


if __name__ == "__main__":
    main()
