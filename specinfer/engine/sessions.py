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
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from specinfer.attention import TreeModel, TreeSession
from specinfer.attention.model import PREFILL_CHUNK
from specinfer.common.tensors import concat, size_bucket
from specinfer.engine.draft import Clocked, Committed, Draft, DraftContext, DraftSession, Scored, States
from specinfer.engine.gumbel import SILENT
from specinfer.engine.prefixes import Cached, cache_of
from specinfer.engine.sequence import Row
from specinfer.engine.store import Beginning, Owners, PrefixStore, StoringSession
from specinfer.engine.verify import ExactMatch, Verifier
from specinfer.errors import TreeError
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

    rows: Sequence[Row]
    states: States
    caches: Sequence[Sequence[Cached]]


@dataclass
class Late:
    """A row that a draft has not read: the target's states at its tokens, in parts, and caches to begin with."""

    row: Row
    states: list[Tensor | None]
    caches: Sequence[Cached]


class Unopened(DraftSession):
    """The session of a draft that has read nothing yet."""

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """There is nothing to take note of."""


class Drafting(Clocked):
    """A draft's session for B rows, with a clock.

    A draft often has a smaller context than its target.  A row that reaches its end gets bare roots from then on,
    and its result says so.  What rows commit while nobody asks the draft is told to its session later, all at once, and
    a model reads a row's prompt when it is asked for the first time, if the draft may wait.

    Args:
        draft: whose session it is.
        context: makes what the draft is told about new rows.

    Attributes:
        session: of the rows that it has read.
        proposing: seconds in its proposals (passes, look-ups, growing) without prefill.
        reading_seconds: spent on reading prompts, beyond those that the session counts.
        inside: per row that it has read, whether the session still has it.
        notes: per row, where its result's notes are.
        late: the last rows of the batch, which it has not read.
        unread: how many of them, the last ones, have states that the target's pass of this step tells.
        patient: whether late rows wait until the draft is asked, as reading them takes passes.
        untold: by step, what was committed that the session was not told yet.
    """

    def __init__(self, draft: Draft, context: Callable[[Newcomers], DraftContext]) -> None:
        self.session: DraftSession = Unopened()
        self.draft, self.context, self.proposing, self.reading_seconds = draft, context, 0.0, 0.0
        self.inside: list[bool] = []
        self.notes: list[list[str]] = []
        self.late: list[Late] = []
        self.unread, self.patient = 0, draft.may_wait and draft.model is not None
        self.untold: list[tuple[Committed, States]] = []
        self._asked = False  # in this step

    @property
    def prefill_seconds(self) -> float:  # type: ignore[override]
        """Wall-clock seconds in which it read prompts."""
        return self.session.prefill_seconds + self.reading_seconds

    def propose(self, policy: Policy, roots: Sequence[int], max_depth: int) -> Forest:
        """Return one tree per row, as the session grows them; bare roots for rows that have left or are late.

        Raises:
            TreeError: the session has more trees than rows, or fewer.
        """
        started, bare = perf_counter() - self.prefill_seconds, Forest(policy.kind, roots)
        self._tell()
        self._open()
        self._asked = True
        grown = self.session.propose(policy, self._of_inside(roots), max_depth) if any(self.inside) else bare
        self.proposing += perf_counter() - self.prefill_seconds - started
        if grown is not bare and len(grown) != (rows := sum(self.inside)):
            raise TreeError(f"{self.draft.name} proposed {len(grown)} trees for {rows} rows: one tree a row")
        if len(grown) == len(bare):
            return grown
        trees = iter(grown)
        inside = [*self.inside, *[False] * len(self.late)]
        return Forest.of([next(trees) if it else tree for it, tree in zip(inside, bare, strict=True)])

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Take note of what each row committed."""
        known, asked, self._asked = len(self.inside), self._asked, False
        states = states if self.draft.aux_layers else [None] * len(tokens)  # what it does not read can be freed
        for late, new in zip(self.late, states[known:], strict=True):
            late.states.append(new)
        self.late, self.unread = [*compress(self.late, (new is not None for new in tokens[known:]))], 0
        self.untold += [(tokens[:known], states[:known])] if known else []
        if asked or not self.draft.may_wait or None in tokens[:known]:
            self._tell(scored)
        if not self.patient:
            self._open()

    def take(self, newcomers: Newcomers, unread: bool) -> None:
        """Take in rows, after the others.

        Args:
            newcomers: the rows.
            unread: whether the target's pass of this step reads the ends of their prompts.
        """
        for row, states, caches in zip(*newcomers, strict=True):
            self.late.append(Late(row, [states if self.draft.aux_layers else None], caches))
        self.unread = len(newcomers.rows) if unread and self.draft.aux_layers else 0  # their states are not known yet
        if not self.patient:
            self._open()

    def _open(self) -> None:
        """Let the draft read the late rows, as far as the target has."""
        started, before = perf_counter(), self.prefill_seconds
        count = len(self.late) - self.unread
        rows, self.late = self.late[:count], self.late[count:]
        if not rows:
            return
        self._tell()
        newcomers = Newcomers(*zip(*((late.row, concat(late.states), late.caches) for late in rows), strict=True))
        session, notes = self.draft.open(self.context(newcomers)), [late.row.notes for late in rows]
        inside = self._kept(session, notes)
        if isinstance(self.session, Unopened):
            self.session = session
        elif any(inside):
            self.session.join(session)
        self.inside, self.notes = self.inside + inside, self.notes + notes
        self.reading_seconds += perf_counter() - started - (self.prefill_seconds - before)

    def _tell(self, scored: Sequence[Scored] = ()) -> None:
        """Tell the session what it was not told yet; rows that retire, or that it cannot continue, leave."""
        if not self.untold:
            return
        tokens, states = _as_one(self.untold)
        self.untold = []
        if any(self.inside):
            self.session.commit(*(self._of_inside(values) for values in (tokens, states, scored)))
        if None in tokens:
            kept = [new is not None for new in tokens]
            self.inside, self.notes = [*compress(self.inside, kept)], [*compress(self.notes, kept)]
        stay = iter(self._kept(self.session, self._of_inside(self.notes)))
        self.inside = [inside and next(stay) for inside in self.inside]

    @property
    def batch(self) -> int:
        """Rows of the batch, late ones included."""
        return len(self.inside) + len(self.late)

    def read(self, row: int, ids: Sequence[int]) -> Cached | None:
        """Return what the draft has read of a row; of a late one, what it begins with."""
        if row >= len(self.inside):
            return cache_of(self.draft.owner, self.late[row - len(self.inside)].caches)
        read = self.session.read(sum(self.inside[:row]), ids) if self.inside[row] else None
        return read and replace(read, owner=self.draft.owner)

    def needs(self, row: int, ids: Sequence[int]) -> int:
        """Return the first token of a row whose states the draft may need.

        It needs none of a row that it has left, and all of a late one, which may share less with its caches than is in
        them.
        """
        if row >= len(self.inside):
            return 0 if self.draft.aux_layers else len(ids)
        if not (self.draft.aux_layers and self.inside[row]):
            return len(ids)
        read = self.read(row, range(len(ids)))  # their number counts, and nothing is copied in every step
        return max(0, len(read.ids) - 1) if read else 0

    def _of_inside(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of rows that the session has, of one value for each row or of none."""
        return [value for value, inside in zip(values, self.inside, strict=False) if inside]

    def _kept(self, session: DraftSession, notes: Sequence[list[str]]) -> list[bool]:
        """Let a session drop the rows that it cannot continue; return for each whether it is kept.

        Args:
            session: of the draft.
            notes: of its rows.
        """
        ended = [levels <= 0 for levels in session.levels_left()] if notes and session.limit else []
        if not any(ended):
            return [True] * len(notes)
        session.commit([None if over else () for over in ended], [None] * len(notes))
        ended_at = f"its context of {session.limit} tokens has ended"
        for row in compress(notes, ended):
            row.append(f"draft {self.draft.name}: {ended_at}, and it proposes nothing more")
        return [not over for over in ended]


@dataclass
class Openings:
    """How sessions are opened for some rows, and how large."""

    decoder: Decoder
    policy: Policy
    store: PrefixStore = field(default_factory=PrefixStore)

    def target(self, rows: Sequence[Row], joining: bool = False) -> TreeSession:
        """Open a session of the target for rows, which may join others for the next step."""
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
        return target

    def holds(self, target: TreeSession, joining: bool = False) -> bool:
        """Whether the pass of the next step reads the ends of prompts, before the trees, which saves a pass.

        It does not where drafts need their states earlier, nor beside other rows where that costs more: a pass that
        pads all rows to the longest prompt, and fetches no weights, computes mostly padding.

        Args:
            target: the session of their rows.
            joining: whether they join others for the next step.
        """
        asked = self.decoder.aux_layers and not self.policy.idle and not (joining and target.run.packs)
        pads = joining and not (target.run.packs or target.model.dispatched)
        return not (asked or self._searched() or pads or target.model.stateful)

    def context(self, number: int, newcomers: Newcomers) -> DraftContext:
        """Return what a draft is told about rows.

        Args:
            number: which.
            newcomers: the rows.
        """
        decoder, rows, end = self.decoder, newcomers.rows, _end(newcomers.rows)
        draft = decoder.drafts[number]
        longest = max(len(row.ids) for row in rows)
        (usual, levels), (most, most_levels) = self._tree_sizes()
        sampled = [row for row in rows if row.sampling]
        return DraftContext(
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
        session: of the rows.
        beside: the session that they join, if they join others.

    Attributes:
        states: per row, the target's auxiliary hidden states at the last of the tokens that were read so far.
    """

    def __init__(
        self, openings: Openings, rows: Sequence[Row], session: TreeSession, beside: TreeSession | None = None
    ) -> None:
        self.rows, self.session = rows, session
        self.holds = openings.holds(session, joining=beside is not None)
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
        self.target = openings.target(rows)
        self.drafts = [Drafting(draft, partial(openings.context, n)) for n, draft in enumerate(decoder.drafts)]
        coupled, packs = openings.coupled(rows), self.target.run.packs
        self.policy = openings.policy = openings.policy.begin(len(self.drafts), coupled, len(rows), packs)
        reader = Reader(openings, rows, self.target)
        reader.read()
        self.states = reader.states
        self._draft(reader)
        if isinstance(self.target, StoringSession):
            self.target.follow(self.drafts)

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
        if not self._joining:
            session = self._openings.target(rows[:count], joining=True)
            self._joining = Reader(self._openings, rows[:count], session, self.target)
        reader = self._joining
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
        self._joining = None
        self._draft(reader)
        self.target.join(reader.session)

    def _draft(self, reader: Reader) -> None:
        """Let drafts take in rows whose prompts are read."""
        for draft in self.drafts:
            draft.take(reader.newcomers, unread=any(reader.session.unread))

    @property
    def _prefill_seconds(self) -> float:
        return self.target.prefill_seconds + sum(draft.prefill_seconds for draft in self.drafts)


def _as_one(steps: Sequence[tuple[Committed, States]]) -> tuple[Committed, States]:
    """Return steps of the same rows, one after the other, as a single one."""
    if len(steps) == 1:
        return steps[0]
    tokens, states = zip(*steps, strict=True)
    every = [None if row[-1] is None else [*chain(*row)] for row in zip(*tokens, strict=True)]
    return every, [concat(row) for row in zip(*states, strict=True)]


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
