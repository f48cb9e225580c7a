"""The engine: speculative decoding with token trees, for one prompt or a ragged batch.

`decode` is the whole algorithm: draft, score, verify, commit.  `SpeculativeDecoder` is what a user holds: it checks
everything that can be checked before a model runs, opens sessions, and turns steps into text.
Knows: the order of things.  Does not know: how trees grow, how attention works, which rule is exact.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from operator import index
from time import perf_counter
from typing import Any, SupportsIndex

import torch

from specinfer.attention import Support, TreeModel, TreeSession, check_model, evaluating
from specinfer.draft import Draft, DraftSession, ModelDraft, Opening
from specinfer.errors import InputError, SpecinferError, UnsupportedModel
from specinfer.ngram import NGramDraft
from specinfer.prompts import Prompt, check_context, check_ids, encode
from specinfer.results import Result, Seconds, Stats, Step, acceptance_by_depth
from specinfer.row import Row
from specinfer.sampling import Law, Stopping, resolve
from specinfer.tree import BestFirst, Chain, Kind, Policy, TokenTree, merge
from specinfer.verify import MultiStep, Verifier, Walk

FIRST_TOKENS = 2048  # new tokens that caches have room for at first; beyond it they double
DEFAULT_TREE = BestFirst(max_nodes=16, max_depth=8, min_probability=0.05)


def decode(
    target: TreeSession,
    drafts: Sequence[DraftSession],
    policy: Policy,
    verifier: Verifier,
    rows: Sequence[Row],
) -> Iterator[list[tuple[Row, Step]]]:
    """Decode rows to their ends, one target pass a step; yield what each active row emitted.

    Args:
        target: the target's session, holding every row's tokens but the last (its root).
        drafts: one session per draft, in the order of their ids.
        policy: how trees grow.
        verifier: the rule that is exact for the policy's trees.
        rows: the sequences, in the order of the sessions' rows.

    Raises:
        NumericalError: the target's logits are not numbers.
    """
    while rows:
        trees = propose(drafts, policy, rows)
        logits = target.score(trees)
        views = [row.view(tree, scores) for row, tree, scores in zip(rows, trees, logits, strict=True)]
        verdicts = [verifier.verify(tree, view) for tree, view in zip(trees, views, strict=True)]
        # each row is cut at end of sequence, stop strings and max_new_tokens, before anything is committed
        steps = [row.advance(tree, verdict) for row, tree, verdict in zip(rows, trees, verdicts, strict=True)]
        target.commit([None if row.finished else (0, *s.path) for row, s in zip(rows, steps, strict=True)])
        for draft in drafts:
            draft.commit([None if row.finished else s.tokens for row, s in zip(rows, steps, strict=True)])
        yield list(zip(rows, steps, strict=True))
        rows = [row for row in rows if not row.finished]


def propose(drafts: Sequence[DraftSession], policy: Policy, rows: Sequence[Row]) -> list[TokenTree]:
    """Return one tree per row: the drafts' trees, merged, no deeper than what the row may still emit."""
    deepest = max(row.remaining for row in rows) - 1
    if not drafts or policy.max_nodes == 0 or deepest == 0:
        return [TokenTree.root_only(row.ids[-1], policy.kind) for row in rows]
    proposals = zip(*(draft.propose(policy, deepest) for draft in drafts), strict=True)
    trees = (merge(own) if len(own) > 1 else own[0] for own in proposals)
    return [
        tree if tree.depth < row.remaining else tree.pruned(row.remaining - 1)
        for row, tree in zip(rows, trees, strict=True)
    ]


class SpeculativeDecoder:
    """Generates text with a target model, token trees and any number of drafts; the output law is the target's.

    Args:
        model: the target, a ``transformers`` causal LM.
        tokenizer: the target's; needed for text in and out.
        drafts: ``"ngram"``, `Draft` objects, or bare draft models; all propose, and their trees are merged.
        tree: the growth policy; None decodes without speculation.
        verifier: by default `Walk` for ranked trees (greedy, or sampling coupled to the seed) and `MultiStep` for
            sampled ones.

    Raises:
        UnsupportedModel: a model cannot score trees, by name and with the reason.
        TokenizerMismatch: a draft has other tokens than the target.
        PairingError: the verifier would be biased on this policy's trees.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        drafts: Sequence[Any] = ("ngram",),
        tree: Policy | None = DEFAULT_TREE,
        verifier: Verifier | None = None,
    ) -> None:
        self.notes: list[str] = []
        self.target = TreeModel(model)
        self.tokenizer = tokenizer
        policy = tree or Chain(0)
        if not hasattr(policy, "grow"):
            raise InputError(f"tree={tree!r} is no growth policy: use BestFirst, Widths, Chain, Sampled, or None")
        self.drafts = [_as_draft(draft) for draft in _as_list(drafts)] if tree else []
        self.verifier = verifier or (Walk() if policy.kind is Kind.RANKED else MultiStep(policy.kind is Kind.IID))
        self.verifier.check(policy.kind)
        self._check_tokenizers()
        self.policy = self._supported_policy(policy)
        self.verifier.check(self.policy.kind)

    @classmethod
    def from_pretrained(
        cls,
        target: str | None = None,
        drafts: Sequence[Any] = ("ngram",),
        tree: Policy | None = DEFAULT_TREE,
        verifier: Verifier | None = None,
        dtype: str = "auto",
        device: str = "auto",
    ) -> "SpeculativeDecoder":
        """Load target and drafts by name or path; None is the default target (SmolLM2-135M-Instruct).

        Raises:
            ModelError: a model cannot be found or loaded; and what the constructor raises.
        """
        from specinfer.models import load

        loaded = load(target, dtype, device)
        ready = [
            draft if draft == "ngram" or not isinstance(draft, str) else _load_draft(draft, dtype, device)
            for draft in _as_list(drafts)
        ]
        return cls(loaded.model, loaded.tokenizer, ready, tree, verifier)

    def generate(self, prompt: Prompt, *, streamer: Any = None, **options: Any) -> Any:
        """Generate to the end.

        Args:
            prompt: a string, chat messages or token ids, or a list of those for a ragged batch.
            streamer: a ``transformers`` streamer (one prompt only).
            **options: see `open`.

        Returns:
            Result for one prompt, list[Result] for a batch.

        Raises:
            SpecinferError: what `open` raises; or NumericalError under way, whose ``partial`` holds the results so far.
        """
        run = self.open(prompt, **options)
        run.finish(streamer)
        return run.results()[0] if run.single else run.results()

    def stream(self, prompt: Prompt, **options: Any) -> "TextStream":
        """Generate one prompt piece by piece: iterate over the text; `TextStream.result` has the rest.

        Raises:
            InputError: a batch, or no tokenizer.
        """
        return TextStream(self.open(prompt, **options))

    def open(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        seed: int | Sequence[int] | None = None,
        generation_config: Any = None,
        logits_processor: Sequence[Callable[..., Any]] | None = None,
        stopping_criteria: Sequence[Callable[..., Any]] | None = None,
        **options: Any,
    ) -> "Run":
        """Check everything and prepare a run; no model runs before it is iterated.

        Args:
            prompt: as `generate`.
            raw: feed strings without the chat template.
            seed: of all rows, or one per row; a row's text depends on its own seed only.  None draws one per row
                from torch's global generator.
            generation_config: a ``transformers.GenerationConfig``, over the model's own.
            logits_processor: custom processors; each sees a node's own path.
            stopping_criteria: custom criteria, asked after every single token.
            **options: any ``GenerationConfig`` field: max_new_tokens, temperature (0 = greedy), top_p, ...

        Raises:
            InputError, SamplingError: what is wrong, why, and what to do.
        """
        model_config = self.target.model.generation_config
        settings = resolve(model_config, generation_config, logits_processor, stopping_criteria, **options)
        prompts = encode(prompt, self.tokenizer, raw)
        check_ids(prompts.rows, self.target.vocab_size)
        budgets = [settings.budget(len(row)) for row in prompts.rows]
        limit = self.target.position_limit()
        if limit is not None and not self.target.takes_positions:
            limit -= self.policy.max_nodes  # it counts positions by cache columns, padding included
        check_context(prompts.rows, budgets, limit)
        seeds = row_seeds(seed, len(prompts.rows))
        device, names = self.target.device, [draft.name for draft in self.drafts]
        rows = [
            Row(
                index=place,
                prompt=row,
                law=Law.of(settings, len(row), device),
                stopping=Stopping(settings, budget, device, self.tokenizer),
                seed=own_seed,
                sampling=settings.do_sample,
                draft_names=names,
            )
            for place, (row, budget, own_seed) in enumerate(zip(prompts.rows, budgets, seeds, strict=True))
        ]
        return Run(self, rows, prompts.single)

    def _supported_policy(self, policy: Policy) -> Policy:
        """Check all models; fall back to a chain where one cannot branch."""
        for model in self.models():
            check = check_model(model.model)
            if check.support is Support.UNSUPPORTED:
                raise UnsupportedModel(f"{check.model} cannot score token trees: {check.reason}")
            if check.support is not Support.CHAIN_ONLY:
                continue
            is_chain = set(getattr(policy, "widths", (0,))) <= {1}
            if len(self.drafts) > 1 or not (is_chain or policy.kind is Kind.RANKED):
                raise UnsupportedModel(
                    f"{check.model} can score chains only ({check.reason}): use one draft and tree=Chain(k)"
                )
            if not is_chain:
                policy = Chain(policy.max_depth)
                self.notes.append(f"tree={policy}: {check.model} can score chains only ({check.reason})")
        return policy

    def models(self) -> list[TreeModel]:
        """Return the target and every draft that is a model."""
        return [self.target, *(draft.model for draft in self.drafts if isinstance(draft, ModelDraft))]

    def _check_tokenizers(self) -> None:
        from specinfer.models import same_tokens

        for draft in self.drafts:
            if not isinstance(draft, ModelDraft):
                continue
            if draft.tokenizer is not None and self.tokenizer is not None:
                same_tokens(self.tokenizer, draft.tokenizer)
            else:
                self.notes.append(f"draft {draft.name}: its tokenizer was not compared with the target's; give both")


class Run:
    """One call of the decoder under way: iterate for steps, then read `results`.

    Sessions are opened by the first step and dropped when iteration ends, fails or is closed; models are then as
    they were before.
    """

    def __init__(self, decoder: SpeculativeDecoder, rows: Sequence[Row], single: bool) -> None:
        self.decoder, self.rows, self.single = decoder, list(rows), single
        self.seconds = Seconds()
        self.draft_passes = 0
        self.steps: dict[int, list[Step]] = {row.index: [] for row in self.rows}
        self._iterator = self._run()

    def __iter__(self) -> Iterator[list[tuple[Row, Step]]]:
        return self._iterator

    def close(self) -> None:
        """Stop decoding and release the caches."""
        self._iterator.close()

    def finish(self, streamer: Any = None) -> None:
        """Decode to the end, feeding a ``transformers`` streamer if given: the prompt, then tokens, then the end.

        Raises:
            InputError: a streamer with more than one prompt.
        """
        if streamer is not None and len(self.rows) > 1:
            raise InputError("a streamer takes one prompt: pass the prompts one by one, or drop the streamer")
        if streamer is not None:
            streamer.put(torch.tensor([self.rows[0].ids]))
        try:
            for emitted in self:
                if streamer is not None:
                    streamer.put(torch.tensor(emitted[0][1].tokens))
        except SpecinferError as error:
            error.partial = self.results()  # type: ignore[attr-defined]  # nothing already computed is lost
            raise
        finally:
            if streamer is not None:
                streamer.end()

    def results(self) -> list[Result]:
        """Return one result per row, of what was decoded so far."""
        return [self._result(row) for row in self.rows]

    def _run(self) -> Generator[list[tuple[Row, Step]]]:
        started = perf_counter()
        models = [tree_model.model for tree_model in self.decoder.models()]
        with evaluating(*models):  # only while passes run: a paused run leaves the models as they were
            target, drafts = self._open_sessions()
        steps = decode(target, drafts, self.decoder.policy, self.decoder.verifier, self.rows)
        while True:
            with evaluating(*models):
                emitted = next(steps, None)
            if emitted is None:
                return
            for row, step in emitted:
                self.steps[row.index].append(step)
            self.draft_passes = sum(draft.passes for draft in drafts)
            self.seconds = Seconds(
                total=perf_counter() - started,
                prefill=target.prefill_seconds + sum(draft.prefill_seconds for draft in drafts),
                target=target.seconds,
                draft=sum(draft.seconds for draft in drafts),
            )
            paused = perf_counter()
            yield emitted
            started += perf_counter() - paused  # the caller's time is not ours

    def _open_sessions(self) -> tuple[TreeSession, list[DraftSession]]:
        decoder, rows = self.decoder, self.rows
        prompts = [list(row.ids) for row in rows]
        policy, longest = decoder.policy, max(map(len, prompts))
        most = longest + max(row.remaining for row in rows)  # tokens in a row, at its end
        first = min(most, longest + FIRST_TOKENS)  # ... that its cache holds at first
        nodes = 1 + policy.max_nodes * max(1, len(decoder.drafts))
        fed = 1 + policy.max_nodes * max(1, policy.max_depth)  # best-first feeds drafts nodes that it drops later
        target = decoder.target.session(len(rows), first + nodes, most + nodes)
        target.prefill([prompt[:-1] for prompt in prompts])
        law = rows[0].law.without_prefix_readers()
        coupled = rows[0].sampling and isinstance(decoder.verifier, Walk)
        drafts = []
        for number, draft in enumerate(decoder.drafts):
            seeds = [row.seed for row in rows]
            vocab_size = decoder.target.vocab_size
            opening = Opening(prompts, first + fed, most + fed, vocab_size, number, law, seeds, coupled)
            drafts.append(draft.open(opening))
        return target, drafts

    def _result(self, row: Row) -> Result:
        steps = list(self.steps[row.index])
        new = row.ids[row.prompt_length :]
        tokenizer = self.decoder.tokenizer
        stats = Stats(
            new_tokens=len(new),
            target_passes=len(steps),
            draft_passes=self.draft_passes,
            acceptance_by_depth=acceptance_by_depth(steps),
            seconds=self.seconds,
            notes=tuple(self.decoder.notes),
        )
        return Result(
            text=tokenizer.decode(new, skip_special_tokens=True) if tokenizer else "",
            token_ids=new,
            prompt_ids=row.ids[: row.prompt_length],
            finish_reason=row.finished or "unfinished",
            seed=row.seed if row.sampling else None,
            stats=stats,
            steps=steps,
        )


class TextStream:
    """Text as it is decided: an iterator of pieces that can be closed at any time.

    Pieces end at whole characters; joined, they are ``result.text``.
    """

    def __init__(self, run: Run) -> None:
        if not run.single:
            raise InputError("stream takes one prompt: use generate for a batch")
        if run.decoder.tokenizer is None:
            raise InputError("stream yields text and needs a tokenizer: construct the decoder with one")
        self._run = run
        self._pieces = self._decode()

    def __iter__(self) -> "TextStream":
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop decoding; what was decided so far stays in `result`."""
        self._pieces.close()
        self._run.close()

    @property
    def result(self) -> Result:
        """The result so far; complete once the stream has ended."""
        return self._run.results()[0]

    def _decode(self) -> Generator[str]:
        """Yield text that later tokens cannot change: up to the last piece that ends inside a character."""
        tokenizer, row = self._run.decoder.tokenizer, self._run.rows[0]
        done = 0  # characters yielded
        for _ in self._run:
            text = tokenizer.decode(row.ids[row.prompt_length :], skip_special_tokens=True)
            if not text.endswith("\ufffd") and len(text) > done:
                yield text[done:]
                done = len(text)
        if len(text := self.result.text) > done:
            yield text[done:]


def _as_list(drafts: Any) -> list[Any]:
    """Return drafts as a list; one may stand alone."""
    return list(drafts) if isinstance(drafts, Sequence) and not isinstance(drafts, str) else [drafts]


def _as_draft(draft: Any) -> Draft:
    if draft == "ngram":
        return NGramDraft()
    if isinstance(draft, str):
        raise InputError(f"draft {draft!r} is a name: use SpeculativeDecoder.from_pretrained, or load the model")
    return draft if hasattr(draft, "open") else ModelDraft(draft)


def _load_draft(name: str, dtype: str, device: str) -> ModelDraft:
    from specinfer.models import load

    loaded = load(name, dtype, device)
    return ModelDraft(loaded.model, loaded.tokenizer, loaded.name)


def row_seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    """Return one seed per row: the same for all, one each, or drawn from torch's global generator.

    Raises:
        InputError: not a whole number, or not one per row.
    """
    if seed is None:
        return [int(draw) for draw in torch.randint(2**62, (rows,))]
    given = list(seed) if isinstance(seed, Iterable) else [seed] * rows
    if len(given) != rows or not all(isinstance(s, SupportsIndex) and not isinstance(s, bool) for s in given):
        raise InputError(f"seed={seed!r}: give one whole number, or one per prompt ({rows})")
    return [index(s) for s in given]
