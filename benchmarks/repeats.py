"""Tokens per pass of the suffix draft where text repeats itself: a function rewritten, and answers in one JSON format.

    python benchmarks/repeats.py [--target DIR] [--dtype bfloat16] [--count 10] [--max-new-tokens 160]

Greedy.  The first task's prompt holds the function.  The second has one prompt for each of some cities; the memory
begins empty and learns from each answer.  Prints one JSON line per draft and tree: tokens per pass of the function,
and of all answers but the first.
"""

import argparse
import inspect
import json
from typing import Any

from specinfer import BestFirst, Memory, SpeculativeDecoder
from specinfer.drafts.blending import successors
from specinfer.loading import load

TREES: dict[str, Any] = {"best-first 64, 32": BestFirst(64, 32, 0.05), "auto": "auto"}
FUNCTION = f"Here is a Python function.\n\n```python\n{inspect.getsource(successors)}```\n\n"
CHANGE = "Write the whole function again, with `left` renamed to `rest`. Answer with the code only."
CITIES = ["Paris", "Tokyo", "Cairo", "Lima", "Oslo", "Rome", "Berlin", "Madrid", "Delhi", "Sydney"]
FORM = """{"name": "...", "country": "...", "continent": "...", "population": 0, "known_for": ["...", "...", "..."]}"""
QUESTIONS = [f"Describe the city of {city}. Answer with JSON only, in this format:\n{FORM}" for city in CITIES]


def tokens_per_pass(decoder: SpeculativeDecoder, prompts: list[str], skip: int, max_new_tokens: int) -> float:
    """Return the tokens per target pass of greedy answers, without those to the first prompts."""
    results = [decoder.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False) for prompt in prompts][skip:]
    tokens = sum(result.stats.new_tokens for result in results)
    return round(tokens / sum(result.stats.target_passes for result in results), 2)


def main() -> None:
    """Measure and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", help="hub name or folder; default SmolLM2-135M-Instruct")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--count", type=int, default=len(CITIES), help="questions")
    p.add_argument("--max-new-tokens", type=int, default=160)
    args = p.parse_args()
    target = load(args.target, args.dtype)
    for name, tree in TREES.items():
        for draft, remembers in (("ngram", False), ("suffix", False), ("suffix", True)):
            memory = Memory() if remembers else None
            decoder = SpeculativeDecoder(target.model, target.tokenizer, [draft], tree, memory=memory)
            figures = {
                "function": tokens_per_pass(decoder, [FUNCTION + CHANGE], 0, 3 * args.max_new_tokens),
                "answers": tokens_per_pass(decoder, QUESTIONS[: args.count], 1, args.max_new_tokens),
            }
            print(json.dumps({"tree": name, "draft": draft, "memory": remembers, **figures}), flush=True)


if __name__ == "__main__":
    main()
