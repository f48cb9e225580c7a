"""How long a turn of a chat waits for its first token, if what earlier turns read is kept and if all is read again.

    python benchmarks/turns.py [--tokens 2000] [--rounds 5] [--dtype float32] [--compile] [--busy] [--json]

The first turn's prompt has about as many tokens, and a short answer.  The second turn asks one more question: with the
store that the first turn filled, and with an empty one, in turn.  Figures are medians; the ids must be the same.  On a
machine that others use, `--busy` counts the seconds that a single thread computes.
"""

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from common import print_rows

from specinfer import SpeculativeDecoder
from specinfer.calls.run import Run
from specinfer.engine.store import PrefixStore

FACT = "The lighthouse on island number {} was built in {} and its keeper likes {}. "
LIKES = "tea", "rain", "maps", "old clocks", "rope", "bread"


def first_turn(tokenizer: Any, tokens: int) -> list[dict[str, str]]:
    """Return a question whose prompt has about this many tokens."""
    facts = ""
    for number in range(tokens):
        facts += FACT.format(number, 1700 + number % 250, LIKES[number % len(LIKES)])
        if len(tokenizer(facts).input_ids) > tokens - 50:
            break
    return [{"role": "user", "content": f"{facts}Which keepers like tea?"}]


def turn(
    decoder: SpeculativeDecoder, messages: Any, store: PrefixStore, new: int, clock: Callable[[], float]
) -> tuple[float, Any]:
    """Return the seconds until the first token, by a clock, and the result."""
    run = Run([decoder.prepare(messages, max_new_tokens=new, temperature=0)], store=store)
    started = clock()
    next(iter(run))
    seconds = clock() - started
    run.finish()
    return seconds, run.results()[0]


def main() -> None:
    """Print seconds and their ratio."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, default=2000)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--dtype", default="float32")
    p.add_argument("--compile", action="store_true", help="use compiled passes")
    p.add_argument("--new", type=int, default=32, help="tokens of each answer")
    p.add_argument("--busy", action="store_true", help="count the seconds of one thread: others use the machine")
    p.add_argument("--json", action="store_true", help="print a JSON object")
    args = p.parse_args()
    clock = process_time if args.busy else perf_counter
    if args.busy:
        torch.set_num_threads(1)
    decoder = SpeculativeDecoder.from_pretrained(dtype=args.dtype, compile="auto" if args.compile else False)
    messages = first_turn(decoder.tokenizer, args.tokens)
    known, again = [], []
    for _ in range(args.rounds):
        store = PrefixStore()
        _, first = turn(decoder, messages, store, args.new, clock)
        later = [
            *messages,
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "And which like rain?"},
        ]
        seconds, found = turn(decoder, later, store, args.new, clock)
        known.append(seconds)
        seconds, wanted = turn(decoder, later, PrefixStore(), args.new, clock)
        again.append(seconds)
        assert found.token_ids == wanted.token_ids, "other ids with what was read before"
    ratios = sorted(a / b for a, b in zip(known, again, strict=True))
    if args.json:
        counts = {"prompt tokens": len(found.prompt_ids), "read before": found.stats.cached_tokens}
        times = {"ms": 1e3 * median(known), "ms again": 1e3 * median(again), "ratio": median(ratios)}
        print_rows([{**counts, **times, "least": ratios[0], "most": ratios[-1]}])
        return
    print(f"{len(found.prompt_ids)} prompt tokens, {found.stats.cached_tokens} of them read before; ids are equal")
    print(f"first token after {1e3 * median(known):.0f} ms, {1e3 * median(again):.0f} ms if all is read again")
    print(f"ratio {median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f} in {args.rounds} rounds)")


if __name__ == "__main__":
    main()
