"""How far a head should look back: tokens per pass by its window and the context.

    python benchmarks/windows.py --context docs/how-it-works.md docs/choosing.md docs/exactness.md docs/serving.md
        [--lengths 150 500 1000 2000 4000] [--windows 0 1024 512 256 128] [--temperature 1] [--max-new-tokens 96]

Each text is cut, with a question after it, and answered with trees of 8 nodes from head-1 alone.  A
window of 0 is none.  What the first answer has read of a prompt serves the others: the head has one layer, and no
window changes its keys and values.  Passes are counted, so the machine does not matter.
"""

import argparse
from pathlib import Path

from common import all_or_none, print_rows

from specinfer import BestFirst, SpeculativeDecoder
from specinfer.drafts.bundled import bundled_drafts
from specinfer.engine.store import PrefixStore
from specinfer.results import Result

QUESTIONS = "Write a long summary of the text above.", "Explain the most important point above to a child."


def prompts(decoder: SpeculativeDecoder, texts: list[str], length: int) -> list[list[int]]:
    """Return a prompt of this many tokens for each text; a shorter text goes on with the next one."""
    found = []
    for number in range(len(texts)):
        text = decoder.tokenizer.decode(
            decoder.tokenizer("\n\n".join(texts[number:] + texts[:number]))["input_ids"][:length]
        )
        asked = f"{text}\n\n{QUESTIONS[number % len(QUESTIONS)]}"
        found.append(decoder.read([asked]).rows[0])
    return found


def answer(decoder: SpeculativeDecoder, ids: list[int], store: PrefixStore, args: argparse.Namespace) -> Result:
    """Return an answer; what earlier ones have read of the prompt is in the store."""
    scheduler = decoder.scheduler(1, store=store)
    request = scheduler.add(
        decoder.prepare(ids, max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=0)
    )
    while not scheduler.idle:
        scheduler.step()
    return request.result


def main() -> None:
    """Measure, and print a line for each length."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--context", nargs="+", type=Path, required=True, help="files of text")
    p.add_argument("--lengths", type=int, nargs="+", default=[150, 500, 1000, 2000, 4000])
    p.add_argument("--windows", type=int, nargs="+", default=[0, 1024, 512, 256, 128])
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--max-new-tokens", type=int, default=96)
    args = p.parse_args()
    plain = SpeculativeDecoder.from_pretrained(drafts=[])
    head = next(bundled_drafts(plain.target.model, plain.tokenizer))
    decoder = all_or_none(SpeculativeDecoder(plain.target.model, plain.tokenizer, [head], BestFirst(8, 4)))
    model = decoder.drafts[0].model
    texts = [path.read_text(encoding="utf-8") for path in args.context]
    for length in args.lengths:
        counted = {window: [0, 0] for window in args.windows}  # tokens, passes
        for ids in prompts(decoder, texts, length):
            store = PrefixStore()
            for window, counts in counted.items():
                model.spec = model.spec._replace(windows={"sliding_attention": window or None})
                result = answer(decoder, ids, store, args)
                counts[0] += len(result.token_ids)
                counts[1] += result.stats.target_passes
        rates = {f"window {window or 'none'}": tokens / passes for window, (tokens, passes) in counted.items()}
        print_rows([{"context": length, **rates}])


if __name__ == "__main__":
    main()
