"""Structured output: tokens per pass with and without the grammar draft, and what grammars cost.

    python benchmarks/structured.py [--target DIR] [--dtype float32] [--max-new-tokens 250]

Three small texts become JSON of one schema, written compactly or with the white space that the target likes, greedily
and at T = 0.7.  Each is decoded without speculation, with the default drafts, with these and the grammar draft, and
with the grammar draft alone; best-first trees of 16 nodes.  Prints one JSON line per form and temperature: tokens per
pass, and whether all ids are those of plain decoding.  The last line has milliseconds: of reading the tokenizer, once,
and medians of compiling a schema, of a mask with the way to it, and of the grammar draft in a step.
"""

import argparse
import json
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

from specinfer import BestFirst, SpeculativeDecoder
from specinfer.engine.constraint import Constraint
from specinfer.grammar.asked import asked
from specinfer.grammar.guidance import Guidance
from specinfer.loading import load

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 30},
        "order_number": {"type": "string", "pattern": "^[0-9]{5}$"},
        "product": {"type": "string", "maxLength": 30},
        "requested_action": {"enum": ["refund", "repair", "replacement"]},
        "address": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "postal_code": {"type": "string", "pattern": "^[0-9]{4,5}$"},
            },
            "required": ["city", "postal_code"],
            "additionalProperties": False,
        },
        "is_urgent": {"type": "boolean"},
    },
    "required": ["customer_name", "order_number", "product", "requested_action", "address", "is_urgent"],
    "additionalProperties": False,
}
MESSAGES = [
    "Anna Schmidt, 04109 Leipzig: a chair of order 48213 has a broken leg. Please send me a new one before Friday.",
    "The coffee grinder of order 50977 stopped working. I would like my money back. Paolo Ricci, 10121 Turin",
    "Order 47120: the desk lamp flickers. Can you repair it? There is no hurry. Mei Tanaka, 1011 Lausanne",
]
PROMPTS = [f"Write the data of this message to a shop as JSON.\n\n{message}" for message in MESSAGES]
GREEDY = {"do_sample": False}
FORMS = {"compact": {"x-guidance": {"whitespace_flexible": False}}, "any white space": {}}


def response_format(form: str, **more: Any) -> dict[str, Any]:
    """Return the option for JSON of the schema in a form."""
    return {"type": "json_schema", "json_schema": {"schema": {**FORMS[form], **SCHEMA, **more}}}


def without_the_grammar_draft() -> Any:
    """Return a context in which grammars are masks alone."""
    return patch("specinfer.engine.loop.with_grammar", lambda trees, *_: trees)


def compared(plain: SpeculativeDecoder, drafted: SpeculativeDecoder, forced: SpeculativeDecoder, **options: Any) -> Any:
    """Return tokens per pass by method, and whether ids are equal."""
    found = {"plain": [plain.generate(prompt, **options) for prompt in PROMPTS]}
    with without_the_grammar_draft():
        found["drafts"] = [drafted.generate(prompt, **options) for prompt in PROMPTS]
    found["drafts and grammar"] = [drafted.generate(prompt, **options) for prompt in PROMPTS]
    found["grammar"] = [forced.generate(prompt, **options) for prompt in PROMPTS]
    texts = [[result.token_ids for result in results] for results in found.values()]
    figures = {
        name: round(sum(len(result.token_ids) for result in results) / sum(len(result.steps) for result in results), 2)
        for name, results in found.items()
    }
    ended = sum(result.finish_reason == "eos" for result in found["plain"])
    return {**figures, "tokens": sum(map(len, texts[0])), "ended": ended, "same ids": texts.count(texts[0]) == 4}


def costs(decoder: SpeculativeDecoder, **options: Any) -> dict[str, float]:
    """Return milliseconds: of compiling, of a mask, of the grammar draft in a step."""
    begun = perf_counter()
    guidance = Guidance(decoder.tokenizer, decoder.target.vocab_size)
    tokenizer, compiling = perf_counter() - begun, []
    for number in range(21):  # each is another schema
        grammar = asked({"response_format": response_format("compact", title=str(number))})
        begun = perf_counter()
        template = guidance.compiled(grammar)
        compiling.append(perf_counter() - begun)
    results, masks = [decoder.generate(prompt, **options) for prompt in PROMPTS], []
    for result in results:
        rule = Constraint(template.copy(), 0, frozenset({result.token_ids[-1]}))
        for length in range(len(result.token_ids)):
            begun = perf_counter()
            rule.allowed(result.token_ids[:length])
            masks.append(perf_counter() - begun)
    steps = [result.stats.drafts[-1].seconds / len(result.steps) for result in results]
    found = {"tokenizer": tokenizer, "compile": median(compiling), "mask": median(masks), "draft a step": median(steps)}
    return {name: round(1e3 * seconds, 3) for name, seconds in found.items()}


def main() -> None:
    """Measure and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", help="hub name or folder; default SmolLM2-135M-Instruct")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--max-new-tokens", type=int, default=250)
    args = p.parse_args()
    loaded, tree = load(args.target, args.dtype), BestFirst(16, 8)
    plain = SpeculativeDecoder(loaded.model, loaded.tokenizer, tree=None)
    drafted = SpeculativeDecoder(loaded.model, loaded.tokenizer, tree=tree)
    forced = SpeculativeDecoder(loaded.model, loaded.tokenizer, (), tree)
    for form in FORMS:
        for sampling in GREEDY, {"temperature": 0.7, "seed": 0}:
            options = {"response_format": response_format(form), "max_new_tokens": args.max_new_tokens, **sampling}
            decoding = "greedy" if sampling == GREEDY else "T = 0.7"
            found = compared(plain, drafted, forced, **options)
            print(json.dumps({"form": form, "decoding": decoding, **found}), flush=True)
    print(json.dumps(costs(drafted, response_format=response_format("compact"), max_new_tokens=args.max_new_tokens)))


if __name__ == "__main__":
    main()
