"""What a tree over a candidate lattice costs on the host: `python benchmarks/lattice.py`.

Prints medians in milliseconds: sorting the lattice, and growing a best-first tree over it.
"""

from statistics import median
from time import perf_counter

import torch

from specinfer.tree import Lattice

SIZES = ((8, 16, False), (8, 16, True), (16, 32, True), (8, 64, False))  # depths, candidates, whether pairs are scored
NODES, TIMES = 64, 200


def milliseconds(work, *arguments) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(TIMES):
        started = perf_counter()
        work(*arguments)
        times.append(1000 * (perf_counter() - started))
    return median(times)


for depths, candidates, paired in SIZES:
    torch.manual_seed(0)
    tokens = torch.stack([torch.randperm(50_000)[:candidates] for _ in range(depths)])[None]
    log_probs = (2 * torch.randn(1, depths, candidates if paired else 1, candidates)).log_softmax(-1)
    lattice = Lattice.of(tokens, log_probs)
    sort = milliseconds(Lattice.of, tokens, log_probs)
    grow = milliseconds(lattice.best_first, NODES, depths)
    kind = "pairs" if paired else "marginals"
    size = f"{depths:2} depths x {candidates} candidates, {kind:9}"
    print(f"{size}: sort {sort:.2f} ms, grow {NODES} nodes {grow:.2f} ms")
