"""What each draft gains on the same prompts: tokens a pass, draft time a step, and the wall against plain decoding.

    python benchmarks/drafts.py --prompts prompts/code.jsonl prompts/chat.jsonl [--count 16] [--max-new-tokens 64]
        [--target DIR] [--drafts ngram suffix recycling suffix+recycling lookahead bundled FOLDER ...]
        [--trees auto best-first] [--json]

Drafts joined by + are merged.  All take turns, prompt by prompt, after one prompt that warms up; every set of drafts
keeps what it learns from earlier prompts.  The wall is the median over prompts of a draft's tokens a second over those
without speculation, with its 95 % bootstrap interval, then the worst prompt's.
"""

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from common import load_target, parser, policies, print_rows, read_prompts
from peers import interval

from specinfer import Result, SpeculativeDecoder
from specinfer.decoder import WORDS, load_draft

PLAIN = "none"


class Row(NamedTuple):
    """What one decoder did with one prompt; seconds are without prefill."""

    tokens: int
    passes: int
    seconds: float
    drafting: float
    nodes: float

    @classmethod
    def of(cls, result: Result) -> "Row":
        """Take the figures of a result."""
        stats = result.stats
        drafting = sum(draft.seconds for draft in stats.drafts)
        seconds = stats.seconds.decoding + stats.seconds.learning
        return cls(len(result.token_ids), stats.target_passes, seconds, drafting, stats.tree_sizes.nodes_per_step)


def figures(name: str, rows: list[Row], plain: list[Row]) -> dict[str, Any]:
    """Return what a set of drafts gained."""
    steps = sum(row.passes for row in rows)
    tokens = sum(row.tokens for row in rows)
    rates = [(row.tokens / row.seconds) / (base.tokens / base.seconds) for row, base in zip(rows, plain, strict=True)]
    low, high = interval(rates)
    drafting, nodes = 1e3 * sum(row.drafting for row in rows) / steps, sum(row.nodes * row.passes for row in rows)
    passes = {"tokens/pass": tokens / steps, "nodes": nodes / steps, "ms": drafting}
    return {"drafts": name, **passes, "ratio": median(rates), "low": low, "high": high, "worst": min(rates)}


def main() -> None:
    """Decode every prompt with every set of drafts."""
    p = parser(__doc__)
    p.add_argument("--drafts", nargs="+", default=["ngram", "suffix", "recycling", "suffix+recycling", "auto"])
    p.add_argument("--trees", nargs="+", choices=("auto", "best-first", "chain", "expansion"), default=["auto"])
    p.add_argument("--dtype", default="auto")
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--json", action="store_true", help="print a JSON object a row in place of the table")
    args = p.parse_args()
    model, tokenizer = load_target(args.target, args.dtype)

    def make(names: str, tree: Any) -> Callable[..., Result]:
        drafts = [name if name in WORDS else load_draft(name, args.dtype, "auto") for name in names.split("+")]
        return SpeculativeDecoder(model, tokenizer, drafts, tree).generate

    trees = policies(args.nodes, args.depth)
    decode = {PLAIN: SpeculativeDecoder(model, tokenizer, [], None).generate}
    decode |= {f"{names} {tree}": make(names, trees[tree]) for names in args.drafts for tree in args.trees}
    rows: dict[str, list[Row]] = {name: [] for name in decode}
    different = dict.fromkeys(decode, 0)
    for number, prompt in enumerate(["Say hello.", *read_prompts(args.prompts, args.count)]):
        results = {
            name: generate(prompt, seed=number, max_new_tokens=args.max_new_tokens, temperature=args.temperature)
            for name, generate in decode.items()
        }
        if number == 0:
            continue
        for name, result in results.items():
            rows[name].append(Row.of(result))
            different[name] += result.token_ids != results[PLAIN].token_ids
    found = [{**figures(name, rows[name], rows[PLAIN]), "different": different[name]} for name in decode]
    if args.json:
        print_rows(found)
        return
    print(f"T = {args.temperature:g}, {len(rows[PLAIN])} prompts, {args.max_new_tokens} new tokens, {model.dtype}")
    print(f"{'drafts, tree':36} tokens/pass nodes/step draft ms/step  wall against plain, worst")
    for row in found:
        passes = "{drafts:36} {tokens/pass:11.2f} {nodes:10.1f} {ms:13.1f}".format(**row)
        wall = "{ratio:5.2f} [{low:.2f}, {high:.2f}] {worst:6.2f}".format(**row)
        print(passes, wall, f"({row['different']} texts differ)" if row["different"] else "")


if __name__ == "__main__":
    main()
