"""What passes cost by the number of nodes: plain, compiled, and in another version, beside the bound by bandwidth.

    specinfer compile [--target DIR] [--dtype float32]
    python benchmarks/passes.py [--target DIR] [--dtype float32] [--prefix 200] [--rounds 15] [--rows 1]
        [--other PYTHON] [--json]

The bound is the bytes of the weights that a pass reads, divided by the bandwidth, which is measured by summing an array
that no cache holds.  All take turns in one run, two passes each, of which the second counts: before the first, others
left their weights in the caches.  Figures are medians, in milliseconds.  ``--other`` is the interpreter
of an environment with another version of specinfer.  "level" is a pass of the first bundled head over as many nodes;
"engine" is how the engine runs passes: compiled, where a package is.
"""

import argparse
import sys
from contextlib import nullcontext
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any

import torch
from common import Worker, print_rows, serve, weight_bytes

NODES = (1, 2, 4, 8, 16, 24, 32)
LEVEL = (1, 2, 4, 8)
Passes = dict[str, tuple[Any, Any, bool, dict[str, Any]]]  # session, model, engine, sizes of its other inputs


def bandwidth() -> float:
    """Return bytes per second."""
    data = torch.ones(2**28)
    seconds = []
    for _ in range(7):
        started = perf_counter()
        data.sum()
        seconds.append(perf_counter() - started)
    return data.nbytes / min(seconds)


def opened(model: Any, rows: int, prefix: int, engine: bool, extra: dict[str, int]) -> Any:
    """Return a session on a model with a prefix read, and how to feed it."""
    from specinfer.attention import running

    if engine:
        from specinfer.attention.passes.registry import equip

        equip(model, (0,) if extra else (), "auto", rounded=bool(extra))
        print(f"{model.name}: {model.ways}", file=sys.stderr)
    session = model.session(rows, prefix + 64)
    states = {name: torch.randn(prefix, size).to(model.dtype) for name, size in extra.items()}
    with running(model) if engine else nullcontext():
        session.prefill(
            [list(range(10, 10 + prefix))] * rows, **{name: [tensor] * rows for name, tensor in states.items()}
        )
    return session, model, engine, extra


def worker(target: str | None, dtype: str, rows: int, prefix: int, **more: str) -> None:
    """Run passes on request, with the version of specinfer that this interpreter has."""
    from specinfer.attention import TreeModel, lay_out_chains, running
    from specinfer.drafts.bundled import bundled_drafts
    from specinfer.loading import load

    loaded = load(target, dtype, **more)
    passes: Passes = {
        "plain": opened(TreeModel(loaded.model), rows, prefix, False, {}),
        "engine": opened(TreeModel(loaded.model), rows, prefix, True, {}),
    }
    for draft in islice(bundled_drafts(loaded.model, loaded.tokenizer), 1):
        head = draft.attach(passes["plain"][1], loaded.tokenizer).model
        size = {"draft_states": loaded.model.config.hidden_size}
        passes["plain level"] = opened(head, rows, prefix, False, size)
        passes["level"] = opened(TreeModel(head.model), rows, prefix, True, size)

    def answer(kind: str = "", nodes: int = 1) -> Any:
        if not kind:
            return {"kinds": list(passes), "weights": weight_bytes(loaded.model), "dtype": str(loaded.model.dtype)}
        session, model, engine, extra = passes[kind]
        layout = lay_out_chains([list(range(nodes))] * rows, model.device)
        states = {name: torch.randn(rows * nodes, size).to(model.dtype) for name, size in extra.items()}
        for _ in range(2):
            with running(model) if engine else nullcontext():
                started = perf_counter()
                session.append(layout, **states)
                seconds = perf_counter() - started
            session.commit([()] * rows)
        return seconds

    serve(answer)


def main() -> None:
    """Measure all in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--activations", help="int8: to which integers packed products round states")
    parser.add_argument("--prefix", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--other")
    parser.add_argument("--json", action="store_true", help="print a JSON object a row in place of the table")
    parser.add_argument("--worker", action="store_true")
    args = parser.parse_args()
    if args.worker:
        more = {"activations": args.activations} if args.activations else {}  # other versions may not know it
        worker(args.target, args.dtype, args.rows, args.prefix, **more)
        return
    options = ["--dtype", args.dtype, "--rows", str(args.rows), "--prefix", str(args.prefix)]
    options += ["--target", args.target] if args.target else []
    options += ["--activations", args.activations] if args.activations else []
    workers = {"": Worker(sys.executable, __file__, *options)}
    if args.other:
        workers["other "] = Worker(args.other, __file__, *options)
    facts = workers[""].ask()
    kinds = [(who, kind) for kind in facts["kinds"] for who in workers if not (who and kind.startswith("plain"))]
    seconds: dict[tuple[str, str, int], list[float]] = {
        (who, kind, nodes): [] for who, kind in kinds for nodes in (LEVEL if "level" in kind else NODES)
    }
    for turn in range(args.rounds + 2):
        for who, kind, nodes in seconds:
            taken = workers[who].ask(kind=kind, nodes=nodes)
            if turn > 1:  # the first ones warm up
                seconds[who, kind, nodes].append(taken)
    found: dict[str, dict[str, Any]] = {f"{who}{kind}": {} for who, kind in kinds}
    for (who, kind, nodes), values in seconds.items():
        found[f"{who}{kind}"][f"{nodes} nodes"] = 1e3 * median(values)
    rate = bandwidth()
    bound = {"MB": facts["weights"] / 1e6, "GB/s": rate / 1e9, "1 nodes": 1e3 * facts["weights"] / rate}
    rows = [{"pass": name, **row} for name, row in found.items()] + [{"pass": "bound", **bound}]
    if args.json:
        print_rows(rows)
        return
    print(f"{facts['dtype']}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    print(f"{bound['MB']:.0f} MB of weights at {bound['GB/s']:.1f} GB/s: {bound['1 nodes']:.1f} ms")
    print(f"nodes of {args.rows}".ljust(16), *(f"{nodes:6}" for nodes in NODES))
    for row in rows[:-1]:
        figures = (row.get(f"{nodes} nodes") for nodes in NODES)
        print(row["pass"].ljust(16), *(f"{value:6.1f}" if value else "     -" for value in figures))


if __name__ == "__main__":
    main()
