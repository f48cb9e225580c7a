"""Drafts that run a network level by level: a small causal language model, and heads that read the target's states.

Knows: the network and its cache, the committed tokens that are not cached yet, the noise shared with the target, from
which token ids on a text needs no logits.
Does not know: the target, files and training of heads (`head`), verification, text.

The output layer of a small model with a large vocabulary is much of it, and most of its rows are of tokens that a text
does not use.  A draft may leave them out: it only never proposes them (FR-Spec, arXiv 2502.14856, which keeps the
tokens that are frequent in a corpus).  Byte-level tables stand in the order of merges, frequent ones first, so here the
first ids are kept, as many as the text's own last tokens ask for: in another language, or where a table has another
order, these are more, or all.  The end of a text, which has a high id, need not be drafted: it is the target's own
token after the last accepted one.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specinfer.attention import Layout, TreeModel, lay_out_level
from specinfer.common.tensors import padded_width
from specinfer.common.values import checked_names
from specinfer.drafts.rows import CATCH_UP, CachedRows, LevelRows, begun, state_columns
from specinfer.engine.draft import Committed, Draft, DraftContext, Scored, States
from specinfer.engine.prefixes import Cached
from specinfer.errors import InputError
from specinfer.tree import Frontier, Growth, Policy, Slots, Source

RECENT = 128  # tokens of a row that tell which ids the next ones come from
OUTLIERS, RARE = 3, 32  # of their ids, 3 (a chat template's), and one in 32, may be left out
FEWEST = 1 << 14  # ids whose logits are wanted, at least


class ModelDraft(Draft):
    """A small causal language model as a draft (a small speculative model, SSM).

    Args:
        model: a ``transformers`` causal LM; its vocabulary may be padded differently from the target's.
        tokenizer: compared with the target's when the decoder is built; None skips the comparison.
        name: in results, without the folders before it; by default the name that the model was loaded by.
        tokens: of a draft whose tokens are not the target's.  "text" lets it propose what the target's tokenizer makes
            of its text, and in sampled trees the tokens that both know (`drafts.through_text`); "same" refuses it.

    Raises:
        ModelError: not a model.
        InputError: an unknown word for ``tokens``, or something that is no name or no tokenizer.
    """

    may_wait = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str | None = None,
        tokens: str = "text",
    ) -> None:
        if tokens not in ("text", "same"):
            raise InputError(f"tokens={tokens!r:.60} is unknown: choose text or same")
        if tokenizer is not None and (isinstance(tokenizer, type) or not hasattr(tokenizer, "get_vocab")):
            raise InputError(f"tokenizer={tokenizer!r:.60} has no vocabulary: give the draft's, or None")
        if name is not None:
            checked_names("name", name)
        self.model: TreeModel = TreeModel(model)
        self.tokenizer: Any = tokenizer
        self.tokens = tokens
        full = str(name or getattr(model.config, "_name_or_path", ""))
        self.name = full.rstrip("/").split("/")[-1] or "draft"

    def open(self, context: DraftContext) -> "ModelDraftSession":
        """Start drafting for a batch of rows, with a cache of its own."""
        return ModelDraftSession(self.model, context)


class ModelDraftSession(LevelRows, CachedRows):
    """A model draft at work: a `Source` of distributions over its own `TreeSession`.

    The first pass of a step feeds the root together with all accepted tokens that are not in the cache yet.  Each
    further level is one pass over all rows.

    Args:
        model: that drafts.
        context: of the rows.
        texts: what it reads of them; None = their prompts.
    """

    per_row = (*CachedRows.per_row, "recent")
    draft_layers: tuple[int, ...] = ()  # layers of this model whose hidden states the session needs
    repeats = True  # whether levels below the root depend on lengths, and on what the root's pass gave, alone

    def __init__(self, model: TreeModel, context: DraftContext, texts: Sequence[Sequence[int]] | None = None) -> None:
        self.given: dict[str, Tensor] = {}  # what a graph reads of the root's pass, while its operations are recorded
        super().__init__(context)
        slots = context.capacity, context.max_capacity
        self.device = model.device  # of the distributions
        self.session = model.session(self.batch, *slots, self.draft_layers, context.graphs)
        self.uncached = begun(self.session, texts or context.prompts, context.known)  # committed tokens; root last
        self.level: Layout | None = None  # layout of the newest level fed
        self.fed: list[Frontier] = []  # levels fed this step, root excluded: pending columns are nodes 1, 2, ...
        self.vocab_size = self.words = min(model.vocab_size, context.vocab_size)
        self.recent = [list(prompt[-RECENT:]) for prompt in context.prompts]  # the target's tokens
        self.last_id = model.embedded - 1  # ids beyond it are padding of the target's vocabulary
        self.draft_states: list[Tensor | None] = []  # this model's hidden states at the tokens fed last, root last

    def source(self, roots: Sequence[int]) -> Source:
        """Return the session itself; nothing is fed yet."""
        self.level, self.fed, self.words = None, [], self._words()
        return self

    def grow(self, policy: Policy, source: Source, depth: int) -> Growth:
        """Return what a policy grows on the source; with graphs, one replays all levels below the root's."""
        if not (self.repeats and self.session.replays) or self.device.type == "cpu":  # where policies look at values
            return policy.grow(source, depth)
        settings = self.context.processors.settings  # which a graph holds as they are
        deepest = max(depth, min(self.levels_left()))  # the engine cuts what is too deep; few sizes come
        settled = policy.settled(source, deepest) if settings is not None else None
        if settled is None or not settled.max_nodes or not settled.max_depth:
            return policy.grow(source, depth)
        nodes, levels = settled.max_nodes, settled.max_depth
        given = {"logits": self._root_logits(), **self.beside_root(levels)}
        width = 0 if policy.adapts else padded_width(1 + nodes)  # what adapts looks at nodes, before the target's pass
        run = partial(self._grown_below, settled, source, width)
        slots, kind = max(nodes * levels, padded_width(nodes)), (settled, settings, width)
        tokens, parents, scores, valid, *fed = self.session.several(run, given, slots, kind)
        ordered = Slots(tokens, fed.pop(0), fed.pop(0), nodes, levels) if width else None
        self.level, self.given, self.session.passes = None, {}, self.session.passes + levels - 1
        self.fed = _levels(fed)
        self.session.cache.pending = [sum(len(level.tokens[0]) for level in self.fed)] * self.batch
        return Growth(tokens, parents, scores, valid, settled.kind, (), ordered)

    def _grown_below(self, policy: Policy, source: Source, width: int, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return what a policy grows below roots whose pass gave these values, and the levels that were fed.

        With a width, trees are in order, with depths and what nodes see.
        """
        self.given, self.level, self.fed = given, None, []
        growth = policy.grow(source)
        tensors = growth.in_order(width, policy.max_depth) if width else growth[:4]
        return *tensors, *(column.long() for level in self.fed for column in level[:3])  # numbers need no launch later

    @property
    def batch(self) -> int:
        """Rows still active, or those of a graph."""
        return len(self.given["logits"]) if self.given else super().batch

    def beside_root(self, levels: int) -> dict[str, Tensor]:
        """Return what levels below the root need beside the root's logits, by name."""
        return {"noise": self.noise_below(range(levels), self.vocab_size, self.device)} if self.couplings else {}

    def noise_below(self, depths: Sequence[int], size: int, device: torch.device) -> Tensor:
        """Return the target's noise below nodes of depths: see `DraftRows`."""
        if "noise" in self.given:
            return self.given["noise"][:, depths[0] : depths[-1] + 1]
        return super().noise_below(depths, size, device)

    def grown(self, growth: Growth, *beside: Tensor) -> tuple[Growth, list[Tensor]]:
        """Bring a tree and the levels that were fed for it to the host, and other tensors, which waits once."""
        growth, found = growth.to_host(*beside, *(column for level in self.fed for column in level[:3]))
        self.fed = _levels(found[len(beside) :])
        return growth, found[: len(beside)]

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Keep what was fed of each committed path; the rest is uncached, the new root last."""
        paths = fed_paths(self.fed, tokens)
        self.session.commit(paths)
        for uncached, new, path in zip(self.uncached, tokens, paths, strict=True):
            uncached += (new or ())[len(path or ()) :]
        self.advance(tokens)
        self.fed = []

    def advance(self, tokens: Committed) -> None:
        """Remember what each row committed."""
        self.recent = [[*row, *(new or ())][-RECENT:] for row, new in zip(self.recent, tokens, strict=True)]
        super().advance(tokens)

    def draw(self, frontier: Frontier, k: int, replacement: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Draw k children per node from q: see `LevelRows`."""
        self.words = self.vocab_size
        return super().draw(frontier, k, replacement)

    def levels_left(self) -> list[int]:
        """Return, per row, how many levels fit into the model's context below its last token."""
        if self.limit is None:
            return [sys.maxsize] * self.batch
        spare = 0 if self.session.model.takes_positions else CATCH_UP  # without positions, a model also counts padding
        return [self.limit - spare - length for length in self._draft_lengths()]

    def _draft_lengths(self) -> list[int]:
        """Return the number of this model's tokens in each row."""
        return self.lengths

    def logits_after(self, frontier: Frontier) -> Tensor:
        """Return logits (B, W, V) after each frontier node, feeding them to the model."""
        if frontier.depth == 0:
            return self._root_logits()
        tokens = frontier.tokens.clamp(max=self.last_id)
        self.level = lay_out_level(frontier._replace(tokens=tokens), self.level, self.device)
        self.fed.append(frontier)
        return self.session.append(self.level, words=self.words).padded()[..., : self.words]

    def _root_logits(self) -> Tensor:
        """Return the logits (B, 1, V') after the roots: feed them, unless a graph already has them as input."""
        return self.given["logits"] if self.given else self._feed_uncached()[..., : self.words]

    def _words(self) -> int:
        """Return how many ids, from 0 on, the next tokens probably come from: a power of two, or all."""
        if self.token_ids is not None or self.device.type != "cpu":  # ids of its own; graphs, which hold a number
            return self.vocab_size
        return min(max(FEWEST, *map(_bound, self.recent)), self.vocab_size)

    def _feed_uncached(self) -> Tensor:
        """Feed and commit each row's uncached tokens, the root last; return the logits after the root, (B, 1, V)."""
        self.catch_up()
        chains = self._chains()
        wanted = [range(len(chain) - 1, len(chain)) for chain in chains]
        beside = {name: torch.cat(rows) for name, rows in self._uncached_inputs().items()}
        logits = self.session.append(self.session.chains(chains), wanted, self.words, **beside)
        self.draft_states = self.session.commit([range(len(chain)) for chain in chains])
        self.note_cached(0)
        return logits.padded()

    def read_ahead(self) -> None:
        """Feed and commit each row's uncached tokens except the root."""
        early = {name: [row[:-1] for row in rows] for name, rows in self._uncached_inputs().items()}
        self.session.prefill([chain[:-1] for chain in self._chains()], **early)
        self.note_cached(1)

    def note_cached(self, left: int) -> None:
        """Take note that each row's uncached tokens were committed, but for the last `left`."""
        self.uncached = [tokens[len(tokens) - left :] for tokens in self.uncached]

    def _chains(self) -> list[list[int]]:
        """Return each row's uncached tokens as the model takes them."""
        return [[min(token, self.last_id) for token in tokens] for tokens in self.uncached]

    def _uncached_inputs(self) -> dict[str, list[Tensor]]:
        """Return what else the model is fed with each row's uncached tokens, by name: one entry per token."""
        return {}


class HeadDraftSession(ModelDraftSession):
    """An EAGLE-style head at work.

    Every committed token is fed once, with the target's state that chose it.  Nodes of a tree are fed with the head's
    own states and always forgotten.
    """

    per_row = (*ModelDraftSession.per_row, "states")
    draft_layers = (0,)

    def __init__(
        self, model: TreeModel, aux_layers: Sequence[int], context: DraftContext, inverse_temperature: float = 1.0
    ) -> None:
        # without anything but a first token, there is only that to draft from
        texts = [prompt[1:] or prompt if model.model.skips_first else prompt for prompt in context.prompts]
        super().__init__(model, context, texts)
        self.inverse_temperature = inverse_temperature
        self.token_ids = model.model.token_ids
        if self.token_ids is not None:
            self.vocab_size = self.words = len(self.token_ids)
        self.columns = state_columns(aux_layers, context, self.device)
        shape = 1, *model.model.pass_inputs[0]["target_states"]
        nothing = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.states: list[Tensor] = []  # per row, the target's states that chose its uncached tokens
        for uncached, states in zip(self.uncached, context.states, strict=True):
            given = nothing[:0] if states is None else states[-len(uncached) :, self.columns]
            self.states.append(torch.cat((nothing[: len(uncached) - len(given)], given)))  # none chose a first token

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Forget the tree; the committed tokens are uncached, with the target's states that chose them."""
        self.session.commit([None if new is None else () for new in tokens])
        for i, (new, chose) in enumerate(zip(tokens, states, strict=True)):
            if new is not None and chose is not None:
                self.uncached[i] += new
                self.states[i] = torch.cat((self.states[i], chose[:, self.columns]))
        self.advance(tokens)

    def read(self, row: int, ids: Sequence[int]) -> Cached | None:
        """Return what the cache holds of a row; nothing if its first token was read only for lack of others."""
        skipped = self.lengths[row] - len(self.uncached[row]) - self.session.cache.lengths[row]
        return super().read(row, ids[skipped:]) if skipped == self.session.model.model.skips_first else None

    def logits_after(self, frontier: Frontier) -> Tensor:
        """Return logits (B, W, V') after each frontier node, feeding them to the head."""
        if frontier.depth == 0:
            return self._root_logits()
        self.level = lay_out_level(frontier, self.level, self.device)
        fed = torch.cat([self._root_states(), *(states.padded()[:, :, 0] for states in self.session.aux_states)], 1)
        parents = frontier.parents[:, :, None].expand(-1, -1, fed.shape[2])
        states = fed.gather(1, parents).flatten(0, 1)
        return self.session.append(self.level, words=self.words, draft_states=states).padded()[..., : self.words]

    def beside_root(self, levels: int) -> dict[str, Tensor]:
        """Return the root's states, and the noise."""
        return {"states": self._root_states(), **super().beside_root(levels)}

    def _root_states(self) -> Tensor:
        """Return the head's states at the roots, (B, 1, H)."""
        if self.given:
            return self.given["states"]
        return torch.stack([states[-1:, 0] for states in self.draft_states if states is not None])

    def _uncached_inputs(self) -> dict[str, list[Tensor]]:
        """Return the target's states that chose each row's uncached tokens."""
        return {"target_states": self.states}

    def note_cached(self, left: int) -> None:
        """Take note of what was committed, and forget the states that chose it."""
        super().note_cached(left)
        self.states = [states[len(states) - left :] for states in self.states]


def _bound(tokens: Sequence[int]) -> int:
    """Return a power of two above nearly all of these ids."""
    ids = sorted({*tokens})
    return 1 << ids[-1 - min(OUTLIERS + len(ids) // RARE, len(ids) - 1)].bit_length()


def _levels(columns: Sequence[Tensor]) -> list[Frontier]:
    """Return the levels below the root that have these columns: tokens, parents and valid of one after the other."""
    levels = zip(columns[::3], columns[1::3], columns[2::3], strict=True)
    return [Frontier(*level, depth) for depth, level in enumerate(levels, start=1)]


def fed_paths(fed: Sequence[Frontier], tokens: Committed) -> list[list[int] | None]:
    """Find, in every row, the pending columns along the committed tokens; the last token is always fed again.

    Args:
        fed: levels below the root, on the host: pending columns are nodes 1, 2, ...
        tokens: that each row committed; None retires it.
    """
    columns = [torch.cat(column, 1).tolist() for column in zip(*(level[:3] for level in fed), strict=True)]
    paths: list[list[int] | None] = []
    for new, *row in zip(tokens, *columns, strict=True):
        nodes = reversed([*enumerate(zip(*row, strict=True), 1)])  # of equal children the first one counts
        children = {(parent, token): node for node, (token, parent, real) in nodes if real}
        node, path = 0, []
        for wanted in (new or ())[:-1]:
            if (child := children.get((node, wanted))) is None:
                break
            path.append((node := child) - 1)
        paths.append(None if new is None else path)
    return paths
