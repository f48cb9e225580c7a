"""Adaptive trees: as many drafts, levels and nodes a step as pay on this machine, for these models and this text.

Knows: what steps cost in seconds; which drafted tokens were accepted.
Does not know: clocks (it is told seconds), models, verification, text.

One price weighs everything: the tokens that a second is worth, at the rate of the last steps or of plain decoding,
whichever is more.  Taking whatever gains more tokens than its seconds are worth maximises tokens per second
(Dinkelbach, 1967).  Expected tokens are drafted probabilities, corrected by how often such tokens were accepted.

    `Auto.grow`      is this draft asked in this step at all, and for one more level?
    `Auto.fit`       how many nodes of the merged trees does the target score?  None: the step is plain
    `Auto.observe`   the step's outcome and seconds; later texts use what was learnt, too

Trees depend on time, token ids do not: trees are ranked, and exact match is exact for every tree.
"""

from collections import defaultdict
from collections.abc import Sequence
from copy import copy, deepcopy
from itertools import accumulate, chain, zip_longest
from math import exp, inf
from os import PathLike
from typing import Any

from torch import Tensor

from specinfer.adaptive.acceptance import DEPTHS
from specinfer.adaptive.cost_model import FAR, Average, Seconds
from specinfer.adaptive.profile import Profile
from specinfer.common.files import write_json
from specinfer.common.lock import Lock
from specinfer.common.tensors import size_bucket
from specinfer.errors import InputError, PolicyError
from specinfer.results import reach
from specinfer.tree import (
    BestFirst,
    Forest,
    Frontier,
    Growth,
    Kind,
    Nodes,
    Policy,
    Source,
    TokenTree,
    grow_best_first,
)

MAX_NODES, MAX_DEPTH = 31, 31  # with the root, 32 tokens: a size bucket
MOST = 255  # the same, of nodes and of levels, where passes over many tokens cost hardly more
FIRST_NODES = 4  # of all rows' trees, one each at least, that are scored to learn what trees cost now, doubled at first
PLAIN_AGAIN = 2, 8, 128  # steps between plain ones, which measure the machine: at first, at least, at most
MANY = 4  # rows from which on the acceptance in earlier texts predicts the next texts' average
PLAIN_FIRST = 2  # plain steps that such a batch starts with: is the machine as fast as it was?
PATIENCE = 8  # steps without a tree that was worth its cost, or at a loss, after which all drafts are idle
LUCK = 1.2  # tokens that a step gains or loses by chance, about: a loss must be larger, for so many steps
MARGIN = 1.03  # a draft's expected worth over its cost must exceed this, because averages err
JUDGED = 4  # steps in which a draft is asked before it is judged ...
TRIAL = 2  # ... and those of an idle draft's trial, in which trees are scored whatever they cost ...
WAITS = 8, 64  # ... after so many idle steps: at first, and, by rows, at most
FAILED = 2, 4  # factor of the wait after each failed trial, with few rows and with many
NODE_SHARE = 1 / 32  # cost of asking a draft about one more node, as a share of its level's cost
LEVEL_PRICE = 0.1  # tokens that a level must gain while its cost is unknown
LEAST = 0.001, 0.05  # bounds of the path probability below which nothing is drafted
DOUBT = 0.15  # costs of drafting that no clock sees (trials, reading missed tokens), as a share of the measured cost


class DraftRecord:
    """What one draft did in this text, and when it is asked again.

    Args:
        step: from which it is judged.
        idled: it is idle, for it gained too little in earlier texts: for so many steps already, and how many it waits.

    Attributes:
        gained: tokens a step that it added to those of cheaper drafts.
        levels: levels a step, in steps that asked it.
        first: the step at which it is judged first.
        until: the step before which it is asked in any case.
        idle_from: the step from which it is idle, if it is.
        wait: steps that it is idle then, or next time.
    """

    def __init__(self, step: int = 0, idled: tuple[int, int] | None = None) -> None:
        self.gained, self.levels = Average(), Average()
        self.first = self.until = step + (JUDGED if idled is None else 0)
        before, self.wait = idled or (0, WAITS[0])
        self.idle_from = None if idled is None else step - before

    def tried(self, step: int) -> bool:
        """Return whether a step belongs to a trial of the draft, after it was idle."""
        return self.first <= step < self.until

    def works(self, step: int, price: float | None, pays: bool, rows: int) -> bool:
        """Return whether the draft is asked in a step.

        Args:
            step: its number in the text.
            price: tokens that a level must gain, if known.
            pays: whether trees were worth their cost of late, and what was emitted its seconds.
            rows: of the batch; of many, what is gained on average changes slowly.
        """
        if step < self.until or price is None:
            return True
        if pays and self.gained.value > MARGIN * price * self.levels.value:
            if self.gained.count <= TRIAL:  # a trial went well: what it was made longer by is undone, and as much again
                self.wait = max(WAITS[0], self.wait // FAILED[rows >= MANY] ** 2)
            self.idle_from = None
            return True
        self.idle_from = step if self.idle_from is None else self.idle_from
        if step < self.idle_from + min(self.wait, WAITS[1] * rows):
            return False
        self.gained, self.until, self.idle_from = Average(), step + TRIAL, None
        self.wait = min(FAILED[rows >= MANY] * self.wait, WAITS[1] * rows)
        return True


class Auto(Policy):
    """Best-first trees whose drafts, levels and nodes are chosen step by step to maximise tokens per second.

    One object serves one decoder: it learns what this target and these drafts cost, and which tokens are accepted.
    `begin` gives every text an object of its own, which shares what is learnt.  Texts may be decoded at once, in
    several threads.

    Args:
        max_nodes: nodes of a merged tree at most.  None is 31, and where a pass over twice the tokens costs hardly more
            (weights are fetched in every pass, say), twice as many again and again, up to 255.
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
        usual = MAX_NODES if max_nodes is None else max_nodes, MAX_DEPTH if max_depth is None else max_depth
        bounds = BestFirst(*usual)  # which checks them
        self.max_nodes, self.max_depth = bounds.max_nodes, bounds.max_depth
        self.most_nodes = MOST if max_nodes is None else self.max_nodes  # however cheap they are
        self.most_depth = MOST if max_depth is None else self.max_depth
        self.lock = Lock()
        self.frozen = profile is not None  # costs are given
        self.learnt = Profile.read(profile) if profile is not None else Profile()
        self.given = self.learnt  # what a text starts from, if costs are given
        self.start(self.learnt.drafts, coupled=False)

    def __repr__(self) -> str:
        return f"Auto(max_nodes={self.max_nodes}, max_depth={self.max_depth})"

    def begin(self, drafts: int, coupled: bool, rows: int = 1, packed: bool = False) -> "Auto":
        """Return an object for one text, which shares what is learnt: see `start`."""
        text = copy(self)
        text.start(drafts, coupled, rows, packed)
        return text

    def start(self, drafts: int, coupled: bool, rows: int = 1, packed: bool = False) -> None:
        """Begin a text: every draft gets a trial, however idle it was, because texts differ.

        Of many texts at a time about as much is accepted as of earlier ones: a draft that gained too little there is
        idle first, and its wait goes on.

        Args:
            drafts: how many there are.
            coupled: whether drafts rank by the target's noise.
            rows: texts that are decoded at a time, at first.
            packed: whether trees of different sizes cost no more than their nodes, as in packed passes.

        Raises:
            PolicyError: the profile is for another number of drafts.
        """
        if self.frozen:
            if drafts != self.given.drafts:
                raise PolicyError(f"the profile is for {self.given.drafts} drafts, not {drafts}: save one for these")
            self.learnt = deepcopy(self.given)  # so that a text does not depend on others
        self.learnt.drafts, self.packed = drafts, packed
        self.costs, self.acceptance = self.learnt.costs, self.learnt.acceptance[coupled]
        self.steps = self.since_plain = self.plain_first = 0
        self.surprises, self.ceiling = 0, inf  # sizes beyond the usual ones that were dear; tokens not to be fed again
        self.worth = False  # whether this step has a tree that is worth its cost
        with self.lock:
            self._judge(drafts, rows)
            if rows >= MANY and not self.frozen and (plain := self.costs.plain.get(rows)):
                plain.count, self.plain_first = min(plain.count, 1), PLAIN_FIRST
        self.asked = sum(1 << d for d, record in enumerate(self.records) if record.until)  # bit mask, of the next step
        self.warm = 0  # those asked in the step before: the others must first read what they missed
        if self.plain_first:
            self.asked = 0
        self.levels: defaultdict[int, int] = defaultdict(int)  # asked for in this step, by draft
        self.grown: Forest | None = None  # this step's trees, before `fit`

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
        nodes, depth = self.limits(source.batch)
        depth = depth if max_depth is None else min(max_depth, depth)
        if not self.asked >> source.draft & 1:
            depth = 0
        self.levels[source.draft] = min(depth, 1)
        half = self.costs.node(source.batch) / 2  # for q may be low
        least = min(max(half, LEAST[0]), LEAST[1])
        # a draft that answers for all depths at once is asked once, and levels cost nothing
        wanted = None if hasattr(source, "lattice") else _Levels(self, source)
        return grow_best_first(source, nodes, depth, least, wanted)

    def room(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return nodes and levels of a tree as caches have room for them: at first, and however cheap they are."""
        return (self.max_nodes, self.max_depth), (self.most_nodes, self.most_depth)

    def limits(self, rows: int) -> tuple[int, int]:
        """Return the most nodes and levels of a tree now: twice as many when trees of the last size proved cheap."""
        nodes = self.max_nodes
        while nodes < self.most_nodes and self.costs.flat(rows, nodes) and 2 * rows * (nodes + 1) < self.ceiling:
            nodes = min(2 * nodes + 1, self.most_nodes)
        return nodes, max(self.max_depth, min(nodes, self.most_depth))

    def fit(self, trees: Forest) -> Forest:
        """Return each tree's nodes that are worth their part of the target's pass, or none.

        They are as many in all rows, unless passes are packed: then some rows may have none.
        """
        forest = self.grown = trees
        if len(forest.nodes) == len(forest):
            self.worth = False
            return forest
        with self.lock:
            reached = self.acceptance.path(forest.nodes)
            size = self._size(forest.nodes, reached)
        return forest.best(size, reached, together=self.packed)

    def wanted_nodes(self, draft: int, depth: int, accepted: Sequence[Sequence[float]]) -> int:
        """Return about how many nodes of each row a draft is asked: none unless they gain more than the level costs.

        Args:
            draft, depth: which, and of which nodes.
            accepted: per row, the probabilities that the target accepts those nodes, in the draft's order.
        """
        rows, family = len(accepted), self.acceptance.family(draft, depth)
        cost = self.costs.level(draft, rows)
        if cost is None and depth and rows >= MANY:  # a wide level of many rows may cost many plain steps
            return 0
        cost = LEVEL_PRICE * rows if cost is None else cost
        node = self.costs.node(rows)
        gains = [[max(0.0, chance * family - node) for chance in row] for row in accepted]
        if sum(map(sum, gains)) <= cost + (0.0 if depth else DOUBT * (cost + node * rows)):
            return 0
        wanted = [index + 1 for row in gains for index, gain in enumerate(row) if gain * rows > NODE_SHARE * cost]
        return size_bucket(max(wanted, default=1))

    def _size(self, nodes: Nodes, reached: Sequence[float]) -> int:
        """Return how many nodes the target scores in each row, from all nodes' probabilities of acceptance.

        In packed passes, in all rows.
        """
        starts = nodes.starts.tolist()
        rows, ends = len(starts) - 1, starts[1:]
        each = [reached[start + 1 : end] for start, end in zip(starts, ends, strict=False)]
        best, counted = ([[*chain(*each)]], rows) if self.packed else (each, 1)  # rows that a number is of
        first, trees = max(1, counted * FIRST_NODES // rows), self.costs.trees
        limit = counted * self.limits(rows)[0]
        if trees.known:  # no pass is more than twice as large as any before, whatever the line promises
            limit = int(min(limit, max(first, counted * (2 * trees.largest / rows - 1))))
        most = min(limit, max(map(len, best)))
        price = self.costs.price(rows)
        if price is None or not trees.known:  # sizes must differ to tell what a node costs
            return min(first << trees.count, most)
        ranked = (sorted(group, reverse=True) for group in best)
        gains = [0.0, *accumulate(map(sum, zip_longest(*ranked, fillvalue=0.0)))]  # of so many nodes
        sizes = [n for n in range(most + 1) if self.packed or size_bucket(n + 1) == n + 1 or n == limit]
        size = max(sizes, key=lambda n: gains[n] - price * self.costs.seconds(rows, n / counted))
        self.worth = size > 0
        return size or (min(first, most) if any(record.tried(self.steps) for record in self.records) else 0)

    def _judge(self, drafts: int, rows: int) -> None:
        """Judge all drafts anew, for a batch of so many rows."""
        self.judged_rows, self.since_tree = rows, 0
        self.surplus = Average(2 * PATIENCE)  # tokens a step, more than plain decoding makes in its seconds
        self.records = [DraftRecord(self.steps, self._doubted(draft, rows)) for draft in range(drafts)]

    def _doubted(self, draft: int, rows: int) -> tuple[int, int] | None:
        """Return how long a draft is idle already, and its wait, if its first levels gained less than they cost.

        That is in earlier texts, at so many rows; None if it is to be asked.
        """
        level = self.costs.level(draft, rows)
        if rows < MANY or level is None or not self.costs.trees.known:
            return None
        cost = (1 + DOUBT) * (level / rows + self.costs.node(rows))
        gains = [self.acceptance.expected(draft, depth) - cost for depth in range(1, DEPTHS + 1)]
        idled = self.learnt.idle.get((draft, rows.bit_length()), (0, FAILED[1] * WAITS[0]))
        return idled if max(accumulate(gains)) < 0 else None

    def _choose(self, rows: int) -> int:
        """Return the drafts to ask in the next step, a bit mask."""
        if not self.judged_rows / 2 < rows < 2 * self.judged_rows:  # nodes and levels have another price
            self._judge(len(self.records), rows)
        if self.steps < self.plain_first or (not self.frozen and self.since_plain >= self._plain_again(rows)):
            return 0
        prices = [self.costs.level(draft, rows) for draft in range(len(self.records))]
        pays = self.since_tree < PATIENCE and self.surplus.value > -LUCK / max(self.surplus.weight, 1) ** 0.5
        works = [
            record.works(self.steps, None if price is None else price / rows, pays, rows)
            for record, price in zip(self.records, prices, strict=True)
        ]
        if any(record.tried(self.steps) and record.until == self.steps + TRIAL for record in self.records):
            self.surplus.count = min(1, self.surplus.count)  # what was before counts as one step of the trial
        return sum(1 << draft for draft, asked in enumerate(works) if asked)

    def _plain_again(self, rows: int) -> float:
        """Return after how many steps with trees a plain one is due; the less trees gain, the less it costs."""
        first, least, most = PLAIN_AGAIN
        plain = self.costs.plain.get(rows)
        return min(first << min(plain.count if plain else 0, most), max(least, most * self.surplus.value / rows), most)

    # ---- what is learnt ----

    def observe(
        self,
        trees: Sequence[TokenTree],
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        proposing: Sequence[float],
        seconds: float | None,
    ) -> None:
        """Learn from a step.

        Args:
            trees: what the target scored, one per row.
            paths: accepted nodes, root excluded.
            tokens: what each row emitted.
            proposing: seconds of each draft; next to nothing where it was not asked.
            seconds: of the whole step, drafts included; None if its pass read a prompt, too.
        """
        assert self.grown is not None, "a step is fitted before it is observed"
        with self.lock:
            rows, drafted = len(trees), [tree.num_drafted for tree in trees]
            nodes = sum(drafted) / rows if self.packed else max(drafted)  # that each row pays for
            if not self.frozen and seconds is not None:
                self._time(rows, nodes, proposing, seconds - sum(proposing))
            levels = [self.costs.levels[d].value * n for d, n in self.levels.items() if d in self.costs.levels]
            emitted, modelled = sum(map(len, tokens)), self.costs.seconds(rows, nodes) + sum(levels)
            self.costs.earn(rows, emitted, modelled)
            if any(self.levels.values()) and (plain := self.costs.seconds(rows, 0)):
                spent = modelled if self.frozen or seconds is None else min(seconds, FAR * modelled)
                self.surplus.add(emitted - rows * spent / plain)
            if self.levels:
                self.acceptance.observe(self.grown, tokens)
                self._credit(trees, paths)
            self.steps += 1
            self.since_plain = self.since_plain + 1 if nodes else 0
            self.since_tree = 0 if self.worth else self.since_tree + 1
            self.warm = sum(1 << draft for draft, asked in self.levels.items() if asked)
            self.levels.clear()
            self.grown = None
            self.asked = self._choose(rows)
            batch = self.judged_rows
            for draft, record in enumerate(self.records if batch >= MANY else ()):
                if record.idle_from is None:
                    self.learnt.idle.pop((draft, batch.bit_length()), None)
                else:
                    self.learnt.idle[draft, batch.bit_length()] = self.steps - record.idle_from, record.wait

    def _time(self, rows: int, nodes: float, proposing: Sequence[float], rest: float) -> None:
        """Learn costs from a step's seconds: of each draft, and of the rest."""
        fed, plain = round(rows * (nodes + 1)), self.costs.plain.get(rows)
        if nodes and plain is not None and rest <= FAR * plain.value:
            self.costs.cheap = max(fed, self.costs.cheap)
        if nodes > self.max_nodes and fed > self.costs.trees.largest and rest > FAR * self.costs.trees.at(fed):
            self.surprises += 1  # no line holds below this size and above: go back, after two in one text
            self.ceiling = fed if self.surprises > 1 else self.ceiling
        elif nodes:
            self.costs.trees.add(fed, rest)
        else:
            self.costs.plain.setdefault(rows, Seconds(PATIENCE)).add(rest)
        for draft, levels in self.levels.items():
            if levels and self.warm >> draft & 1:  # else it has to read what it missed
                self.costs.levels.setdefault(draft, Seconds()).add(proposing[draft] / levels)

    def _credit(self, trees: Sequence[TokenTree], paths: Sequence[Sequence[int]]) -> None:
        """Credit each draft that was asked with the tokens that cheaper drafts would not have gained without it."""
        masks = [[tree.proposers[node] for node in path] for tree, path in zip(trees, paths, strict=True)]
        asked = [draft for draft, levels in self.levels.items() if levels]
        if not all(draft in self.costs.levels for draft in asked):
            return
        drafts = before = 0
        for draft in sorted(asked, key=lambda draft: self.costs.levels[draft].value):
            drafts |= 1 << draft
            reached = sum(reach(path, drafts) for path in masks)
            self.records[draft].gained.add((reached - before) / len(trees))
            self.records[draft].levels.add(self.levels[draft])
            before = reached

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


class _Levels:
    """How many nodes of its next level one draft is asked about, from their corrected probabilities.

    Where tensors are not on the host it goes by averages instead: to look at the nodes would be to wait for them.
    """

    def __init__(self, auto: Auto, source: Source) -> None:
        self.auto, self.draft = auto, source.draft
        self.known = [[(0.0, 1.0)] for _ in range(source.batch)]  # score and probability of every node asked about

    def __call__(self, frontier: Frontier, scores: Tensor) -> int:
        auto, width = self.auto, frontier.tokens.shape[1]
        with auto.lock:
            if frontier.tokens.device.type == "cpu":
                level = self._level(frontier, scores)
                width = auto.wanted_nodes(self.draft, frontier.depth, [[chance for _, chance in row] for row in level])
                for known, row in zip(self.known, level, strict=True):
                    known += row[:width]
            else:
                average = auto.acceptance.expected(self.draft, frontier.depth)
                width *= auto.wanted_nodes(self.draft, frontier.depth, [[average]] * len(self.known))
        auto.levels[self.draft] += width > 0
        return width

    def _level(self, frontier: Frontier, scores: Tensor) -> list[list[tuple[float, float]]]:
        """Return every node's score and the probability that it is accepted, by row; padding has none."""
        rate = self.auto.acceptance.edge(self.draft, frontier.depth)
        rows = zip(self.known, scores.tolist(), frontier.parents.tolist(), frontier.valid.tolist(), strict=True)
        return [
            [
                (score, real and known[p][1] * min(1.0, exp(score - known[p][0]) * rate))
                for score, p, real in zip(*row, strict=True)
            ]
            for known, *row in rows
        ]
