"""Spec-Bench's and SPEED-Bench's questions: speed-up and accepted tokens by category, in the forms that they publish.

    python benchmarks/spec_bench.py --questions question.jsonl --out out/spec-bench [--methods plain auto suffix FOLDER]
        [--target DIR] [--tree auto] [--temperature 1] [--count 5] [--max-new-tokens 1024] [--dtype bfloat16]

A file or a folder of them has a line for each question: question_id, category, turns.  Spec-Bench's question.jsonl is
one; the rows of nvidia/SPEED-Bench become one with pandas (`to_json(path, orient="records", lines=True)`).  ``--count``
limits the questions of each category.  A method is `plain`, without speculation, or drafts joined by +, `auto` being
the default ones.  All take turns, question by question, each with its own answers before the later turns; the first
question warms up besides.  A question that does not fit the target's context is left out, and named.

OUT/METHOD.jsonl has the answers as Spec-Bench writes them, so its own scripts read them.  The tables count as its
`speed.py` does: tokens a second are means over questions of tokens over seconds, all turns and prompts included; the
speed-up is their ratio; mean accepted tokens are over all steps together, the target's own token included.  Two things
differ: tokens of `plain` are those generated, where `speed.py` encodes the text again; and greedy texts are equal up to
near-ties, so all methods have as many tokens.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from time import perf_counter, time
from typing import Any

from common import load_target, policies
from report import table

from specinfer import SpeculativeDecoder
from specinfer.decoder import WORDS, load_draft
from specinfer.errors import InputError

PLAIN = "plain"
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
POOLED = "mt_bench"  # where all of these are asked, as in Spec-Bench, they are one category
OVERALL = "overall"
Question = dict[str, Any]
Answer = dict[str, Any]


def read_questions(path: Path, count: int | None) -> list[Question]:
    """Return the first questions of each category, from a file or from a folder's files.

    Raises:
        InputError: there are none, or one lacks a field.
    """
    questions: list[Question] = []
    asked: dict[str, int] = {}
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            question = json.loads(line)
            if not {"question_id", "category", "turns"} <= question.keys():
                raise InputError(f"{file}, line {number} is no question: it must have question_id, category and turns")
            category = question["category"]
            asked[category] = asked.get(category, 0) + 1
            if count is None or asked[category] <= count:
                questions.append(question)
    if not questions:
        raise InputError(f"{path} has no questions: name Spec-Bench's question.jsonl, or a folder of such files")
    return questions


def decoders(args: argparse.Namespace) -> dict[str, SpeculativeDecoder]:
    """Return a decoder for each method; they share the target."""
    model, tokenizer = load_target(args.target, args.dtype)
    tree = policies(args.nodes, args.depth)[args.tree]
    named = {
        method: [name if name in WORDS else load_draft(name, args.dtype, "auto") for name in method.split("+")]
        for method in args.methods
        if method != PLAIN
    }
    return {
        method: SpeculativeDecoder(model, tokenizer, named.get(method, []), tree if method in named else None)
        for method in args.methods
    }


def answer(decoder: SpeculativeDecoder, question: Question, seed: int, options: dict[str, Any]) -> Answer:
    """Let a decoder answer all turns of a question; return the choice as Spec-Bench writes it."""
    messages: list[dict[str, str]] = []
    choice: Answer = {"index": 0, "turns": [], "decoding_steps": [], "new_tokens": [], "wall_time": []}
    lengths: list[int] = []
    for turn in question["turns"]:
        messages.append({"role": "user", "content": turn})
        started = perf_counter()
        result = decoder.generate(messages, seed=seed, **options)
        choice["wall_time"].append(perf_counter() - started)
        choice["turns"].append(result.text)
        choice["decoding_steps"].append(len(result.steps))
        choice["new_tokens"].append(len(result.token_ids))
        lengths += [len(step.tokens) for step in result.steps]
        messages.append({"role": "assistant", "content": result.text})
    return {**choice, "accept_lengths": lengths}


def answers(
    made: dict[str, SpeculativeDecoder], questions: Sequence[Question], options: dict[str, Any]
) -> Iterator[dict[str, Answer]]:
    """Yield, question by question, the lines of all methods' answer files."""
    for number, question in enumerate([questions[0], *questions]):
        try:
            choices = {method: answer(decoder, question, number, options) for method, decoder in made.items()}
        except InputError as error:
            if number:
                print(f"question {question['question_id']} is left out: {error}", file=sys.stderr)
            continue
        if number:
            about = {"question_id": question["question_id"], "category": question["category"]}
            yield {
                method: {**about, "answer_id": f"{method}-{number}", "model_id": method, "choices": [choice]}
                | {"tstamp": time()}
                for method, choice in choices.items()
            }


def tables(answered: Sequence[dict[str, Answer]]) -> str:
    """Return the tables: a row for each method, a column for each category and one for all."""
    groups: dict[str, list[dict[str, Answer]]] = {}
    for lines in answered:
        groups.setdefault(next(iter(lines.values()))["category"], []).append(lines)
    if groups.keys() >= MT_BENCH:
        groups[POOLED] = [lines for category in MT_BENCH for lines in groups.pop(category)]
    groups[OVERALL] = list(answered)

    def rate(method: str, group: list[dict[str, Answer]]) -> float:
        choices = [lines[method]["choices"][0] for lines in group]
        return mean(sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in choices)

    def speed_up(method: str, group: list[dict[str, Answer]]) -> float | None:
        return rate(method, group) / rate(PLAIN, group) if PLAIN in answered[0] else None

    def accepted(method: str, group: list[dict[str, Answer]]) -> float:
        return mean(length for lines in group for length in lines[method]["choices"][0]["accept_lengths"])

    counts = {"method": "questions", **{name: len(group) for name, group in groups.items()}}
    figures = {"speed-up": speed_up, "mean accepted tokens": accepted, "tokens/s": rate}
    printed = [
        table(title, [{"method": m, **{n: of(m, g) for n, g in groups.items()}} for m in answered[0]], list(counts))
        for title, of in figures.items()
    ]
    return "\n\n".join([*printed, table("questions", [counts], list(counts))])


def main() -> None:
    """Ask all questions, write the answers, print the tables."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--questions", type=Path, required=True, help="JSON lines, or a folder of such files")
    p.add_argument("--out", type=Path, required=True, help="folder for METHOD.jsonl")
    p.add_argument("--methods", nargs="+", default=[PLAIN, "auto"])
    p.add_argument("--target", help="hub name, folder or GGUF file; default SmolLM2-135M-Instruct")
    p.add_argument("--tree", choices=("auto", "best-first", "chain", "expansion"), default="auto")
    p.add_argument("--nodes", type=int, default=12)
    p.add_argument("--depth", type=int, default=5)
    p.add_argument("--count", type=int, help="questions of each category; default all")
    p.add_argument("--max-new-tokens", type=int, default=1024)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--dtype", default="auto")
    args = p.parse_args()
    questions = read_questions(args.questions, args.count)
    args.out.mkdir(parents=True, exist_ok=True)
    files = {method: args.out / f"{method.replace('/', '_')}.jsonl" for method in args.methods}
    for file in files.values():
        file.write_text("")
    answered = []
    options = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    for lines in answers(decoders(args), questions, options):
        answered.append(lines)
        for method, line in lines.items():
            with files[method].open("a", encoding="utf-8") as file:
                print(json.dumps(line), file=file)
    if not answered:
        raise SystemExit("no question fits the target's context: see above")
    print(tables(answered))


if __name__ == "__main__":
    main()
