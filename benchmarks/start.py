"""How long a command takes to its first byte, against importing transformers and loading the model alone.

    python benchmarks/start.py [--target DIR] [--rounds 7] [--dtype bfloat16] [--json]

Both are processes of their own and take turns: ``specinfer generate``, until it writes to standard output, and
Python that imports torch and transformers and loads the same folder.  Figures are medians of seconds.  One round warms
the file cache and does not count.
"""

import argparse
import subprocess
import sys
from statistics import median
from time import perf_counter

from common import print_rows

from specinfer.loading import load

LOAD = """
import sys, torch, transformers
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=sys.argv[2])
print("loaded", flush=True)
"""


def seconds(command: list[str]) -> float:
    """Return how long a command takes to write a byte."""
    started = perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        spent = perf_counter() - started
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return spent


def main() -> None:
    """Measure both, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    args = parser.parse_args()
    folder = load(args.target, args.dtype).model.name_or_path
    asked = ["generate", "Why is the sky blue?", "--max-new-tokens", "8", "--dtype", args.dtype]
    asked += ["--target", args.target] if args.target else []
    commands = {
        "specinfer generate": [sys.executable, "-m", "specinfer", *asked],
        "load the model": [sys.executable, "-c", LOAD, folder, args.dtype],
    }
    found: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(args.rounds + 1):
        for name, command in commands.items():
            found[name].append(seconds(command))
    ours, theirs = (median(each[1:]) for each in found.values())
    if args.json:
        print_rows([{"specinfer": ours, "load": theirs, "ratio": ours / theirs}])
        return
    print(f"specinfer generate {ours:.2f} s, load the model {theirs:.2f} s: {ours / theirs:.2f} times as long")


if __name__ == "__main__":
    main()
