"""Is memory no more than weights, cache and one pass, and flat over many calls?

    python benchmarks/memory.py --target DIR --prompts prompts/chat.jsonl --count 200

Prints the process's resident set at its peak and after groups of calls, in MiB.  Linux only (reads /proc).
"""

import json
from pathlib import Path

from common import decoder, load_models, parser, policies, read_prompts
from tqdm import tqdm


def resident(field: str) -> float:
    """Return a field of /proc/self/status (VmRSS, VmHWM) in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Generate many times and print one JSON object."""
    args = parser(__doc__).parse_args()
    model, tokenizer, drafts = load_models(args, "bfloat16")
    prompts = read_prompts(args.prompts, 8)  # only few: kernels keep buffers for every new shape
    engine = decoder(model, tokenizer, drafts, policies(args.nodes, args.depth)["best-first"])
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    after = {}
    for call in tqdm(range(1, args.count + 1)):
        engine.generate(prompts[call % len(prompts)], max_new_tokens=args.max_new_tokens, temperature=0)
        if call in (1, 8, 16) or call % 50 == 0:
            after[call] = round(resident("VmRSS"), 1)
    print(json.dumps({"weights_mib": round(weights, 1), "rss_mib_after_call": after, "peak_mib": resident("VmHWM")}))


if __name__ == "__main__":
    main()
