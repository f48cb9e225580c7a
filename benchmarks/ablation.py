"""What each part of `Auto` is worth: trees without that part, next to whole ones, on real prompts.

    python benchmarks/ablation.py --prompts prompts/code.jsonl prompts/chat.jsonl [--count 16] [--temperature 1]

A clock cannot tell differences of 2 %.  So seconds are not measured: a step costs what such a step cost on one machine
(`PASS`, `LEVELS`), and the policy is told the same.  Figures repeat themselves on any machine, up to rounding.  Every
variant has its own experience.  A figure is the median over prompts of the variant's tokens a second over those of the
whole policy; the interval is a bootstrap's.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import load_models, read_prompts
from peers import interval

from specinfer import SpeculativeDecoder
from specinfer.adaptive.experience import Rate
from specinfer.adaptive.policy import Auto

TOKENS = (1, 2, 4, 8, 16, 24, 32)  # fed in a pass ...
PASS = (32.7, 31.6, 35.8, 37.9, 46.6, 56.0, 63.8)  # ... and its milliseconds: SmolLM2-135M, two cores, AVX512, compiled
LEVELS = (2.9, 0.3)  # milliseconds of a level: of head-1, of a look-up
STEP = 2.0, 1.0  # milliseconds between passes, and more if drafts were asked


class Timed(Auto):
    """The whole policy, by seconds of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.spent = [0.0]  # shared with texts

    def observe(self, trees: Any, paths: Any, tokens: Any, proposing: Any, seconds: float, coming: int = 0) -> None:
        """Learn from a step, whatever the clock says."""
        levels = [self.levels.get(draft, 0) for draft in range(len(proposing))]
        proposing = [1e-3 * cost * count + 1e-9 for cost, count in zip(LEVELS, levels, strict=False)]
        rest = np.interp(max(map(len, trees)), TOKENS, PASS) + STEP[0] + STEP[1] * any(levels)
        seconds = 1e-3 * float(rest) + sum(proposing)
        self.spent[0] += seconds
        super().observe(trees, paths, tokens, proposing, seconds, coming)


class Fixed(Rate):
    """A rate that learns nothing."""

    def add(self, accepted: float, expected: float) -> None:
        """Take no note."""


class WithoutEdgeRates(Timed):
    """Draft probabilities are taken at their word."""

    def start(self, *given: Any, **more: Any) -> None:
        """Begin a text."""
        super().start(*given, **more)
        self.acceptance.edges = defaultdict(partial(Fixed, 1.0))


class WithoutFamilyRates(Timed):
    """Half of all accepted nodes are expected to have an accepted child."""

    def start(self, *given: Any, **more: Any) -> None:
        """Begin a text."""
        super().start(*given, **more)
        self.acceptance.families = defaultdict(partial(Fixed, 0.5))


class WithoutRates(WithoutEdgeRates, WithoutFamilyRates):
    """Neither."""


class WithoutIdling(Timed):
    """Every draft is asked in every step, but for the plain ones that measure."""

    def _choose(self, rows: int) -> None:
        super()._choose(rows)
        self.asked = -1 if self.asked or self.since_plain < 2 else 0


class WithoutPlainSteps(Timed):
    """No plain step measures the machine after the first one."""

    def _choose(self, rows: int) -> None:
        self.since_plain = 0 if rows in self.costs.plain else self.since_plain
        super()._choose(rows)


class WithoutLevelPrices(Timed):
    """Every tree is grown to its depth."""

    def wanted_nodes(self, draft: int, frontier: Any, scores: Any) -> int:
        """Return all nodes."""
        return int(frontier.tokens.shape[1])


class WithoutSizes(Timed):
    """Fifteen nodes are scored in every step."""

    def _size(self, nodes: Any, reached: Any) -> int:
        return 15


VARIANTS: dict[str, Callable[[], Timed]] = {
    "whole": Timed,
    "edge rates": WithoutEdgeRates,
    "family rates": WithoutFamilyRates,
    "both rates": WithoutRates,
    "idling": WithoutIdling,
    "plain steps": WithoutPlainSteps,
    "level prices": WithoutLevelPrices,
    "sizes": WithoutSizes,
}


def main() -> None:
    """Decode every prompt with every variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft", action="append", default=[])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    model, tokenizer, drafts = load_models(args, args.dtype)
    policies = {name: variant() for name, variant in VARIANTS.items()}
    decode = {name: SpeculativeDecoder(model, tokenizer, drafts, tree).generate for name, tree in policies.items()}
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    per_pass: dict[str, list[float]] = {name: [] for name in VARIANTS}
    prompts = ["Say hello.", *read_prompts(args.prompts, args.count)]  # the first one warms up
    options = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    for number, prompt in enumerate(prompts):
        for name, policy in policies.items():
            before = policy.spent[0]
            result = decode[name](prompt, seed=number, **options)
            rates[name].append(len(result.token_ids) / (policy.spent[0] - before))
            per_pass[name].append(result.stats.tokens_per_target_pass)
    print(f"T = {args.temperature:g}, {len(prompts) - 1} prompts; without:")
    for name in VARIANTS:
        ratios = [one / whole for one, whole in zip(rates[name][1:], rates["whole"][1:], strict=True)]
        low, high = interval(ratios)
        print(
            f"{name:14}{median(rates[name][1:]):6.1f} tokens/s {median(per_pass[name][1:]):5.2f} a pass"
            f"   {median(ratios):.3f} [{low:.3f}, {high:.3f}]"
        )


if __name__ == "__main__":
    main()
