"""Tokens per pass where text repeats itself: a function rewritten, and answers in one JSON format.

    python benchmarks/repeats.py [--target DIR] [--dtype bfloat16] [--count 10] [--max-new-tokens 160]

Greedy.  The first task's prompt holds the function.  Then there are two tasks with one prompt for each answer.  Orders
are read from messages to a shop, so most values stand in the prompt; cities are described from what the target knows.
A memory begins empty and learns from each answer.  Prints one JSON line per set of drafts and tree: tokens per pass of
the function, and of all answers of a task but its first.  A target that keeps to a format is wanted, such as
Qwen2.5-Coder; SmolLM2-135M hardly does.
"""

import argparse
import heapq
import inspect
import json
from typing import Any

from specinfer import BestFirst, Memory, SpeculativeDecoder
from specinfer.loading import load

TREES: dict[str, Any] = {"best-first 64, 32": BestFirst(64, 32, 0.05), "auto": "auto"}
DRAFTS = (["ngram"], False), (["suffix"], False), (["suffix"], True), (["recycling", "suffix"], True)  # with a memory?
FUNCTION = f"Here is a Python function.\n\n```python\n{inspect.getsource(heapq.nsmallest)}```\n\n"
CHANGE = "Write the whole function again, with `result` renamed to `found`. Answer with the code only."
CITIES = ["Paris", "Tokyo", "Cairo", "Lima", "Oslo", "Rome", "Berlin", "Madrid", "Delhi", "Sydney"]
CITY = """{"name": "...", "country": "...", "continent": "...", "population": 0, "known_for": ["...", "...", "..."]}"""
ORDER = (
    """{"name": "...", "order": 0, "product": "...", "quantity": 0, "problem": "...", """
    """"wish": "refund, repair or replacement", "city": "..."}"""
)
MESSAGES = [
    "Hello, this is Anna Schmidt from Leeds. My order 48213, three garden chairs, came yesterday, and one "
    "chair has a broken leg. Please send me a new one.",
    "Good morning. I bought a coffee grinder from you (order 50977), and it stopped working after two days. I "
    "would like my money back. Paolo Ricci, Turin",
    "Order 47120: two desk lamps. Both flicker when they are switched on. Can you repair them? Regards, Mei "
    "Tanaka, Osaka",
    "Hi! I am John O'Neill in Cork. I ordered four winter tyres, order number 51344, and you sent the wrong "
    "size. I want the right ones, please.",
    "Dear team, the blue tent of order 49882 leaks at the seams. We were wet all night. Refund, please. Fatima"
    " Haddad, Lyon",
    "My name is Lars Berg, I live in Bergen. The battery of the electric bicycle from order 46001 does not "
    "charge any more. It needs a repair.",
    "Order 52218, six wine glasses for Sofia Costa in Porto: two of them arrived broken. I need new glasses "
    "before Friday.",
    "This is David Cohen, Haifa. The headphones I bought (order 48765) have no sound on the left side. I want "
    "my money back.",
    "The zip of the travel bag in my order 50019 is stuck. Can it be repaired? Thank you, Emma Novak from Brno",
    "Hello, I got five notebooks instead of the five calendars that I ordered with order 47655. Please send "
    "the calendars. Ivan Petrov, Varna",
]
QUESTIONS = {
    "orders": [
        f"Read this message to a shop, and answer with JSON only, in this format:\n{ORDER}\n\nMessage: {message}"
        for message in MESSAGES
    ],
    "cities": [f"Describe the city of {city}. Answer with JSON only, in this format:\n{CITY}" for city in CITIES],
}


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
    p.add_argument("--count", type=int, default=len(CITIES), help="questions of a task")
    p.add_argument("--max-new-tokens", type=int, default=160)
    args = p.parse_args()
    target = load(args.target, args.dtype)
    for name, tree in TREES.items():
        for drafts, remembers in DRAFTS:
            figures: dict[str, float] = {}
            for task, prompts in {"function": [FUNCTION + CHANGE], **QUESTIONS}.items():
                memory = Memory() if remembers else None
                decoder = SpeculativeDecoder(target.model, target.tokenizer, drafts, tree, memory=memory)
                skip, tokens = (0, 3 * args.max_new_tokens) if task == "function" else (1, args.max_new_tokens)
                figures[task] = tokens_per_pass(decoder, prompts[: args.count], skip, tokens)
            print(json.dumps({"tree": name, "drafts": drafts, "memory": remembers, **figures}), flush=True)


if __name__ == "__main__":
    main()
