"""Drafts with smaller contexts than their target: rows beyond are decoded plainly, others drafted for as alone."""

from typing import ClassVar

import pytest
import test_mtp
import test_published_dflash as dflash
import test_published_eagle as eagle
from conftest import byte_tokenizer, like, tiny_llama
from test_heads import draft_for
from test_store import assert_read_as_alone, drained, reading
from test_two_tokenizers import merged

from specinfer import BestFirst, Chain, ModelDraft, Sampled, SpeculativeDecoder
from specinfer.drafts.published.formats import load_published
from specinfer.drafts.published.mtp import MtpDraft
from specinfer.engine.store import PrefixStore

released = pytest.fixture(test_mtp.small_models_have_such_layers.__wrapped__)
exact = pytest.fixture(scope="module")(test_mtp.folder.__wrapped__)
LIMIT, NEW = 40, 16
LONG = [3 + i % 90 for i in range(60)]  # beyond the context from the beginning
ENDING = LONG[:32]  # comes to its end there
SHORT = [[5, 9, 17, 5, 9], [7, 7], LONG[:14]]
PROMPTS = [SHORT[0], LONG, SHORT[1], ENDING, SHORT[2]]


def made(target, draft, tree=None, tokenizer=None):
    """A decoder whose draft has the small context."""
    tree = BestFirst(6, 3) if tree is None else tree
    decoder = SpeculativeDecoder(target, tokenizer, draft, tree, compile=False)
    decoder.drafts[0].model.max_positions = LIMIT
    return decoder


def of_kind(kind, tmp_path, exact):
    """A decoder with a draft of this kind."""
    if kind == "model":
        target = tiny_llama(0)
        return made(target, like(target))
    if kind == "head":
        target = tiny_llama(0)
        return made(target, draft_for(target))
    if kind == "text":
        draft = ModelDraft(tiny_llama(6, 264), byte_tokenizer(), "other")
        return made(tiny_llama(4, len(merged())), draft, tokenizer=merged())
    if kind == "mtp":
        return made(test_mtp.read(exact), MtpDraft(test_mtp.NORMED))
    if kind in eagle.FORMATS:
        target = tiny_llama(num_hidden_layers=eagle.LAYERS)
        path = eagle.write(tmp_path / "head", *eagle.random_head(kind, 3))
        rule = load_published(path).network.conventions(eagle.LAYERS)[0]
        return made(target, load_published(path, rule))
    return made(dflash.target.__wrapped__(), dflash.load(dflash.random_head(tmp_path / "head", kind, 0)[0]))


class Made:
    """A decoder with a draft of a kind, and the text of each prompt alone."""

    options: ClassVar = {"max_new_tokens": NEW, "temperature": 0}

    def __init__(self, kind, folder, exact):
        self.kind, self.decoder = kind, of_kind(kind, folder, exact)
        self.texts = {}

    def alone(self, prompt):
        """Return the result of a prompt alone."""
        key = tuple(prompt)
        if key not in self.texts:
            self.texts[key] = self.decoder.generate(prompt, **self.options)
        return self.texts[key]


BLOCKS = ["z-lab", "dflash2", "dspark rnn", "domino"]  # block heads of each way to score a path
KINDS = ["model", "head", "text", "mtp", *eagle.FORMATS, *BLOCKS]


@pytest.fixture(scope="module", params=KINDS)
def of(request, tmp_path_factory, exact):
    """A decoder of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        test_mtp.small_models_have_such_layers.__wrapped__(patch)
        return Made(request.param, tmp_path_factory.mktemp("head"), exact)


def drafted(result):
    return [step.tree.tokens.tolist() for step in result.steps]


def note_of(result):
    return [note for note in result.stats.notes if f"its context of {LIMIT} tokens has ended" in note]


def test_short_rows_are_drafted_for_as_without_the_long_one(of):
    """Their trees are those they grow alone; the long row has bare roots, and its result alone says why."""
    kind, decoder = of.kind, of.decoder
    plain = SpeculativeDecoder(decoder.target.model, decoder.tokenizer, tree=None, compile=False)
    results = decoder.generate(PROMPTS, **of.options)
    wanted = plain.generate(PROMPTS, **of.options)
    assert [result.token_ids for result in results] == [result.token_ids for result in wanted]
    grown = 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        if prompt in SHORT:
            alone = of.alone(prompt)
            left = NEW
            for step, wanted in zip(result.steps, alone.steps, strict=True):
                if left > 4:  # the end of a text makes its last trees lower
                    assert step.tree.tokens.tolist() == wanted.tree.tokens.tolist()
                    grown += len(step.tree) - 1
                left -= len(step.tokens)
    assert grown > 10
    long, ending = results[1], results[3]
    assert {len(tree) for tree in drafted(long)} == {1}
    assert len(drafted(ending)[-1]) == 1
    if kind != "text":  # whose own tokens count
        depths = [len(result.prompt_ids) for result in (long, ending)]
        assert depths[0] > LIMIT > depths[1]
        assert any(len(tree) > 1 for tree in drafted(ending)) or kind in dflash.KINDS
        written = len(ENDING)
        for step in ending.steps:
            assert written + step.tree.depth <= LIMIT or len(step.tree) == 1
            written += len(step.tokens)
    assert [len(note_of(result)) for result in results] == [0, 1, 0, 1, 0]


def test_rows_that_join_leave_in_their_turn(of):
    """Any order of long and short rows, two at a time, also where a draft has no row left for a while."""
    prompts = [LONG, LONG, SHORT[0], ENDING, LONG, SHORT[1], SHORT[2], LONG]
    found = sorted(of.decoder.generate_many(prompts, max_rows=2, **of.options))
    for prompt, (_, result, error) in zip(prompts, found, strict=True):
        assert error is None
        alone = of.alone(prompt)
        assert result.token_ids == alone.token_ids
        assert bool(note_of(result)) == bool(note_of(alone)) == (prompt not in SHORT)
    assert any(len(tree) > 1 for _, result, _ in found for tree in drafted(result))


def test_turns_begin_with_what_the_draft_has_read(of, monkeypatch):
    """Its caches are those of a session that reads the whole text, and texts and trees are those of fresh calls."""
    decoder, store, history = of.decoder, PrefixStore(), LONG[:20]
    monkeypatch.setattr(decoder.drafts[0].model, "max_positions", 200)
    for more in ([7, 8], [5], [3, 3]):
        options = {"max_new_tokens": 5, "temperature": 0}
        scheduler, network = decoder.scheduler(store=store), decoder.drafts[0].model.model
        with reading(decoder, network) as known:
            request = scheduler.add(decoder.prepare(history, **options))
            drained(scheduler)
        with reading(decoder, network) as alone:
            wanted = decoder.generate(history, **options)
        assert request.result.token_ids == wanted.token_ids
        assert drafted(request.result) == drafted(wanted)
        assert (known.tokens < alone.tokens - 10) == (history != LONG[:20])
        for prefix in store.prefixes:
            assert len(prefix.caches) == 2
            assert_read_as_alone(decoder, prefix)
        history = [*history, *wanted.token_ids, *more]


@pytest.mark.parametrize("kind", ["model", "head"])
def test_turns_beyond_the_draft_s_context(kind, tmp_path, exact, released):
    """The target reads what is new, also where the draft has left; what it has not read is not needed there."""
    decoder, store, history = of_kind(kind, tmp_path, exact), PrefixStore(), LONG[:25]
    cached = []
    for more in ([7, 8], [5], [3, 3]):
        scheduler = decoder.scheduler(store=store)
        request = scheduler.add(decoder.prepare(history, max_new_tokens=NEW, temperature=0))
        drained(scheduler)
        cached.append(request.result.stats.cached_tokens)
        wanted = decoder.generate(history, max_new_tokens=NEW, temperature=0)
        assert request.result.token_ids == wanted.token_ids
        history = [*history, *wanted.token_ids, *more]
    assert len(history) - len(more) - NEW > LIMIT
    assert cached[1] > 20
    assert cached[2] > LIMIT


@pytest.mark.parametrize("tree", [Chain(4), Sampled((2, 1)), "auto"], ids=str)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_any_tree_and_temperature(tree, temperature):
    """Text is each row's own; with the exact draft a row takes as many passes as alone."""
    target = tiny_llama(0)
    decoder = made(target, target if tree != "auto" else like(target), tree)
    assert decoder.drafts[0].model is not decoder.target
    options = {"max_new_tokens": NEW, "temperature": temperature, "seed": 5}
    for prompt, result in zip(PROMPTS, decoder.generate(PROMPTS, **options), strict=True):
        alone = decoder.generate(prompt, **options)
        assert result.token_ids == alone.token_ids
        if tree == Chain(4):
            assert result.stats.target_passes == alone.stats.target_passes


def test_other_drafts_go_on_where_one_has_ended():
    """Of two, the look-up still proposes for the long row."""
    target = tiny_llama(0)
    decoder = made(target, [like(target), "ngram"])
    (long,) = decoder.generate([LONG], max_new_tokens=NEW, temperature=0)
    assert long.stats.draft_passes == 0
    assert any(len(tree) > 1 for tree in drafted(long))
    assert note_of(long)
