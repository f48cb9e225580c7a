"""Sessions of the rows that are decoded together: the target's, one of each draft, and what they take.

Knows: what the engine needs of a decoder, how large caches are at first and at most, how prompts are read, which rows
a draft's context still holds, clocks.
Does not know: which rows wait, how a step is decoded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, compress, zip_longest
from math import inf
from time import perf_counter
from typing import Any, NamedTuple, Protocol, Self

from specinfer.attention import TreeModel, TreeSession
from specinfer.attention.model import PREFILL_CHUNK
from specinfer.common.tensors import concat, size_bucket
from specinfer.engine.draft import Clocked, Committed, Draft, DraftContext, DraftSession, Scored, States
from specinfer.engine.gumbel import SILENT
from specinfer.engine.prefixes import Cached, cache_of
from specinfer.engine.sequence import Row
from specinfer.engine.store import Beginning, Owners, PrefixStore, StoringSession
from specinfer.engine.verify import ExactMatch, Verifier
from specinfer.results import Seconds
from specinfer.tree import Forest, Policy

FIRST_TOKENS = 2048  # new tokens that caches hold at first; beyond it they double
FIRST_LEVELS = 8  # levels of a tree that drafts' caches hold at first
CHUNK = 128  # tokens of prompts that are read in a step beside rows under way


class Decoder(Protocol):
    """What the engine needs of a decoder: models, rules, and what was decided about them."""

    target: TreeModel
    drafts: list[Draft]
    policy: Policy
    verifier: Verifier
    tokenizer: Any
    confidence_gate: float | None
    notes: list[str]
    aux_layers: list[int]
    graphs: bool

    @property
    def networks(self) -> list[TreeModel]:
        """Everything that runs passes."""

    @property
    def passes(self) -> str:
        """How passes run, in words."""

    def supported(self, policy: Policy, notes: list[str]) -> Policy:
        """Return the policy, or another one that the models can work on."""


class Newcomers(NamedTuple):
    """Rows that drafts have no session for yet; per row, states at the last tokens before its root, and caches."""

    rows: Sequence[Row] = ()
    states: States = ()
    caches: Sequence[Sequence[Cached]] = ()


class Drafting(Clocked):
    """A draft's session for B rows, with a clock.

    A draft often has a smaller context than its target.  A row that reaches its end gets bare roots from then on,
    and its result says so.  Rows whose prompts the target's pass reads beside the trees of others join after that
    pass.  What rows commit while nobody asks the draft is told to its session later, all at once.

    Args:
        draft: whose session it is.
        context: to open it with.
        open: opens one for other rows.

    Attributes:
        proposing: seconds in its proposals (passes, look-ups, growing) without prefill.
        inside: per row, whether the session still has it.
        notes: per row, where its result's notes are.
        late: the last rows of the batch, if they join after the pass of this step.
        untold: by step, what was committed that the session was not told yet.
    """

    def __init__(self, draft: Draft, context: DraftContext, open: Callable[[Newcomers], "Drafting"]) -> None:
        self.session: DraftSession = draft.open(context)
        self.draft, self.open, self.proposing, self.late = draft, open, 0.0, Newcomers()
        self.inside = [True] * len(context.prompts)
        self.notes: list[list[str]] = list(context.notes) or [[] for _ in self.inside]
        self.untold: list[tuple[Committed, States]] = []
        self._asked = False  # in this step
        self._let_go()

    def propose(self, policy: Policy, roots: Sequence[int], max_depth: int) -> Forest:
        """Return one tree per row, as the session grows them; bare roots for rows that have left or are late."""
        started, bare = perf_counter() - self.prefill_seconds, Forest(policy.kind, roots)
        self._tell()
        self._asked = True
        grown = self.session.propose(policy, self._of_inside(roots), max_depth) if any(self.inside) else bare
        self.proposing += perf_counter() - self.prefill_seconds - started
        if len(grown) == len(bare):
            return grown
        trees = iter(grown)
        inside = [*self.inside, *[False] * len(self.late.rows)]
        return Forest.of([next(trees) if it else tree for it, tree in zip(inside, bare, strict=True)])

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Take note of what each row committed; rows whose context has ended leave, and late ones join."""
        self.untold.append((tokens, states if self.draft.aux_layers else ()))  # what it does not read can be freed
        if self.session.may_wait and not (self._asked or self.late.rows or None in tokens):
            return
        known, late, self.late = len(self.inside), self.late, Newcomers()
        self._tell(scored)
        joining = [each for each in zip(*late, states[known:], strict=True) if not each[0].finished]
        if joining:
            rows, before, caches, new = zip(*joining, strict=True)
            self.join(self.open(Newcomers(rows, [*map(concat, zip(before, new, strict=True))], caches)))

    def _tell(self, scored: Sequence[Scored] = ()) -> None:
        """Tell the session what it was not told yet; rows that retire, or that it cannot continue, leave."""
        if not self.untold:
            return
        tokens, states = _as_one(self.untold)
        self.untold, self._asked = [], False
        if any(self.inside):
            self.session.commit(*(self._of_inside(values) for values in (tokens, states, scored)))
        if None in tokens:
            kept = [new is not None for new in tokens]
            self.inside, self.notes = [*compress(self.inside, kept)], [*compress(self.notes, kept)]
        self._let_go()

    @property
    def batch(self) -> int:
        """Rows of the batch, late ones included."""
        return len(self.inside) + len(self.late.rows)

    def read(self, row: int, ids: Sequence[int]) -> Cached | None:
        """Return what the draft has read of a row; of a late one, what it begins with."""
        if row >= len(self.inside):
            return cache_of(self.draft.owner, self.late.caches[row - len(self.inside)])
        read = self.session.read(sum(self.inside[:row]), ids) if self.inside[row] else None
        return read and replace(read, owner=self.draft.owner)

    def needs(self, row: int, ids: Sequence[int]) -> int:
        """Return the first token of a row whose states the draft may need; those of a row that it has left are none."""
        if not self.draft.aux_layers or (row < len(self.inside) and not self.inside[row]):
            return len(ids)
        read = self.read(row, range(len(ids)))  # their number counts, and nothing is copied in every step
        return max(0, len(read.ids) - 1) if read else 0

    def join(self, other: Self) -> None:
        """Take in the rows of another session of the same draft, after the own ones."""
        self._tell()
        if any(other.inside):
            self.session.join(other.session)
        self.inside, self.notes = self.inside + other.inside, self.notes + other.notes

    def _of_inside(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of rows that the session has, of one value for each row or of none."""
        return [value for value, inside in zip(values, self.inside, strict=False) if inside]

    def _let_go(self) -> None:
        """Drop the rows that the session cannot continue."""
        rows = [row for row, inside in enumerate(self.inside) if inside]
        ended = [levels <= 0 for levels in self.session.levels_left()] if rows and self.session.limit else []
        if not any(ended):
            return
        self.session.commit([None if over else () for over in ended], [None] * len(rows))
        ended_at = f"its context of {self.session.limit} tokens has ended"
        note = f"draft {self.draft.name}: {ended_at}, and it proposes nothing more"
        for row, over in zip(rows, ended, strict=True):
            self.inside[row] = not over
            if over:
                self.notes[row].append(note)


@dataclass
class Openings:
    """How sessions are opened for some rows, and how large."""

    decoder: Decoder
    policy: Policy
    store: PrefixStore = field(default_factory=PrefixStore)

    def target(self, rows: Sequence[Row], joining: bool = False) -> tuple[TreeSession, bool]:
        """Open a session of the target for rows.

        The pass of the next step reads the ends of prompts, before the trees, which saves a pass.  It does not where
        drafts need their states earlier, nor beside other rows where that costs more: a pass that pads all rows to the
        longest prompt, and fetches no weights, computes mostly padding.

        Args:
            rows: the sequences.
            joining: whether they join others for the next step.

        Returns:
            the session, and whether the pass of the next step reads the ends of their prompts.
        """
        model, aux_layers = self.decoder.target, self._aux_layers()
        longest, end = max(len(row.ids) for row in rows), _end(rows)
        # a grammar proposes as many nodes as a draft
        proposing = len(self.decoder.drafts) + any(row.constraint for row in rows)
        usual, most = (count * max(1, proposing) for count, _ in self._tree_sizes())
        # trees of many rows are small, and passes read wide caches more slowly; graphs are lost when a cache grows
        usual = usual if self.decoder.graphs else usual // len(rows)
        first = min(end, longest + FIRST_TOKENS) + size_bucket(1 + usual)
        nodes = size_bucket(1 + most)
        texts = [row.text for row in rows]
        sizes = longest if joining else first, end + nodes, aux_layers, self.decoder.graphs
        target = self.store.open(model, texts, *sizes, owners=self._owners())
        target.cache.first_capacity = first
        needed = aux_layers and not (joining and target.run.packs)
        pads = joining and not (target.run.packs or model.dispatched)
        return target, not (needed or pads or model.stateful)

    def draft(self, number: int, newcomers: Newcomers) -> Drafting:
        """Open a session of a draft for rows.

        Args:
            number: which.
            newcomers: the rows.
        """
        decoder, rows, end = self.decoder, newcomers.rows, _end(newcomers.rows)
        draft = decoder.drafts[number]
        longest = max(len(row.ids) for row in rows)
        (usual, levels), (most, most_levels) = self._tree_sizes()
        sampled = [row for row in rows if row.sampling]
        context = DraftContext(
            prompts=[list(row.ids) for row in rows],
            capacity=min(end, longest + FIRST_TOKENS) + size_bucket(1 + usual * min(levels, FIRST_LEVELS)),
            # a row may miss tokens that another has, and all get as many slots; best-first drops some nodes later
            max_capacity=2 * end + size_bucket(1 + most * most_levels),
            vocab_size=decoder.target.vocab_size,
            draft=number,
            processors=(sampled or rows)[0].processors.without_prefix_readers(),
            seeds=[row.seed for row in rows],
            couplings=[row.coupling if row.sampling else SILENT for row in rows] if self.coupled(rows) else (),
            aux_layers=self._aux_layers(),
            states=newcomers.states,
            known=[cache_of(draft.owner, caches) for caches in newcomers.caches],
            graphs=decoder.graphs,
            notes=[row.notes for row in rows],
            predicted=[row.predicted for row in rows],
        )
        return Drafting(draft, context, partial(self.draft, number))

    def coupled(self, rows: Sequence[Row]) -> bool:
        """Whether drafts rank by the rows' noise."""
        return isinstance(self.decoder.verifier, ExactMatch) and any(row.sampling for row in rows)

    def _tree_sizes(self) -> list[tuple[int, int]]:
        """Return nodes and levels of a draft's tree, as caches have room for them: at first, and at most."""
        return [(nodes, max(1, levels)) for nodes, levels in self.policy.room()]

    def _aux_layers(self) -> list[int]:
        """Return the target's layers whose hidden states are needed."""
        return sorted({*self.decoder.aux_layers, *self._searched()})

    def _searched(self) -> Sequence[int]:
        """Return the target's layers whose hidden states the policy compares."""
        return self.policy.hidden_layers(self.decoder.target.layers)

    def _owners(self) -> Owners:
        """Return who needs hidden states, and for how many tokens: drafts, and a policy, which keeps them by itself."""
        drafts = [draft for draft in self.decoder.drafts if draft.aux_layers]
        limits = [getattr(draft.model, "max_positions", None) or inf for draft in drafts]
        return [*zip([draft.owner for draft in drafts], limits, strict=True), *[(None, inf)] * bool(self._searched())]


class Reader:
    """Rows whose prompts are read, in a session of the target of their own.

    Args:
        openings: how to open it.
        rows: the sequences.
        beside: the session that they join, if they join others.

    Attributes:
        states: per row, the target's auxiliary hidden states at the last of the tokens that were read so far.
    """

    def __init__(self, openings: Openings, rows: Sequence[Row], beside: TreeSession | None = None) -> None:
        self.rows = rows
        self.session, self.holds = openings.target(rows, joining=beside is not None)
        self.begun: list[Beginning] = openings.store.begin(self.session, beside)
        self.states: States = [states for states, _ in self.begun]
        lengths = self.session.cache.lengths
        self.left = [row.text.prompt[length:] for row, length in zip(rows, lengths, strict=True)]

    def read(self, most: int | None = None) -> bool:
        """Read this many more tokens of each prompt, or all; return whether all prompts are read."""
        count = max(map(len, self.left)) if most is None else most
        parts, self.left = [left[:count] for left in self.left], [left[count:] for left in self.left]
        done = not any(self.left)
        read = self.session.prefill(parts, hold=self.holds and done)
        self.states = [concat(parts) for parts in zip(self.states, read, strict=True)]
        return done

    @property
    def newcomers(self) -> Newcomers:
        """The rows, as drafts open sessions for them."""
        return Newcomers(self.rows, self.states, [caches for _, caches in self.begun])


class Sessions:
    """A session of the target and one of each draft, in which rows have been read; ready for a step.

    Args:
        openings: how to open them.
        rows: the sequences.

    Attributes:
        target, drafts: the sessions.
        states: per row, the target's auxiliary hidden states at the last tokens before the root, before the first step.
        policy: how trees grow in this batch.
    """

    def __init__(self, openings: Openings, rows: Sequence[Row]) -> None:
        decoder, self._openings = openings.decoder, openings
        self._joining: Reader | None = None
        reader = Reader(openings, rows)
        reader.read()
        self.target, self.states = reader.session, reader.states
        self.drafts = [openings.draft(number, reader.newcomers) for number in range(len(decoder.drafts))]
        if isinstance(self.target, StoringSession):
            self.target.follow(self.drafts)
        coupled = openings.coupled(rows)
        self.policy = openings.policy = openings.policy.begin(
            len(self.drafts), coupled, len(rows), self.target.run.packs
        )

    def join(self, rows: Sequence[Row], beside: bool) -> int:
        """Read prompts in order, and let their rows join; the time that this takes is prefill time.

        Args:
            rows: that are to join; one that is no longer among them was taken back.
            beside: whether rows are under way: then a chunk is read, of several prompts or of a single longer one.

        Returns:
            how many rows have joined, the first ones.
        """
        if self._joining and self._joining.rows[0] not in rows:
            self._openings.store.release(self._joining.session)
            self._joining = None
        if not rows:
            return 0
        started, before = perf_counter(), self._prefill_seconds
        # passes that fetch weights cost more than what they read
        most = (PREFILL_CHUNK if self.target.model.dispatched else CHUNK) if beside else None
        sizes = accumulate(len(row.text.prompt) for row in rows)
        count = len(rows) if most is None else max(1, sum(size <= most for size in sizes))
        reader = self._joining = self._joining or Reader(self._openings, rows[:count], self.target)
        done = reader.read(most)
        reader.session.prefill_seconds = 0.0  # it is counted here, also of rows that do not join yet
        if done:
            self._take(reader)
        self.target.prefill_seconds += perf_counter() - started - (self._prefill_seconds - before)
        return len(reader.rows) if done else 0

    def release(self) -> None:
        """Keep what was read of rows that are no longer decoded."""
        if isinstance(self.target, StoringSession):
            rows = len(self.target.rows)  # others than a draft's if Ctrl-C came in between
            self.target.drafts = [draft for draft in self.drafts if draft.batch == rows]
        for session in (self.target, *([self._joining.session] if self._joining else ())):
            self._openings.store.release(session)

    def _take(self, reader: Reader) -> None:
        """Let rows join whose prompts are read."""
        self._joining, others = None, reader.session
        for draft in self.drafts:
            if any(others.unread) and others.aux_layers:  # not all states are known yet
                draft.late = reader.newcomers
            else:
                draft.join(draft.open(reader.newcomers))
        self.target.join(others)

    @property
    def _prefill_seconds(self) -> float:
        return self.target.prefill_seconds + sum(draft.prefill_seconds for draft in self.drafts)


def _as_one(steps: Sequence[tuple[Committed, States]]) -> tuple[Committed, States]:
    """Return steps that followed each other as a single one; the last may have more rows, which have just joined."""
    if len(steps) == 1:
        return steps[0]
    tokens, states = zip(*steps, strict=True)
    every = [None if row[-1] is None else [*chain(*row)] for row in zip(*tokens, strict=False)]
    return every, [concat(row) for row in zip(*states, strict=False)]


def _end(rows: Sequence[Row]) -> int:
    """Return the most tokens that a row may have."""
    return max(len(row.ids) for row in rows) + max(row.remaining for row in rows)


@dataclass(frozen=True)
class Reading:
    """What was spent up to some moment, or between two."""

    seconds: Seconds = field(default_factory=Seconds)
    passes: int = 0  # of the target, those that read prompts excluded
    drafting: tuple[tuple[int, float], ...] = ()  # per draft, its passes and the seconds in its proposals
    first: int = 0  # passes, of the target and drafts, that took longer than others of their shapes will

    def __sub__(self, earlier: "Reading") -> "Reading":
        """Return what was spent since an earlier reading of the same clocks."""
        pairs = zip_longest(self.drafting, earlier.drafting, fillvalue=(0, 0.0))
        drafting = tuple((passes - before, spent - then) for (passes, spent), (before, then) in pairs)
        first = self.first - earlier.first
        return Reading(self.seconds - earlier.seconds, self.passes - earlier.passes, drafting, first)


class Clocks:
    """The clocks of a batch.  They run while it is decoded, and stop between two steps.

    Attributes:
        now: the newest reading.
    """

    def __init__(self) -> None:
        self.now, self._learnt = Reading(), 0.0
        self.resume()

    def resume(self) -> None:
        """Restart: the time since the newest reading was the caller's."""
        self.started = perf_counter()

    def read(self, target: TreeSession, drafts: Sequence[Drafting]) -> Reading:
        """Return what was spent since the newest reading; this one takes its place."""
        before, started = self.now, self.started
        self.resume()
        seconds = Seconds(
            total=before.seconds.total + self.started - started,
            prefill=target.prefill_seconds + sum(draft.prefill_seconds for draft in drafts),
            target=target.seconds,
            draft=sum(draft.seconds for draft in drafts),
            learning=before.seconds.learning,
        )
        first = target.first_passes + sum(draft.first_passes for draft in drafts)
        self.now = Reading(seconds, target.passes, tuple((draft.passes, draft.proposing) for draft in drafts), first)
        return self.now - before

    @property
    def since_learning(self) -> float:
        """Seconds until the newest reading, without learning, since drafts learnt."""
        return self.now.seconds.total - self._learnt

    def learnt(self) -> None:
        """Take the time since `resume` for what drafts learn between calls."""
        spent, seconds = perf_counter() - self.started, self.now.seconds
        self._learnt = seconds.total + spent
        self.now = replace(self.now, seconds=replace(seconds, total=self._learnt, learning=seconds.learning + spent))
