"""What learning while serving gains: a draft that learns next to a frozen one, on one format over and over.

    python benchmarks/online.py [--count 60] [--share 0.05] [--draft auto]

The bundled heads were trained on questions, chat and a little Python, and never saw SQL.  Both decoders answer the same
prompts, in turn.  Prints tokens per pass by thirds of the prompts, and what learning took.
"""

import argparse
import json
from typing import Any

from tqdm import tqdm

from specinfer import SpeculativeDecoder
from specinfer.decoder import DEFAULT_TREE

PROMPT = "Write only SQL INSERT statements for a table about: {}"
SUBJECTS = (
    "bakery river library dentist airport school farm museum theatre harbour hospital zoo bank hotel garden "
    "orchestra kitchen factory cinema stadium mountain railway newspaper pharmacy bookshop castle market bridge "
    "forest island university brewery post-office swimming-pool supermarket restaurant aquarium vineyard "
    "lighthouse workshop laboratory planetarium monastery greenhouse gym courthouse embassy circus nursery "
    "shipyard quarry marina campsite warehouse gallery observatory barber florist mill archive"
)


def tokens_per_pass(results: list[Any]) -> list[float]:
    """Return tokens per pass in each third of the results."""
    third = len(results) // 3
    parts = [[result.stats for result in results[i * third : (i + 1) * third]] for i in range(3)]
    return [round(sum(s.new_tokens for s in part) / sum(s.target_passes for s in part), 3) for part in parts]


def main() -> None:
    """Print one JSON object."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--count", type=int, default=len(SUBJECTS.split()), help="prompts, 3 or more")
    p.add_argument("--share", type=float, default=0.05, help="of the calls' time that learning takes at most")
    p.add_argument("--draft", default="auto")
    p.add_argument("--max-new-tokens", type=int, default=64)
    args = p.parse_args()
    kinds = {"frozen": False, "online": args.share}
    decoders = {
        name: SpeculativeDecoder.from_pretrained(drafts=args.draft, tree=DEFAULT_TREE, dtype="float32", online=online)
        for name, online in kinds.items()
    }
    results: dict[str, list[Any]] = {name: [] for name in kinds}
    for subject in tqdm(SUBJECTS.split()[: args.count], disable=None):
        prompt = PROMPT.format(subject.replace("-", " "))
        for name, decoder in decoders.items():
            results[name].append(decoder.generate(prompt, max_new_tokens=args.max_new_tokens, temperature=0))
    thirds = {name: tokens_per_pass(rows) for name, rows in results.items()}
    seconds = [row.stats.seconds for row in results["online"]]
    learning, whole = sum(s.learning for s in seconds), sum(s.total for s in seconds)
    gain = thirds["online"][2] / thirds["online"][0] / (thirds["frozen"][2] / thirds["frozen"][0])
    report = {
        "tokens_per_pass": thirds,
        "gain_over_frozen": round(gain, 3),  # last third over first, next to the same of the frozen draft
        "same_ids": all(a.token_ids == b.token_ids for a, b in zip(*results.values(), strict=True)),
        "learning_share": round(learning / (whole - learning), 4),
        "swaps": next(draft.swaps for draft in decoders["online"].drafts if hasattr(draft, "swaps")),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
