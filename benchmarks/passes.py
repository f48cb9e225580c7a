"""What a target pass costs by the number of nodes, as the model is and as the engine runs it, next to memory's bound.

    python benchmarks/passes.py [--target DIR] [--prefix 200] [--rounds 9]

The bound is the bytes of the weights that a pass reads over the bandwidth measured by summing an array that no cache
holds.  Plain passes and the engine's (packed and streamlined) alternate; figures are medians, in milliseconds.
"""

import argparse
from contextlib import nullcontext
from statistics import median
from time import perf_counter

import torch

from specinfer.attention import TreeModel, lay_out_chains, running
from specinfer.models import load

NODES = (0, 4, 8, 12, 16, 24, 32)


def bandwidth() -> float:
    """Return bytes per second."""
    data = torch.ones(2**29)
    seconds = []
    for _ in range(5):
        started = perf_counter()
        data.sum()
        seconds.append(perf_counter() - started)
    return data.nbytes / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--prefix", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()

    model = load(args.target).model
    target = TreeModel(model)
    session = target.session(1, args.prefix + max(NODES) + 1)
    session.prefill([list(range(10, 10 + args.prefix))])
    seconds: dict[tuple[int, str], list[float]] = {(nodes, kind): [] for nodes in NODES for kind in ("plain", "engine")}
    for _ in range(args.rounds + 1):  # the first round warms up
        for nodes, kind in seconds:
            layout = lay_out_chains([list(range(nodes + 1))], target.device)
            with running(target) if kind == "engine" else nullcontext():
                started = perf_counter()
                session.append(layout)
                seconds[nodes, kind].append(perf_counter() - started)
            session.commit([()])
    weights = sum(parameter.nbytes for parameter in set(model.parameters()))
    rate = bandwidth()
    print(f"{weights / 1e6:.0f} MB of weights at {rate / 1e9:.1f} GB/s: {1e3 * weights / rate:.1f} ms")
    print("nodes  plain  engine")
    for nodes in NODES:
        plain, engine = (1e3 * median(seconds[nodes, kind][1:]) for kind in ("plain", "engine"))
        print(f"{nodes:5}  {plain:5.1f}  {engine:6.1f}")


if __name__ == "__main__":
    main()
