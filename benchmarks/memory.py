"""Is memory no more than weights, cache and one pass, and flat over many calls?

    python benchmarks/memory.py --target DIR --prompts prompts/chat.jsonl --count 200

Prints one JSON object, in MiB: the weights of target and drafts, and the process's resident set with all models read,
after the first call, after every fiftieth and the last one, and at its peak.  Linux only (reads /proc).
"""

from pathlib import Path

from common import parser, policies, print_rows, read_prompts, weight_bytes
from tqdm import tqdm

from specinfer import SpeculativeDecoder


def resident(field: str) -> float:
    """Return a field of /proc/self/status (VmRSS, VmHWM) in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Generate many times and print one JSON object."""
    p = parser(__doc__)
    p.add_argument("--dtype", default="auto")
    args = p.parse_args()
    prompts = read_prompts(args.prompts, 8)  # only few: kernels keep buffers for every new shape
    tree, drafts = policies(args.nodes, args.depth)["best-first"], args.draft or "auto"
    engine = SpeculativeDecoder.from_pretrained(args.target, drafts, tree, dtype=args.dtype)
    weights = sum(weight_bytes(network.model) for network in engine.networks)
    found = {"weights": weights / 2**20, "read": resident("VmRSS"), "calls": args.count}
    for call in tqdm(range(1, args.count + 1)):
        engine.generate(prompts[call % len(prompts)], max_new_tokens=args.max_new_tokens, temperature=0)
        if call == 1 or call % 50 == 0 or call == args.count:
            found[{1: "first", args.count: "last"}.get(call, str(call))] = resident("VmRSS")
    print_rows([{**found, "peak": resident("VmHWM")}])


if __name__ == "__main__":
    main()
