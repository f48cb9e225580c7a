"""Conversations: a turn reads what is new, and its text is the one that a fresh call on the whole history gives."""

import pytest
import torch
from conftest import like, tiny_llama
from test_heads import draft_for
from test_stateful import build
from test_store import reading, windowed

from specinfer import BestFirst, SpeculativeDecoder
from specinfer.attention import TreeSession
from specinfer.calls.run import Run
from specinfer.engine.prefixes import LEAST
from specinfer.engine.store import PrefixStore

FIRST, MORE = [*range(60, 90)], [[7, 8, 9], [5], [200, 201]]
NEW = 12


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


def drafts_for(target):
    return {"head": [draft_for(target)], "model": [like(target)], "both": ["ngram", draft_for(target)], "none": []}


def begun(decoder, store, prompt, **options):
    return Run([decoder.prepare(prompt, **options)], store=store)


def kept(store):
    """The only prefix there is: every turn takes the place of the one before."""
    (prefix,) = store.prefixes
    return prefix


def turn(decoder, store, prompt, **options):
    run = begun(decoder, store, prompt, **options)
    run.finish()
    return run.results()[0]


@pytest.mark.parametrize(("make", "drafts", "temperature"), [
    *((tiny_llama, drafts, temperature) for drafts in ("head", "model", "both", "none") for temperature in (0, 1)),
    (windowed, "head", 1), (windowed, "model", 0), (windowed, "both", 0), (windowed, "none", 1),
])  # fmt: skip
def test_every_turn_is_what_a_fresh_call_gives(make, drafts, temperature):
    model = make()
    decoder = SpeculativeDecoder(model, None, drafts_for(model)[drafts], BestFirst(7, 4), compile=False)
    store, history = PrefixStore(), FIRST
    for number, more in enumerate(MORE):
        options = {"max_new_tokens": NEW, "temperature": temperature, "seed": number}
        found = turn(decoder, store, history, **options)
        wanted = decoder.generate(history, **options)
        assert (found.token_ids, found.accept_lengths) == (wanted.token_ids, wanted.accept_lengths)
        for cached in kept(store).caches:
            cached.cache.check_integrity()
        history = [*history, *found.token_ids, *more]


def test_a_turn_reads_what_is_new(target):
    """The last step of the answer, from its root on, and what comes after the answer."""
    decoder = SpeculativeDecoder(target, None, [draft_for(target)], BestFirst(7, 4), compile=False)
    store, options = PrefixStore(), {"max_new_tokens": NEW, "temperature": 0}
    first = turn(decoder, store, FIRST, **options)
    second = [*FIRST, *first.token_ids, *MORE[0]]
    run = begun(decoder, store, second, **options)
    with reading(decoder) as read:
        next(iter(run))
    run.close()
    new, scored = 1 + len(first.steps[-1].tokens) + len(MORE[0]) - 1, 1 + 7  # without the new root; it and its tree
    assert read.tokens <= new + scored < len(second)
    with reading(decoder) as read:
        next(iter(decoder.open(second, **options)))
    assert read.tokens >= len(second)  # a fresh call


def test_a_history_that_was_rewritten_shares_what_is_left(target):
    decoder = SpeculativeDecoder(target, None, [], None, compile=False)
    store, options = PrefixStore(), {"max_new_tokens": 1, "temperature": 0}
    for shared in (20, 9, 0):
        turn(decoder, store, FIRST, **options)
        rewritten = [*FIRST[:shared], *range(100, 120)]
        with reading(decoder) as read:
            found = turn(decoder, store, rewritten, **options)
        assert read.tokens == len(rewritten) - (shared if shared >= LEAST else 0)
        assert found.token_ids == decoder.generate(rewritten, **options).token_ids


def test_a_turn_that_was_cut_short_is_kept_as_far_as_it_was_read(target):
    """Closed between steps, or left in the middle of a pass."""
    decoder = SpeculativeDecoder(target, None, [draft_for(target)], BestFirst(7, 4), compile=False)
    options = {"max_new_tokens": NEW, "temperature": 0}
    for fails in (False, True):
        store = PrefixStore()
        run = begun(decoder, store, FIRST, **options)
        steps = iter(run)
        next(steps)
        next(steps)
        if fails:
            handle = target.register_forward_hook(lambda *_, **__: pytest.fail("interrupted"))
            with pytest.raises(pytest.fail.Exception):
                next(steps)
            handle.remove()
        run.close()
        history = [*FIRST, *run.results()[0].token_ids, *MORE[0]]
        with reading(decoder) as read:
            found = turn(decoder, store, history, **options)
        assert found.token_ids == decoder.generate(history, **options).token_ids
        assert read.tokens < len(history) + len(found.steps) * 8 - len(FIRST)


def test_a_turn_that_was_never_read_leaves_what_the_last_one_read(target):
    """An error while its prompt is read, which differs from the last turn's."""
    decoder = SpeculativeDecoder(target, None, [draft_for(target)], BestFirst(7, 4), compile=False)
    store, options = PrefixStore(), {"max_new_tokens": NEW, "temperature": 0}
    turn(decoder, store, FIRST, **options)
    rewritten = [*FIRST[:20], *range(100, 140)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeSession, "prefill", lambda *_, **__: pytest.fail("interrupted"))
        run = begun(decoder, store, rewritten, **options)
        with pytest.raises(pytest.fail.Exception):
            run.finish()
    found = turn(decoder, store, rewritten, **options)
    assert found.stats.cached_tokens == 19  # of 20, for the head needs the states of the last one
    assert found.token_ids == decoder.generate(rewritten, **options).token_ids


def test_a_target_that_keeps_states_reads_every_turn_whole():
    """Its states cannot be taken back to where two texts part."""
    decoder = SpeculativeDecoder(build("lfm2"), None, ["suffix"], compile=False)
    store, history = PrefixStore(), [*range(5, 25)]
    for more in ([7, 8, 9], [5], [30]):
        found = turn(decoder, store, history, max_new_tokens=NEW, temperature=0)
        assert found.token_ids == decoder.generate(history, max_new_tokens=NEW, temperature=0).token_ids
        assert found.stats.cached_tokens == 0
        history = [*history, *found.token_ids, *more]


def test_conversations_share_nothing(target):
    decoder = SpeculativeDecoder(target, None, [], None, compile=False)
    turn(decoder, PrefixStore(), FIRST, max_new_tokens=1)
    with reading(decoder) as read:
        turn(decoder, PrefixStore(), FIRST, max_new_tokens=1)
        decoder.generate(FIRST, max_new_tokens=1)
    assert read.tokens == 2 * len(FIRST)


def test_states_that_the_head_has_not_read_are_kept(target):
    """They are those that one pass over everything gives."""
    decoder = SpeculativeDecoder(target, None, [draft_for(target)], BestFirst(7, 4), compile=False)
    store = PrefixStore()
    first = turn(decoder, store, FIRST, max_new_tokens=NEW, temperature=0)
    turn(decoder, store, [*FIRST, *first.token_ids, *MORE[0]], max_new_tokens=NEW, temperature=0)
    plain = decoder.target.session(1, 200, 200, decoder.aux_layers)
    with torch.inference_mode():
        (wanted,) = plain.prefill([kept(store).ids.tolist()])
    prefix = kept(store)
    assert [len(cached.ids) for cached in prefix.caches] == [len(wanted), prefix.first + 1]
    assert prefix.first >= len(FIRST) + len(first.token_ids)
    torch.testing.assert_close(torch.cat([*prefix.states]), wanted[prefix.first :], rtol=1e-9, atol=1e-9)
