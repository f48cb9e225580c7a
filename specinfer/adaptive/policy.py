"""Adaptive trees: as many drafts, levels and nodes a step as pay on this machine, for these models and this text.

Knows: what steps cost in seconds, by size; which drafted tokens were accepted.
Does not know: clocks (seconds are told), models, verification, text.

Everything is weighed by one price: the tokens that a second is worth, at the rate of the last steps or of plain
decoding, whichever is more.  Taking whatever gains more tokens than its seconds are worth maximises tokens per second
(Dinkelbach, 1967).  Expected tokens are drafted probabilities, corrected by how often such were accepted.

    `Auto.grow`      is this draft asked in this step at all, and about one more level?
    `Auto.fit`       how many nodes of the merged tree does the target score?  None: the step is plain
    `Auto.observe`   the step's outcome and seconds; what was learnt holds for later runs, too

Trees depend on time, token ids do not: trees are ranked, and the walk is exact for every tree.
"""

from collections import defaultdict
from collections.abc import Sequence
from copy import copy, deepcopy
from functools import partial
from itertools import accumulate, zip_longest
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from specinfer.adaptive import profile as profiles
from specinfer.adaptive.acceptance import Habits
from specinfer.adaptive.cost_model import FAR, MEMORY, Average, Coalition, Hinge, Lock, subsets
from specinfer.attention import size_bucket
from specinfer.common.files import write_json
from specinfer.errors import InputError, PolicyError
from specinfer.results import reach
from specinfer.tree import BestFirst, Forest, Frontier, Growth, Kind, Nodes, Source, TokenTree, grow_best_first

MAX_NODES, MAX_DEPTH = 23, 8  # with the root, 24 tokens: a `size_bucket`
SIZES = (4, 4, 0, 0, 15, 15, 9, 9)  # nodes of the first steps, by which costs become known; of two, one is timed
EXPLORE = 16  # steps after which sizes are chosen, even if trees were never that large
KNEES = 0, 4, 8, 16, 32, 64  # tokens fed up to which a pass may cost what one token costs
AGAIN = 128  # steps after which a plain one is due: costs drift
PROBE = 8, 4  # steps after which drafts that are asked get a tree, whatever it costs, and its nodes
MARGIN = 1.03  # drafting must promise to be so much faster than not drafting: averages err
DEAR = 1.5  # times a plain step, from which on small trees cost too much to try larger ones
JUDGED = 8, 3  # steps of a text before a draft may be idle; and if no tree was worth its cost, or it was hopeless ...
HOPELESS = 0.7  # ... that is, slower than so many times plain decoding
TRIAL = 2  # steps for which an idle draft is tried again ...
WAITS = 8, 64  # ... after so many idle ones at first, doubled with every failure, and so many at most
NODE_SHARE = 1 / 32  # of a level's cost, is what it costs to ask about one node more
LEVEL_PRICE = 0.1  # tokens that a level must gain while its cost is unknown
USUAL = 8  # nodes of a usual tree
LEAST = 0.001, 0.05  # bounds of the path probability below which nothing is drafted


class Pace:
    """What batches of one size cost, and how fast they were."""

    def __init__(self) -> None:
        self.plain = Hinge(memory=MEMORY // 3)  # seconds of a step that drafted nothing, as of size 0
        self.since_plain = self.since_tree = 0  # steps
        self.tokens = self.spent = 0.0  # of the last steps; spent in plain steps

    def add(self, tokens: int, spent: float, drafted: bool) -> None:
        """Take a step into account."""
        fade = 1 - 1 / (2 * MEMORY)
        self.tokens, self.spent = self.tokens * fade + tokens, self.spent * fade + spent
        self.since_plain, self.since_tree = (self.since_plain + 1, 0) if drafted else (0, self.since_tree + 1)


class Counts:
    """Steps observed in all texts, sizes of `SIZES` tried, and drafts of the last text."""

    def __init__(self) -> None:
        self.steps = self.explored = self.drafts = 0


class Auto:
    """Best-first trees whose drafts, levels and nodes are chosen step by step to maximise tokens per second.

    One object serves one decoder: it learns what that one's target and drafts cost, and are worth.  Every text has an
    object of its own (`begin`), which shares what is learnt; texts may be decoded at once, in several threads.

    Args:
        max_nodes: nodes of a merged tree at most.
        max_depth: levels below the root at most.
        profile: what another object has learnt (`to_json`, or the path of `save`).  Then nothing is measured: every
            text starts from the profile alone, and goes by counts, so a run repeats itself on the same machine.

    Raises:
        PolicyError: a size that is not a whole number, or negative; a profile of other drafts, when a text begins.
        InputError: a profile that cannot be read, or is damaged.
    """

    kind: ClassVar[Kind] = Kind.RANKED

    def __init__(
        self,
        max_nodes: int = MAX_NODES,
        max_depth: int = MAX_DEPTH,
        profile: dict[str, Any] | str | PathLike[str] | None = None,
    ) -> None:
        bounds = BestFirst(max_nodes, max_depth)  # which checks them
        self.max_nodes, self.max_depth = bounds.max_nodes, bounds.max_depth
        self.lock, self.counts = Lock(), Counts()
        self.met: set[int] = set()  # sizes of the target's passes so far: the first of its kind is not timed
        self.line = Hinge(KNEES)  # seconds of a step over its tokens fed, drafts excluded
        self.paces: defaultdict[int, Pace] = defaultdict(Pace)  # by rows
        self.asking: defaultdict[int, Hinge] = defaultdict(partial(Hinge, ridge=1e-3))  # seconds over levels, by draft
        self.waits: list[int] = []  # by draft, steps that it will be idle next time
        self.due: list[int] = []  # by draft, the step from which it is tried again
        self.learnt: defaultdict[bool, Habits] = defaultdict(Habits)
        self.frozen = profile is not None  # costs are given
        self.profiled = profiles.restore(self, profiles.read(profile)) if profile is not None else 0  # drafts
        self.given = self.paces, self.learnt  # by the profile: what a text starts from
        self.start(drafts=self.profiled, coupled=False)

    def __repr__(self) -> str:
        return f"Auto(max_nodes={self.max_nodes}, max_depth={self.max_depth})"

    def begin(self, drafts: int, coupled: bool) -> "Auto":
        """Return an object for one text, which shares what is learnt: see `start`."""
        own = copy(self)
        own.start(drafts, coupled)
        return own

    def start(self, drafts: int, coupled: bool) -> None:
        """Begin a text: every draft gets a trial, however idle it was, for texts differ.

        Args:
            drafts: how many there are.
            coupled: whether drafts rank by the target's noise.
        """
        if self.frozen:
            if drafts != self.profiled:
                raise PolicyError(f"the profile is for {self.profiled} drafts, not {drafts}: save one for these")
            # this text's own, so that it does not depend on others
            self.counts, (self.paces, self.learnt) = Counts(), deepcopy(self.given)
        self.counts.drafts = drafts
        self.waits, self.due = [WAITS[0]] * drafts, [self.counts.steps] * drafts
        self.habits = self.learnt[coupled]
        # of this text, by the drafts asked, and some of them, both bit masks
        self.coalitions: defaultdict[tuple[int, int], Coalition] = defaultdict(Coalition)
        self.asked = -1  # the drafts to ask in the next step, a bit mask: all
        self.working = (1 << drafts) - 1  # those that paid when they were judged last
        self.warm = 0  # those asked in the step before: the others have to read what they missed first
        self.levels: defaultdict[int, int] = defaultdict(int)  # asked for in this step, by draft
        self.usual_levels: defaultdict[int, Average] = defaultdict(Average)  # ... in steps that asked it
        self.grown: Forest | None = None  # this step's trees, before `fit`
        self.explores = self._exploring  # whether its size is one of `SIZES`

    def to_json(self) -> dict[str, Any]:
        """Return what was learnt so far, JSON-ready: a profile.

        Raises:
            InputError: too little was decoded for costs to be known.
        """
        with self.lock:
            if not self.line.known or not any(pace.plain.count for pace in self.paces.values()):
                raise InputError("no profile to save yet: costs are not known; decode some 20 tokens more with drafts")
            return profiles.to_json(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the profile to a file.

        Raises:
            InputError: as `to_json`; or the file cannot be written.
        """
        write_json(Path(path), self.to_json())

    # ---- choices ----

    def grow(self, source: Source, max_depth: int | None = None) -> Growth:
        """Grow one tree per row: none if the draft is idle, else level by level while that pays."""
        depth = self.max_depth if max_depth is None else min(max_depth, self.max_depth)
        if not self.asked >> source.draft & 1:
            depth = 0
        self.levels[source.draft] = min(depth, 1)
        half = self._node_price(self._price(source.batch)) / 2  # for q may be low
        least = min(max(half, LEAST[0]), LEAST[1])
        return grow_best_first(source, self.max_nodes, depth, least, _Levels(self, source))

    def fit(self, trees: Sequence[TokenTree]) -> Forest:
        """Return each tree's nodes that are worth their part of the target's pass; as many in all rows, or none."""
        forest = Forest.of(trees)
        with self.lock:
            self.grown, self.explores = forest, self._exploring
            reached = self.habits.calibration.path(forest.nodes)
            size = self._size(forest.nodes, reached)
        return forest.best(size, reached)

    def wanted_nodes(self, draft: int, depth: int, accepted: Sequence[Sequence[float]]) -> int:
        """Return about how many nodes of each row a draft is asked: none unless they gain more than the level costs.

        Args:
            draft, depth: which, and of which nodes.
            accepted: per row, the probabilities that the target accepts those nodes, in the draft's order.
        """
        rows, ranks = len(accepted), self.habits.ranks[draft]
        levels, price = self.asking[draft], self._price(rows)
        cost = levels.level * levels.slope * price if levels.count and price else LEVEL_PRICE * rows
        node = self._node_price(price)
        gains = [[ranks.surplus(depth, chance, node) for chance in row] for row in accepted]
        if sum(map(sum, gains)) <= cost:
            return 0
        wanted = [place + 1 for row in gains for place, gain in enumerate(row) if gain * rows > NODE_SHARE * cost]
        return size_bucket(max(wanted, default=1))

    def _size(self, nodes: Nodes, reached: Sequence[float]) -> int:
        """Return how many nodes the target scores in each row, from all nodes' probabilities of acceptance."""
        starts = nodes.starts.tolist()
        rows, ends = len(starts) - 1, starts[1:]
        best = [sorted(reached[start + 1 : end], reverse=True) for start, end in zip(starts, ends, strict=False)]
        most = min(self.max_nodes, max(map(len, best)))
        if self._exploring and (most or not SIZES[self.counts.explored]):
            self.counts.explored += 1
            return min(SIZES[self.counts.explored - 1], most)
        price = self._price(rows)
        if price is None:
            return min(SIZES[0], most)
        gains = [0.0, *accumulate(map(sum, zip_longest(*best, fillvalue=0.0)))]  # of so many nodes in every row
        sizes = [count for count in range(most + 1) if size_bucket(count + 1) == count + 1 or count == self.max_nodes]
        size = max(sizes, key=lambda count: gains[count] - price * self._seconds(rows, count))
        return size or (min(PROBE[1], most) if self.paces[rows].since_tree >= PROBE[0] and not self.frozen else 0)

    def _choose(self, asked: int, rows: int) -> int:
        """Return the drafts to ask in the next step, after a step that asked some; both are bit masks."""
        everyone = (1 << len(self.due)) - 1
        pace, hopeless = self.paces[rows], False
        few = rows * (1 + SIZES[0])
        if self._exploring and pace.plain.count and self.line.at(few) > DEAR * pace.plain.at(0):
            self.counts.explored = len(SIZES)
            asked, self.working, self.due = 0, 0, [self.counts.steps + WAITS[0]] * len(self.due)
        if self._exploring:
            return everyone if SIZES[self.counts.explored] else 0
        if asked:
            best = max(subsets(asked), key=lambda drafts: self._rate(asked, drafts, rows))
            hopeless = self._rate(asked, asked, rows) < HOPELESS * self._rate(asked, 0, rows)
            busy = self.coalitions[asked, asked].busy
            few = busy.count < JUDGED[bool(hopeless or not busy.value)]
            self.working = asked if few else best
        trials = 0
        for draft, due in enumerate(self.due):
            if self.working >> draft & 1:
                self.waits[draft], self.due[draft] = WAITS[0], self.counts.steps
            elif self.counts.steps >= due + (1 if hopeless else TRIAL):
                self.due[draft] = self.counts.steps + self.waits[draft]
                self.waits[draft] = min(2 * self.waits[draft], WAITS[1])
            elif self.counts.steps >= due:
                trials |= 1 << draft
        probe = not self.frozen and pace.since_plain >= min(AGAIN, 8 << min(pace.plain.count, 5))
        return 0 if probe else self.working | trials

    # ---- costs, and what they buy ----

    @property
    def _exploring(self) -> bool:
        return not self.frozen and self.counts.explored < len(SIZES) and self.counts.steps < EXPLORE

    def _price(self, rows: int) -> float | None:
        """Return the tokens that a second is worth to a batch; None before it is known."""
        pace = self.paces[rows]
        if not pace.plain.count and not self.line.known:
            return None
        return max(rows, pace.tokens / pace.spent if pace.spent else 0) / max(self._seconds(rows, 0), 1e-9)

    def _seconds(self, rows: int, nodes: float) -> float:
        """Return what a step costs without its drafts, when the target scores so many nodes in each row."""
        plain = self.paces[rows].plain
        if self.line.known and (nodes or not plain.count):
            return self.line.at(rows * (nodes + 1))
        usual = plain.at(0) * (1 + rows * nodes / 20)  # of CPUs and GPUs bound by memory, until it is measured
        return max(usual, self.line.at(0)) if nodes else usual

    def _rate(self, asked: int, drafts: int, rows: int) -> float:
        """Return the tokens per second that some of the drafts asked are expected to make."""
        coalition, plain = self.coalitions[asked, drafts], self._seconds(rows, 0)
        seconds = plain + coalition.busy.value * (self._seconds(rows, coalition.nodes.value) - plain)
        levels = self.usual_levels.items()
        seconds += sum(self.asking[draft].at(own.value) for draft, own in levels if drafts >> draft & 1)
        seconds *= MARGIN if drafts else 1
        return rows * (1 + coalition.busy.value * coalition.tokens.value) / max(seconds, 1e-9)

    def _node_price(self, price: float | None) -> float:
        """Return the tokens that one node more must gain to pay for itself, beyond the knee; 0 before it is known."""
        return (price or 0.0) * self.line.level * self.line.slope

    # ---- what is learnt ----

    def observe(
        self,
        trees: Sequence[TokenTree],
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        proposing: Sequence[float],
        seconds: float,
    ) -> None:
        """Learn from a step.

        Args:
            trees: what the target scored, one per row.
            paths: accepted nodes, root excluded.
            tokens: what each row emitted.
            proposing: seconds of each draft; next to nothing where it was not asked.
            seconds: of the whole step, drafts included.
        """
        with self.lock:
            self.counts.steps += 1
            rows, nodes = len(trees), max(tree.num_drafted for tree in trees)
            asked = sum(1 << draft for draft, levels in self.levels.items() if levels)
            if not self.frozen and rows * (nodes + 1) in self.met:  # kernels are slow the first time they meet a size
                self._time(rows, nodes, proposing, seconds)
            self.met.add(rows * (nodes + 1))
            plain, drafts = self._seconds(rows, 0), [self.asking[draft].at(own) for draft, own in self.levels.items()]
            spent = (self._seconds(rows, nodes) + sum(drafts)) / plain if plain else 1.0
            self.paces[rows].add(sum(map(len, tokens)), spent, nodes > 0)
            assert self.grown is not None, "a step is fitted before it is observed"
            self.habits.observe(self.grown, tokens)
            if not self.explores:
                self._credit(trees, paths, asked)
            self.levels.clear()
            self.grown = None
            self.warm = asked
            self.asked = self._choose(asked, rows)

    def _time(self, rows: int, nodes: int, proposing: Sequence[float], seconds: float) -> None:
        """Learn costs from a step's seconds."""
        pace, rest = self.paces[rows], seconds - sum(proposing)
        if nodes:
            before = self.line.level
            self.line.add(rows * (nodes + 1), rest)
            if not 1 / FAR < self.line.level / before < FAR:
                pace.since_plain = AGAIN  # another load: how long does a plain step take now?
        else:
            pace.plain.add(0, rest)
            if not self.line.known:
                self.line.add(rows, rest, weight=0.1)  # so that the first trees make a line that rises
        if self.explores:  # larger trees than will be chosen, by kernels that are new to their sizes
            return
        for draft, levels in self.levels.items():
            if levels and self.warm >> draft & 1:  # else it has to read what it missed
                self.asking[draft].add(levels, proposing[draft])
                self.asking[draft].add(0, 0.0, weight=0.1)  # so equal ones make a line through nothing

    def _credit(self, trees: Sequence[TokenTree], paths: Sequence[Sequence[int]], asked: int) -> None:
        """Credit every coalition of the drafts that were asked with what it would have done alone."""
        for draft, levels in self.levels.items():
            if levels:
                self.usual_levels[draft].add(levels)
        rows = [(tree.proposers, path) for tree, path in zip(trees, paths, strict=True)]
        for drafts in subsets(asked):
            tokens = [reach((proposers[node] for node in path), drafts) for proposers, path in rows]
            nodes = max(len([1 for mask in proposers if mask & drafts]) for proposers, _ in rows)
            self.coalitions[asked, drafts].add(sum(tokens) / len(rows), nodes)

    def reasons(self, names: Sequence[str], rows: int) -> str:
        """Return what choices rest on, in words; names are the drafts'."""
        parts = []
        if plain := self._seconds(rows, 0):
            parts.append(f"a plain step costs {1e3 * plain:.1f} ms")
        if self.line.known:
            few, many = (1e3 * self.line.at(rows * (1 + nodes)) for nodes in (USUAL / 2, 2 * USUAL))
            parts.append(f"one with trees {few:.1f} ms ({USUAL // 2} nodes) to {many:.1f} ms ({2 * USUAL} nodes)")
        for draft, name in enumerate(names):
            one, two = (1e3 * self.asking[draft].at(levels) for levels in (1, 2))
            parts.append(f"a level of {name} {one:.1f} ms, each further one {two - one:.1f} ms")
        parts += [f"{name} is idle" for draft, name in enumerate(names) if not self.asked >> draft & 1]
        return ", ".join(parts)


class _Levels:
    """How many nodes of its next level one draft is asked about, from their calibrated probabilities.

    Where tensors are not on the host it goes by averages instead: to look at the nodes would be to wait for them.
    """

    def __init__(self, auto: Auto, source: Source) -> None:
        self.auto, self.draft = auto, source.draft
        self.known = [[(0.0, 1.0)] for _ in range(source.batch)]  # score and chance of every node asked about, by row

    def __call__(self, frontier: Frontier, scores: Tensor) -> int:
        auto, width = self.auto, frontier.tokens.shape[1]
        if frontier.tokens.device.type == "cpu":
            with auto.lock:
                level = self._level(frontier, scores)
                chances = [[chance for _, chance in row] for row in level]
                width = auto.wanted_nodes(self.draft, frontier.depth, chances)
            for known, row in zip(self.known, level, strict=True):
                known += row[:width]
        else:
            average = auto.habits.ranks[self.draft].expected(frontier.depth)
            width *= auto.wanted_nodes(self.draft, frontier.depth, [[average]] * len(self.known))
        auto.levels[self.draft] += width > 0
        return width

    def _level(self, frontier: Frontier, scores: Tensor) -> list[list[tuple[float, float]]]:
        """Return every node's score and the probability that it is accepted, by row; padding has none."""
        calibration = self.auto.habits.calibration
        factors = calibration.edges(self.draft, frontier.depth)
        rows = zip(self.known, scores.tolist(), frontier.parents.tolist(), frontier.valid.tolist(), strict=True)
        return [
            [
                (score, real and known[p][1] * calibration.accepted(factors, score - known[p][0]))
                for score, p, real in zip(*row, strict=True)
            ]
            for known, *row in rows
        ]
