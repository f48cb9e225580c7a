"""What the small operations between passes cost: in a tight loop, and after a pass has read all weights.

    python benchmarks/cold.py [--megabytes 269] [--rounds 60]

Between two passes of the target the engine does some hundred operations on a few dozen numbers each.  A pass reads all
weights.  Afterwards the caches hold hardly any of the data and the code that these operations need.  Figures are
medians, in microseconds.
"""

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

LEVEL = torch.randn(1, 2, 12_000)  # a head's scores after two nodes
FEW = torch.randn(1, 46)
NUMBERS = FEW.numpy()

OPERATIONS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "Python: a loop over 46 numbers": lambda: [i * 2.0 for i in range(46)],
    "numpy: add 46 numbers": lambda: NUMBERS + NUMBERS,
    "numpy: sort 46 numbers": lambda: np.sort(NUMBERS),
    "torch: add 46 numbers": lambda: FEW + FEW,
    "torch: join 46 and 46": lambda: torch.cat((FEW, FEW), 1),
    "torch: sort 46 numbers": lambda: FEW.sort(dim=1, descending=True, stable=True),
    "torch: 46 numbers to a list": FEW.tolist,
    "torch: 23 largest of 2 x 12,000": lambda: LEVEL.topk(23),
    "torch: log-sum-exp of 2 x 12,000": lambda: LEVEL.logsumexp(-1),
}


def microseconds(run: Callable[[], Any]) -> float:
    """Return how long one call takes."""
    started = perf_counter()
    run()
    return 1e6 * (perf_counter() - started)


@torch.inference_mode()
def main() -> None:
    """Measure every operation both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=269)  # of SmolLM2-135M in bfloat16
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    weights = torch.ones(int(args.megabytes * 1e6 / 4))
    print(f"{'':34s}{'in a loop':>10s}{'after a pass':>14s}")
    for name, run in OPERATIONS.items():
        warm = [microseconds(run) for _ in range(10 * args.rounds)]
        cold = []
        for _ in range(args.rounds):
            weights.sum()
            cold.append(microseconds(run))
        print(f"{name:34s}{median(warm):10.1f}{median(cold):14.1f}")


if __name__ == "__main__":
    main()
