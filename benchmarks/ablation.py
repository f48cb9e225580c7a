"""What each part of `Auto` is worth: trees without that part, in turns with whole ones, on real prompts.

    python benchmarks/ablation.py --prompts code.jsonl chat.jsonl [--temperature 1] [--rounds 3]

Every variant has a decoder and experience of its own; models are shared.  A figure is the median, over prompts, of the
variant's tokens a second over the whole `Auto`'s (each prompt's the median over rounds); the interval is a bootstrap's.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from types import MethodType
from typing import Any

import torch
from common import load_models, read_prompts
from peers import interval

from specinfer import BestFirst, SpeculativeDecoder, adapt
from specinfer.adapt import Auto
from specinfer.habits import Calibration, Ranks
from specinfer.learnt import Hinge


class RawProbabilities(Calibration):
    """Draft probabilities as they are."""

    def _factor(self, expected: float, accepted: float, place: int) -> float:
        return 1.0


class FirstRanks(Ranks):
    """Rates by rank as they begin, never learnt."""

    def observe(self, depth: int, rank: int | None) -> None:
        """Learn nothing."""


class Steady(Hinge):
    """Costs without a level of now."""

    def add(self, size: int, seconds: float, weight: float = 1.0) -> None:
        """Take a measurement into account; the level stays."""
        super().add(size, seconds, weight)
        self.level = 1.0


def without_calibration(auto: Auto) -> None:
    """Take draft probabilities for acceptance."""
    for coupled in (False, True):
        auto.learnt[coupled].calibration = RawProbabilities()


def without_ranks(auto: Auto) -> None:
    """Never learn how often the k-th child is accepted."""
    for coupled in (False, True):
        for draft in range(4):
            auto.learnt[coupled].ranks[draft] = FirstRanks()


def without_hinge(auto: Auto) -> None:
    """Let costs be a straight line through the origin's size."""
    auto.line = Hinge()


def without_level(auto: Auto) -> None:
    """Do not follow a machine that is slower or faster than before."""
    auto.line = Steady(adapt.KNEES)


def without_coalitions(auto: Auto) -> None:
    """Ask all drafts or none."""

    def choose(self: Auto, asked: int, rows: int) -> int:
        kept, adapt.subsets = adapt.subsets, lambda drafts: iter((drafts, 0))
        try:
            return Auto._choose(self, asked, rows)
        finally:
            adapt.subsets = kept

    _replace(auto, _choose=choose)


def without_idling(auto: Auto) -> None:
    """Ask every draft in every step, but for the plain ones that are due: no coalitions, no trials."""

    def choose(self: Auto, asked: int, rows: int) -> int:
        everyone = (1 << len(self.due)) - 1
        pace = self.paces[rows]
        if self._exploring:
            return everyone if adapt.SIZES[self.counts.explored] else 0
        return 0 if pace.since_plain >= min(adapt.AGAIN, 8 << min(pace.plain.count, 5)) else everyone

    _replace(auto, _choose=choose)


def without_trials(auto: Auto) -> None:
    """Never ask an idle draft again in the same text."""

    def choose(self: Auto, asked: int, rows: int) -> int:
        chosen = Auto._choose(self, asked, rows)
        return chosen if self._exploring else chosen & self.working

    _replace(auto, _choose=choose)


def without_exploring(auto: Auto) -> None:
    """Choose sizes from the first step on, from what a CPU or GPU bound by memory costs."""
    auto.counts.explored = len(adapt.SIZES)


def without_level_prices(auto: Auto) -> None:
    """Grow every tree to its depth, whatever a level costs."""

    def wanted_nodes(self: Auto, draft: int, depth: int, accepted: Any) -> int:
        return max(map(len, accepted))

    _replace(auto, wanted_nodes=wanted_nodes)


def without_sizes(auto: Auto) -> None:
    """Score 15 nodes in every step, as many as were grown at most."""

    def size(self: Auto, nodes: Any, reached: Any) -> int:
        return 15

    _replace(auto, _size=size)


def _replace(auto: Auto, **methods: Callable[..., Any]) -> None:
    """Give one object, and the copies that texts get of it, other methods."""

    def begin(self: Auto, drafts: int, coupled: bool) -> Auto:
        own = Auto.begin(auto, drafts, coupled)
        for name, method in methods.items():
            setattr(own, name, MethodType(method, own))
        return own

    auto.begin = MethodType(begin, auto)  # type: ignore[method-assign]


VARIANTS: dict[str, Callable[[Auto], None]] = {
    name.removeprefix("without_"): change for name, change in list(globals().items()) if name.startswith("without_")
}


def main() -> None:
    """Measure all in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft", action="append", default=[])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    args = parser.parse_args()
    model, tokenizer, drafts = load_models(args, args.dtype)
    trees: dict[str, Any] = {"whole": Auto(), "again": Auto(), **{name: Auto() for name in args.parts}}
    for name in args.parts:
        VARIANTS[name](trees[name])
    trees |= {"15 nodes, fixed": BestFirst(15, 8), "plain": None}
    decoders = {name: SpeculativeDecoder(model, tokenizer, drafts=drafts, tree=tree) for name, tree in trees.items()}
    prompts = read_prompts(args.prompts, args.count)
    rates: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in decoders}
    tokens: dict[str, list[int]] = {name: [0, 0] for name in decoders}
    for turn in range(args.rounds):
        for place, prompt in [(-1, "Say hello.")] * (2 if turn == 0 else 0) + list(enumerate(prompts)):
            order = list(decoders)
            first = (turn * len(prompts) + place) % len(order)
            for name in order[first:] + order[:first]:
                started = perf_counter()
                result = decoders[name].generate(
                    prompt, max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=place
                )
                if place >= 0:
                    rates[name][place].append(len(result.token_ids) / (perf_counter() - started))
                    tokens[name][0] += len(result.token_ids)
                    tokens[name][1] += len(result.steps)
        print(f"round {turn + 1}", file=sys.stderr, flush=True)
    print(f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, T = {args.temperature:g}")
    whole = [median(own) for own in rates["whole"]]
    for name in decoders:
        ratios = [median(own) / base for own, base in zip(rates[name], whole, strict=True)]
        low, high = interval(ratios)
        speed, tau = median(map(median, rates[name])), tokens[name][0] / tokens[name][1]
        print(f"{name:20}{speed:7.1f} tokens/s  {tau:5.2f} a pass  {median(ratios):.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
