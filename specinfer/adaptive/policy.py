"""Adaptive trees: as many drafts, levels and nodes a step as pay on this machine, for these models and this text.

Knows: what steps cost in seconds; which drafted tokens were accepted.
Does not know: clocks (it is told seconds), models, verification, text.

One price weighs everything: the tokens that a second is worth, at the rate of the last steps or of plain decoding,
whichever is more.  Taking whatever gains more tokens than its seconds are worth maximises tokens per second
(Dinkelbach, 1967).  Expected tokens are drafted probabilities, corrected by how often tokens like them were accepted.

    `Auto.grow`      is this draft asked in this step, and for one more level?
    `Auto.fit`       how many nodes of the merged trees does the target score?  None: the step is plain
    `Auto.observe`   the step's outcome and seconds; later texts use what was learnt as well

Trees depend on time, token ids do not: trees are ranked, and exact match is exact for every tree.
"""

from collections import defaultdict
from collections.abc import Sequence
from copy import copy, deepcopy
from itertools import chain, compress, pairwise, zip_longest
from math import exp, floor, inf, log2, sqrt
from os import PathLike
from typing import Any

from torch import Tensor

from specinfer.adaptive.experience import FAR, STAKE, DraftRecord, Line, Seconds
from specinfer.adaptive.profile import Profile
from specinfer.common.files import write_json
from specinfer.common.lock import Lock
from specinfer.common.tensors import size_bucket
from specinfer.errors import InputError, PolicyError
from specinfer.results import reach
from specinfer.tree import BestFirst, Forest, Frontier, Growth, Kind, Nodes, Policy, Source, TokenTree, grow_best_first

MAX_NODES = 31  # with the root, 32 tokens: a size bucket
MOST = 255  # the same, of nodes and of levels, where passes over many tokens cost hardly more
FIRST_NODES = 4  # of all rows' trees, one each at least, in the first tree; later ones are twice as large at most
PLAIN_AGAIN = 128  # steps between plain ones, which measure the machine, at most; twice as many after each, from 2 on
TREES_AGAIN = 8  # steps without trees after which one measures what they cost, if a draft is asked
MANY = 4  # rows from which on the average in earlier texts predicts that of the next ones
LEAST = 0.001, 0.05  # bounds of the path probability below which nothing is drafted


class Auto(Policy):
    """Best-first trees whose drafts, levels and nodes are chosen step by step to maximise tokens per second.

    One object serves one decoder: it learns what this target and these drafts cost, and which tokens are accepted.
    `begin` gives every text an object of its own, which shares what is learnt.  Texts may be decoded at once, in
    several threads.

    Args:
        max_nodes: nodes of a merged tree at most.  None is 31, and where a pass over twice the tokens costs hardly more
            (as where weights are fetched in every pass), it doubles again and again, up to 255.
        max_depth: levels below the root at most.  None is 31, or as many as there may be nodes if that is more.
        profile: what another object has learnt (`to_json`, or the path of `save`).  Then nothing is measured: every
            text starts from the profile alone and goes by counts, so a run repeats itself on the same machine.

    Raises:
        PolicyError: a size that is not a whole number, or negative; a profile of other drafts, when a text begins.
        InputError: a profile that cannot be read, or is damaged.
    """

    kind = Kind.RANKED  # of the class: no field
    adapts = True

    def __init__(
        self,
        max_nodes: int | None = None,
        max_depth: int | None = None,
        profile: dict[str, Any] | str | PathLike[str] | None = None,
    ) -> None:
        usual = BestFirst(*(MAX_NODES if size is None else size for size in (max_nodes, max_depth)))  # checks them
        self.max_nodes, self.max_depth = usual.max_nodes, usual.max_depth
        self.most_nodes = MOST if max_nodes is None else self.max_nodes  # however cheap they are
        self.most_depth = MOST if max_depth is None else self.max_depth
        self.lock = Lock()
        self.given = None if profile is None else Profile.read(profile)  # what each text starts from; nothing is timed
        self.learnt = self.given or Profile()
        self.start(self.learnt.drafts, coupled=False)

    def __repr__(self) -> str:
        return f"Auto(max_nodes={self.max_nodes}, max_depth={self.max_depth})"

    def begin(self, drafts: int, coupled: bool, rows: int = 1, packed: bool = False) -> "Auto":
        """Return an object for one text, which shares what is learnt: see `start`."""
        text = copy(self)
        text.start(drafts, coupled, rows, packed)
        return text

    def start(self, drafts: int, coupled: bool, rows: int = 1, packed: bool = False) -> None:
        """Begin a text.

        Args:
            drafts: how many there are.
            coupled: whether drafts rank by the target's noise.
            rows: texts that are decoded at a time, at first.
            packed: whether trees of different sizes cost no more than their nodes, as in packed passes.

        Raises:
            PolicyError: the profile is for another number of drafts.
        """
        if self.given:
            if drafts != self.given.drafts:
                raise PolicyError(f"the profile is for {self.given.drafts} drafts, not {drafts}: save one for these")
            self.learnt = deepcopy(self.given)  # so that a text does not depend on others
        self.learnt.drafts, self.packed = drafts, packed
        self.costs, self.acceptance = self.learnt.costs, self.learnt.acceptance[coupled]
        self.since_plain = self.since_trees = self.quiet = self.batch = 0
        self.surprises = 0  # trees beyond the usual size that were dear
        self.ceiling = inf  # tokens of a pass that are not to be fed again
        self.levels: defaultdict[int, int] = defaultdict(int)  # asked for in this step, by draft
        self.warm = 0  # drafts asked in the step before: the others must first read what they missed
        self.grown: Forest | None = None  # this step's trees, before `fit`
        self.begun: set[int] = set()  # binary digits of the numbers of rows that this text had so far
        self.records: list[DraftRecord] = []  # of the drafts, with as many rows as there are
        with self.lock:
            self._choose(rows)

    def to_json(self) -> dict[str, Any]:
        """Return what was learnt so far, JSON-ready: a profile.

        Raises:
            InputError: too little was decoded for costs to be known.
        """
        with self.lock:
            if not (self.costs.trees.known and self.costs.plain):
                raise InputError("no profile to save yet: costs are not known; decode some 20 tokens more with drafts")
            return self.learnt.to_json()

    def save(self, path: str | PathLike[str]) -> None:
        """Write the profile to a file.

        Raises:
            InputError: as `to_json`; or the file cannot be written.
        """
        write_json(path, self.to_json())

    # ---- what is chosen ----

    @property
    def idle(self) -> bool:  # type: ignore[override]
        """Whether no draft is asked in the next step."""
        return not self.asked

    def grow(self, source: Source, max_depth: int | None = None) -> Growth:
        """Grow one tree per row: none if the draft is idle, else level by level while that pays."""
        if hasattr(source, "lattice") or source.device.type != "cpu":
            return self.settled(source, max_depth).grow(source)
        nodes, depth, least = self._limits_of(source, max_depth)
        self.levels[source.draft] = min(depth, 1)

        def wanted(frontier: Frontier, scores: Tensor) -> int:
            with self.lock:
                count = self.wanted_nodes(source.draft, frontier, scores)
            self.levels[source.draft] += count > 0
            return count

        return grow_best_first(source, nodes, depth, least, wanted)

    def settled(self, source: Source, max_depth: int | None) -> BestFirst:
        """Return what grows where to look at nodes would be to wait for them: levels while they pay on average.

        A draft that answers for all depths at once is asked once, and levels cost nothing.
        """
        nodes, depth, least = self._limits_of(source, max_depth)
        self.levels[source.draft] = levels = min(depth, 1)
        if hasattr(source, "lattice"):
            return BestFirst(nodes, depth, least)
        with self.lock:
            while 0 < levels < min(depth, nodes) and self._pays(source, levels):
                levels += 1
        self.levels[source.draft] = levels
        return BestFirst(nodes, levels, 2.0 ** floor(log2(least)))  # few policies, for graphs

    def _limits_of(self, source: Source, max_depth: int | None) -> tuple[int, int, float]:
        """Return the most nodes and levels of a draft's trees in this step, and the least probability of a node."""
        nodes, depth = self.limits(source.batch)
        depth = depth if max_depth is None else min(max_depth, depth)
        least = min(max(self.costs.node(source.batch) / 2, LEAST[0]), LEAST[1])  # half, for q may be low
        return nodes, depth if self.asked >> source.draft & 1 else 0, least

    def _pays(self, source: Source, depth: int) -> bool:
        """Whether a level below this depth gains more than it adds to the cost, on average.

        Levels that are launched together cost little more than one, of which most is launching and waiting.
        """
        cost, node = self.costs.further(source.draft, source.batch, depth), self.costs.node(source.batch)
        chance, family = self.acceptance.expected(source.draft, depth), self.acceptance.family(source.draft, depth)
        return cost is not None and source.batch * (chance * family - node) > cost

    def room(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return nodes and levels of a tree as caches have room for them: at first, and however cheap they are."""
        return (self.max_nodes, self.max_depth), (self.most_nodes, self.most_depth)

    def limits(self, rows: int) -> tuple[int, int]:
        """Return the most nodes and levels of a tree now: twice as many when trees of the last size proved cheap."""
        nodes = self.max_nodes
        while nodes < self.most_nodes and self.costs.flat(rows, nodes) and 2 * rows * (nodes + 1) < self.ceiling:
            nodes = min(2 * nodes + 1, self.most_nodes)
        return nodes, max(self.max_depth, min(nodes, self.most_depth))

    def wanted_nodes(self, draft: int, frontier: Frontier, scores: Tensor) -> int:
        """Return how many nodes of each row a draft is asked about: none unless they gain more than the level costs.

        Args:
            draft: which.
            frontier: the nodes (B, W), best first.
            scores: (B, W) of their paths.
        """
        (rows, width), depth = frontier.tokens.shape, frontier.depth
        cost, node = self.costs.level(draft, rows), self.costs.node(rows)
        if cost is None:  # one level tells it
            return 0
        family, rate = self.acceptance.family(draft, depth), self.acceptance.along(draft, depth)
        gains = [min(1.0, exp(score) * rate) * family - node for score in chain(*scores.tolist())]
        if sum(gain for gain in gains if gain > 0) <= cost:
            return 0
        return size_bucket(max(n % width + 1 for n, gain in enumerate(gains) if gain > 0))

    def fit(self, trees: Forest) -> Forest:
        """Return each tree's nodes that are worth their part of the target's pass, or none.

        They are as many in all rows, unless passes are packed: then some rows may have none.
        """
        self.grown = trees
        if len(trees.nodes) == len(trees):
            return trees
        with self.lock:
            reached = self.acceptance.path(trees.nodes)
            size = self._size(trees.nodes, reached)
        return trees.best(size, reached, together=self.packed)

    def _size(self, nodes: Nodes, reached: Sequence[float]) -> int:
        """Return how many nodes the target scores in each row, from all nodes' probabilities of acceptance.

        In packed passes, in all rows.  A node is taken while it gains more than it costs.
        """
        rows, trees = len(nodes.sizes), self.costs.trees
        each = [sorted(reached[start + 1 : end], reverse=True) for start, end in pairwise(nodes.starts.tolist())]
        gains = sorted(chain(*each), reverse=True) if self.packed else [*map(sum, zip_longest(*each, fillvalue=0.0))]
        counted = rows if self.packed else 1  # rows that a number is of
        first = max(1, counted * FIRST_NODES // rows)
        # no pass is more than twice as large as any before, whatever the line promises
        most = int(min(max(first, counted * (2 * trees.largest / rows - 1)), counted * self.limits(rows)[0]))
        gains = gains[:most]
        price = self.costs.price(rows)
        if not price or not trees.known:  # sizes must differ to tell what a node costs
            return len(gains)
        size = len([gain for gain in gains if gain * counted > rows * price * trees.slope])
        measures = self.since_trees >= TREES_AGAIN  # costs may have changed, or be other than they seem at one size
        size = max(2 * size, first) if measures else size
        if not self.packed:  # passes are padded
            size = size_bucket(size + 1) - 1 if size else 0
        size = min(size, len(gains))
        spent = self.costs.seconds(rows, size / counted) - self.costs.seconds(rows, 0)
        return size if measures or sum(gains[:size]) > price * spent else 0

    def _choose(self, rows: int) -> None:
        """Choose the drafts to ask in the next step.

        When half of the rows are left, nodes and levels have another price, and drafts are judged anew.  Of many texts
        at a time about as much is accepted as of earlier ones: there what drafts did goes on.  When few are left, a
        draft that was idle waits for its trial: they may end before it has read what it missed.
        """
        if rows.bit_length() != self.batch.bit_length():
            idle = [record.idle for record in self.records] if rows < min(self.batch, MANY) else []
            drafts, self.batch = self.learnt.drafts, rows
            stake = STAKE[1] if self.costs.trees.known else STAKE[0] / sqrt(rows)
            fresh = [DraftRecord(stake) for _ in range(drafts)]
            self.records = self.learnt.records.setdefault((drafts, rows.bit_length()), fresh)
            for record in self.records if rows < MANY and rows.bit_length() not in self.begun else ():
                record.begin()
            self.begun.add(rows.bit_length())
            for record in compress(self.records, idle):
                record.wait()
        measured = self.costs.plain[rows].weight if rows in self.costs.plain else 0
        due = not self.given and self.since_plain >= min(2 << measured, PLAIN_AGAIN)
        asked = [not record.idle for record in self.records]
        self.asked = 0 if due else sum(works << draft for draft, works in enumerate(asked))  # a bit mask

    # ---- what is learnt ----

    def observe(
        self,
        trees: Sequence[TokenTree],
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        proposing: Sequence[float],
        seconds: float | None,
        coming: int = 0,
    ) -> None:
        """Learn from a step (see `Policy.observe`), and choose the drafts to ask in the next one, for all its rows."""
        assert self.grown is not None, "a step is fitted before it is observed"
        with self.lock:
            rows, drafted = len(trees), [tree.num_drafted for tree in trees]
            nodes = sum(drafted) / rows if self.packed else max(drafted)  # that each row pays for
            seconds = None if self.given else seconds
            if seconds is not None:
                self._time(rows, nodes, proposing, seconds - sum(proposing))
            levels = {d: self.costs.levels[d].value * n for d, n in self.levels.items() if d in self.costs.levels}
            modelled = self.costs.seconds(rows, nodes) + sum(levels.values())
            self.costs.earn(rows, sum(map(len, tokens)), modelled)
            if self.levels:
                self.acceptance.observe(self.grown, tokens)
            reading = {} if self.given else self._reading(levels, proposing)
            if seconds is not None:
                modelled = min(seconds - sum(reading.values()), FAR * modelled)
            self._judge(trees, paths, levels, modelled, reading)
            self.since_trees = 0 if nodes else self.since_trees + 1
            self.quiet = 0 if any(self.levels.values()) else self.quiet + 1
            self.since_plain = 0 if self.quiet > 1 else self.since_plain + 1
            self.warm = sum(1 << draft for draft, asked in self.levels.items() if asked)
            self.levels.clear()
            self.grown = None
            self._choose(rows + coming)

    def _time(self, rows: int, nodes: float, proposing: Sequence[float], rest: float) -> None:
        """Learn costs from a step's seconds: of each draft, and of the rest."""
        fed = round(rows * (nodes + 1))
        if nodes > self.max_nodes and fed > self.costs.trees.largest and rest > FAR * self.costs.trees.at(fed):
            self.surprises += 1  # no line holds below this size and above: go back, after two in one text
            self.ceiling = fed if self.surprises > 1 else self.ceiling
        elif nodes:
            self.costs.trees.add(fed, rest)
        else:
            self._time_plain(self.costs.plain.setdefault(rows, Seconds()), rest)
        for draft, levels in self.levels.items():
            if levels and self.warm >> draft & 1:  # else it has to read what it missed
                self.costs.levels.setdefault(draft, Seconds()).add(proposing[draft] / levels)
                self.costs.depths.setdefault(draft, Line()).add(levels, proposing[draft])

    def _time_plain(self, plain: Seconds, seconds: float) -> None:
        """Learn what a plain step costs from one that follows another, or from one of another speed.

        After a tree it is slower: drafts and trees displaced weights from the processor's caches.
        """
        if (self.quiet and not any(self.levels.values())) or not plain.value / FAR < seconds < plain.value * FAR:
            counted = plain.count
            plain.add(seconds)
            for record in self.records if 2 * plain.count < counted else ():  # another speed: another trial
                record.credit = max(record.credit, STAKE[1])

    def _reading(self, levels: dict[int, float], proposing: Sequence[float]) -> dict[int, float]:
        """Return by draft the seconds in which it read what it had missed, beyond those of its levels."""
        cold = [draft for draft, asked in self.levels.items() if asked and not self.warm >> draft & 1]
        return {draft: max(0.0, proposing[draft] - levels.get(draft, inf)) for draft in cold}

    def _judge(
        self,
        trees: Sequence[TokenTree],
        paths: Sequence[Sequence[int]],
        levels: dict[int, float],
        spent: float,
        reading: dict[int, float],
    ) -> None:
        """Tell each draft's record what it gained.

        Gains are divided by the root of the rows, as luck grows with it, and multiplied by the drafts: all may lose no
        more than one alone.

        Args:
            trees, paths: as `observe`.
            levels: by draft, seconds of its levels as far as they are known.
            spent: seconds of the step, but for those of reading.
            reading: by draft, seconds in which it read what it had missed.
        """
        asked = sorted((draft for draft, count in self.levels.items() if count), key=lambda d: levels.get(d, 0.0))
        rows, plain = len(trees), self.costs.seconds(len(trees), 0)
        net = self._gains(asked, trees, paths, levels, spent) if asked and plain else {}
        scale = len(self.records) / sqrt(rows)
        for draft, record in enumerate(self.records):
            read = rows * reading.get(draft, 0.0) / plain if plain else 0.0
            record.add(scale * net[draft] if draft in net else None, scale * read)

    def _gains(
        self,
        asked: Sequence[int],
        trees: Sequence[TokenTree],
        paths: Sequence[Sequence[int]],
        levels: dict[int, float],
        spent: float,
    ) -> dict[int, float]:
        """Return what each draft gained: tokens that cheaper drafts would not have gained, less its seconds.

        What the tree cost beside them is divided by nodes, of which each draft has one more.

        Args:
            asked: drafts, cheap ones first.
            trees, paths, levels, spent: as `_judge`.
        """
        rows, plain = len(trees), self.costs.seconds(len(trees), 0)
        price = rows / plain  # of plain decoding, which is what must not be slower
        masks = [[tree.proposers[node] for node in path] for tree, path in zip(trees, paths, strict=True)]
        nodes = [mask for tree in trees for mask in tree.proposers[1:]]
        rest = price * (spent - sum(levels.values()) - plain) / (len(nodes) + len(asked))
        rest = rest if nodes else max(0.0, rest)  # a step without a tree is not cheaper than a plain one
        net, before, covered, drafts = dict[int, float](), 0, 0, 0
        for draft in asked:
            drafts |= 1 << draft
            reached, scored = sum(reach(path, drafts) for path in masks), sum(mask & drafts > 0 for mask in nodes)
            net[draft] = reached - before - price * levels.get(draft, 0.0) - rest * (scored - covered + 1)
            before, covered = reached, scored
        return net

    def reasons(self, names: Sequence[str], rows: int) -> str:
        """Return what the choices rest on, in words; names are the drafts'."""
        parts, batch = [], f" of {rows} rows" if rows > 1 else ""
        if plain := self.costs.seconds(rows, 0):
            parts.append(f"a plain step{batch} costs {1e3 * plain:.1f} ms")
        if self.costs.trees.known:
            few, many = (self.costs.seconds(rows, nodes) for nodes in (4, 16))
            when = " when they were timed, the machine being faster then" if few < plain else ""
            parts.append(f"one with trees {1e3 * few:.1f} ms (4 nodes) to {1e3 * many:.1f} ms (16 nodes){when}")
        for draft, name in enumerate(names):
            if draft in self.costs.levels:
                parts.append(f"a level of {name} {1e3 * self.costs.levels[draft].value:.1f} ms")
        parts += [f"{name} is idle" for draft, name in enumerate(names) if not self.asked >> draft & 1]
        return ", ".join(parts)
