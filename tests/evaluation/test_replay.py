"""Traces: a replay takes the very steps of a real run, and expectations are those of an enumeration."""

import json
import pickle
from dataclasses import fields
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PROMPTS as ALL_PROMPTS
from conftest import byte_tokenizer, copied, like, plain, run_command, tiny_llama
from scipy.optimize import linprog
from strategies import TableSource, coarse_table
from test_heads import draft_for

import specinfer.loading
from specinfer import Auto, BestFirst, Chain, Expansion, Sampled, SpeculativeDecoder, cli
from specinfer.adaptive.experience import PRIORS, REMEMBERED
from specinfer.common.files import locked
from specinfer.common.records import RECORDS
from specinfer.drafts.lookup.memory import Memory
from specinfer.engine.verify import ExactMatch, MultiStep
from specinfer.errors import InputError, PairingError
from specinfer.evaluation.certification import EnumeratedTarget, Pair, RandomModels, _emitted, _target, _trees, outcomes
from specinfer.evaluation.compare import Comparison
from specinfer.evaluation.traces import (
    Costs,
    Trace,
    TraceText,
    calibration,
    cost_model,
    edge_calibration,
    hits,
    measured,
    oracle,
    paper_tables,
    record,
    replay,
)
from specinfer.evaluation.traces.chain_costs import expected_tokens
from specinfer.evaluation.traces.closed_forms import accepted_without_replacement, expected_tests
from specinfer.evaluation.traces.paper import RULES, WIDTHS, expansion
from specinfer.evaluation.traces.probes import Trees
from specinfer.evaluation.traces.replaying import _sampled, _tree, _visits
from specinfer.evaluation.traces.statistics import curve
from specinfer.evaluation.traces.trace import SETTINGS, Drafted, Sizes, TraceFolder
from specinfer.evaluation.traces.transport import WITHOUT, best_acceptance
from specinfer.loading import Loaded

PROMPTS = ALL_PROMPTS[:3]
NEW = 16
NODES, DEPTH, TOP, DRAWS = 16, 5, 6, 5
RANKED = (Chain(3), Expansion((1, 1, 3, 1)), BestFirst(4, 3), BestFirst(12, 5, 0.05), BestFirst(16, 5))
ANY = Chain(1)  # a recording does not use the decoder's own tree
PAIRS = ("model", "model and n-grams", "two models", "head", "ends early")


def options(temperature):
    """The generation options that `record` means."""
    distribution = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    return {"max_new_tokens": NEW, "do_sample": temperature > 0, **distribution}


@cache
def target_of(pair):
    """The target; of "ends early" one whose greedy texts reach an end of sequence before the budget."""
    target = tiny_llama(0)
    if pair == "ends early":
        target.generation_config.eos_token_id = [plain(target, prompt, NEW)[NEW // 2] for prompt in PROMPTS[:2]]
    return target


@cache
def drafts_of(pair):
    target = target_of(pair)
    kinds = {"model and n-grams": [like(target), "ngram"], "two models": [like(target), like(target, 0.2, seed=5)]}
    return kinds.get(pair) or ([draft_for(target)] if pair == "head" else [like(target)])


def decoder(pair="model", tree=ANY):
    return SpeculativeDecoder(target_of(pair), byte_tokenizer(), drafts_of(pair), tree)


@cache
def trace_of(pair="model", temperature=0.0):
    sizes = {"nodes": NODES, "depth": DEPTH, "top": TOP, "draws": DRAWS}
    return record(decoder(pair), PROMPTS, max_new_tokens=NEW, temperature=temperature, batch=2, seed=7, **sizes)


# ---- ranked trees ----


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_replay_takes_the_steps_of_a_real_run(pair, temperature):
    """Greedy and coupled, one draft and several, up to a text's end: as many steps, as often so many accepted.

    Of the trees, every other one is replayed of greedy texts, and the others of sampled ones.
    """
    trace = trace_of(pair, temperature)
    assert pair != "ends early" or temperature or min(len(text.token_ids) for text in trace.texts) < NEW
    for policy in RANKED[bool(temperature) :: 2]:
        own = decoder(pair, policy)
        real = [own.generate(p, seed=7 + i, **options(temperature)) for i, p in enumerate(PROMPTS)]
        assert [result.token_ids for result in real] == [text.token_ids for text in trace.texts]
        made = replay(trace, policy)
        assert made.how == "exact"
        assert made.steps.tolist() == [len(result.steps) for result in real]
        paths = np.array([min(len(s.path), len(s.tokens)) for result in real for s in result.steps])
        wanted = [(paths > depth).mean() for depth in range(policy.max_depth)]
        assert made.accepted == pytest.approx(wanted)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_replay_of_drafts_that_go_by_more_than_the_text_does_not_pass_for_a_run(temperature):
    """Recycling learns from the nodes that were scored, a memory from other rows: runs take other steps."""
    target, sizes = target_of("model"), {"max_new_tokens": NEW, "nodes": 8, "depth": 3, "temperature": temperature}
    kinds = {"recycling": None, "suffix": Memory()}
    for name, memory in kinds.items():
        made = SpeculativeDecoder(target, byte_tokenizer(), [name, "ngram"], ANY, memory=memory)
        trace = record(made, [PROMPTS[0]] * 2, **sizes)
        assert trace.by_run == {0}
        for policy in [Chain(3), BestFirst(8, 3), *([Sampled((2, 1))] if temperature else [])]:
            other = "teacher-forced expectation" if isinstance(policy, Sampled) else "exact"
            assert [replay(trace, policy, drafts=[draft]).how for draft in (0, 1)] == ["of this recording alone", other]
        assert oracle(trace, Chain(3)).how == "of this recording alone"
        assert oracle(trace, Chain(3), drafts=["ngram"]).how == "bound in hindsight"
        if not temperature:
            steps = replay(trace, BestFirst(8, 3), drafts=[0]).steps.tolist()
            own = SpeculativeDecoder(target, byte_tokenizer(), [name], BestFirst(8, 3), memory=memory and Memory())
            real = [own.generate(text.prompt_ids, do_sample=False, max_new_tokens=NEW) for text in trace.texts]
            assert steps != [len(result.steps) for result in real]


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_one_recorded_tree_holds_every_smaller_one(seed):
    """Any budget and any depth, ties included."""
    rows, nodes, depth = 3, 9, 4
    table = coarse_table(rows, 7, 5, seed).float()
    question = Trees(Sizes(nodes, depth, 5, 1, 9), [[0]] * rows)
    question.grow(TableSource(table), depth)
    for row in range(rows):
        names = [field.name for field in fields(Drafted)]
        drafted = Drafted(**dict.fromkeys(names, np.zeros(0)) | question.columns(row))
        text = SimpleNamespace(root=lambda place: 0, drafted=[drafted])
        for n in range(1, nodes + 1):
            for d in range(1, depth + 1):
                policy = BestFirst(n, d)
                (grown,) = policy.grow(TableSource(table[row : row + 1])).trees([0])
                assert _tree(text, 0, 0, policy, d) == grown


def test_a_pool_and_the_candidates_along_the_text_agree():
    """Where the text runs through the recorded tree, the node's children are the first of its candidates."""
    trace, seen = trace_of(), 0
    for text in trace.texts:
        drafted = text.drafted[0]
        for place in range(len(text.token_ids)):
            own = slice(*drafted.first[place : place + 2])
            tokens, parents = drafted.tree_tokens[own], drafted.tree_parents[own]
            node = 0
            for level in range(min(DEPTH, len(text.token_ids) - 1 - place)):
                children = np.flatnonzero(parents == node)
                assert tokens[children][:TOP].tolist() == drafted.tokens[place, level, : len(children)].tolist()
                below = [child + 1 for child in children if tokens[child] == text.token_ids[place + level]]
                if not below:
                    break
                node, seen = below[0], seen + 1
    assert seen > 20


def test_drafts_that_do_not_know_the_noise_are_right_less_often():
    """Uncoupled widths are replayed by rank under q, counted here by hand."""
    trace, k = trace_of(temperature=0.8), 3
    made = replay(trace, Expansion((k,)), coupled=False)
    steps = 0
    for text in trace.texts:
        place = 0
        while place < len(text.token_ids):
            tokens = text.drafted[0].distribution_tokens[place, 0, :k].tolist()
            place += 1 + (place < NEW - 1 and text.token_ids[place] in tokens)
            steps += 1
    assert made.steps.sum() == steps
    assert made.steps.sum() > replay(trace, Expansion((k,))).steps.sum()


def test_the_oracle_follows_whatever_was_a_candidate():
    """In hindsight a step ends only where the next token was no candidate, or the tree is full."""
    trace = trace_of("two models")
    steps = 0
    for text in trace.texts:
        place = 0
        while place < len(text.token_ids):
            known = [max(text.ranks(0)[place, j], text.ranks(1)[place, j]) >= 0 for j in range(3)]
            place += 1 + [*known, False].index(False)
            steps += 1
    assert oracle(trace, BestFirst(3, 5)).steps.sum() == steps
    assert oracle(trace, BestFirst(16, 5)).steps.sum() < replay(trace, BestFirst(16, 5)).steps.sum()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("pair", ["model", "two models"])
def test_the_oracle_is_a_bound_where_trees_hold_more_than_the_candidates(pair, temperature):
    sizes = {"max_new_tokens": NEW, "nodes": 16, "depth": 3, "top": 1, "temperature": temperature}
    trace = record(decoder(pair), PROMPTS, seed=7, **sizes)
    for policy in (BestFirst(16, 3), BestFirst(16, 1), BestFirst(8, 3), Chain(3)):
        least, steps = oracle(trace, policy).steps, replay(trace, policy).steps
        assert (least <= steps).all()


# ---- sampled trees ----


def enumerated(pair, models, tokens):
    """Text -> (probability, that times the expected number of steps), by the verifier itself."""
    distribution = _target(pair, models)

    @cache
    def rest(context):
        room, found = tokens - len(context), {}
        if room == 0:
            return {(): (1.0, 0.0)}
        for weight, tree in _trees(pair, models, context, room - 1):
            for chance, emitted in outcomes(
                lambda c, tree=tree: _emitted(pair, EnumeratedTarget(distribution, context, tree, c))
            ):
                for tail, (p, steps) in rest(context + emitted[:room]).items():
                    text = emitted[:room] + tail
                    before = found.get(text, (0.0, 0.0))
                    found[text] = (before[0] + weight * chance * p, before[1] + weight * chance * (p + steps))
        return found

    return rest(())


@pytest.mark.parametrize("widths", [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("rule", ["MSS", "naive", "without replacement"])
def test_expected_steps_are_those_of_the_enumeration(rule, widths):
    """For every text of three tokens: the verifier's steps, averaged over its chance, given that it wrote this text."""
    tokens, draws, models = 3, 6, RandomModels(3, 1)
    replacement = rule != "without replacement"
    pair = Pair(Sampled(widths, replacement), ExactMatch() if rule == "naive" else MultiStep(replacement))

    @cache
    def along(context, token):
        p, q = (torch.from_numpy(models.distribution(model, context)) for model in (0, 1))
        chance = torch.Generator().manual_seed(0)
        times = range(1 if replacement else 300)
        sampled = [accepted_without_replacement(p, q, token, draws, chance)[0] for _ in times]
        return q[token], expected_tests(p, q, draws).numpy(), torch.stack(sampled).mean(0).numpy()

    for text, (probability, steps) in enumerated(pair, models, tokens).items():
        shape = (tokens, len(widths))
        columns = {"probability": np.zeros(shape), "tests": np.zeros((*shape, draws))}
        columns["without_replacement"] = np.zeros((*shape, draws))
        for place, level in np.ndindex(shape):
            if place + level < tokens - 1:
                answers = along(text[: place + level], text[place + level])
                for name, value in zip(columns, answers, strict=True):
                    columns[name][place, level] = value
        nothing = dict.fromkeys([field.name for field in fields(Drafted)], np.zeros(0))
        p = np.array([models.distribution(0, text[:i])[token] for i, token in enumerate(text)])
        written = TraceText([0], list(text), 0, np.zeros(0), np.zeros(0), p, (Drafted(**nothing | columns),))
        found = _visits(_sampled(written, pair.policy, pair.verifier, 0)).sum()
        assert found == pytest.approx(steps / probability, abs=1e-9 if replacement else 0.03)


def law_after(model, ids, temperature):
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0, -1] / temperature).softmax(-1)


def test_recorded_laws_are_the_models():
    """p, q, the draws tested and the likeliest tokens, against plain passes over the text so far."""
    trace, (draft,) = trace_of(temperature=0.8), drafts_of("model")
    for text in trace.texts[:2]:
        own = text.drafted[0]
        for place, level in ((0, 0), (3, 2), (9, 4)):
            end = place + level
            ids, token = text.prompt_ids + text.token_ids[:end], text.token_ids[end]
            p, q = law_after(target_of("model"), ids, 0.8), law_after(draft, ids, 0.8)
            assert text.probability[end] == pytest.approx(float(p[token]), rel=1e-4)
            assert own.probability[place, level] == pytest.approx(float(q[token]), rel=1e-4)
            assert own.tests[place, level] == pytest.approx(expected_tests(p, q, DRAWS + 1).numpy(), rel=1e-4)
            assert own.best[place, level] == pytest.approx(best_acceptance(p, q, DRAWS, True).numpy(), rel=1e-4)
            values, tokens = q.topk(TOP)
            assert own.distribution_tokens[place, level].tolist() == tokens.tolist()
            assert own.distribution_probs[place, level] == pytest.approx(values.numpy(), rel=1e-4)
            assert text.target_probs[end] == pytest.approx(p.topk(TOP).values.numpy(), rel=1e-4)
    last = trace.texts[0].drafted[0]
    assert not last.probability[-1].any()  # the budget's last token is never drafted
    assert (last.tokens[-1] == -1).all()


def test_whole_laws_are_kept_when_asked_for():
    """Every token has its probability, likeliest first."""
    trace = record(decoder(), PROMPTS[:1], max_new_tokens=3, temperature=1.0, top=None, nodes=0, depth=2)
    (text,) = trace.texts
    for probabilities in (text.target_probs[0], text.drafted[0].distribution_probs[0, 1]):
        assert probabilities.sum() == pytest.approx(1, abs=1e-5)
        assert (np.diff(probabilities) <= 0).all()
    assert sorted(text.drafted[0].distribution_tokens[0, 1]) == list(range(264))


def test_more_draws_gain_more_and_naive_sampling_less():
    """The order that theory says: naive <= MSS, and tokens per pass rise with the width."""
    trace = trace_of(temperature=0.8)
    taus = [replay(trace, Sampled((1, k, 1), True)).tokens_per_pass for k in (1, 3, 5)]
    assert taus == sorted(taus)
    assert all(low <= value <= high for value, low, high in taus)
    assert replay(trace, Sampled((1, 5, 1), True), ExactMatch()).tokens_per_pass < taus[-1]


# ---- what any rule could accept ----


def sequences(q, draws, replacement):
    """Every sequence of draws, and its probability; where q is exhausted, it is shorter."""
    found = {(): 1.0}
    for _ in range(draws):
        longer = {}
        for drawn, chance in found.items():
            left = q.copy()
            left[list(drawn) if not replacement else []] = 0.0
            for token in np.flatnonzero(left):
                longer[*drawn, int(token)] = chance * left[token] / left.sum()
            if not left.any():
                longer[drawn] = chance
        found = longer
    return found


def largest_flow(p, q, draws, replacement):
    """The linear program over all couplings of the emitted token with the draws."""
    drawn = sequences(q, draws, replacement)
    pairs = [(y, x) for y in range(len(p)) for x in drawn if y in x]
    rows = [[y == token for y, _ in pairs] for token in range(len(p))] + [[x == own for _, x in pairs] for own in drawn]
    limits = [*p, *drawn.values()]
    return -linprog(-np.ones(len(pairs)), np.array(rows, float), limits).fun if pairs else 0.0


@pytest.mark.parametrize("replacement", [True, False])
def test_the_best_acceptance_is_that_of_the_linear_program(replacement):
    """On small vocabularies, peaked and flat ones, and where q lacks tokens; no rule of ours is above it."""
    numbers, gaps = np.random.default_rng(3), []
    for flat in (0.2, 1.0, 5.0):
        for size in (2, 3, 4, 4):
            p, q = numbers.dirichlet([flat] * size), numbers.dirichlet([flat] * size)
            q[: size - 3] = 0.0
            q /= q.sum()
            given = torch.from_numpy(p), torch.from_numpy(q)
            best = best_acceptance(*given, 3, replacement).numpy()
            assert len(best) == (3 if replacement else WITHOUT)
            wanted = [largest_flow(p, q, draws, replacement) for draws in range(1, len(best) + 1)]
            assert best == pytest.approx(wanted, abs=1e-6)
            assert best[0] == pytest.approx(np.minimum(p, q).sum())  # speculative sampling is the best for one draw
            own = 1 - np.diff(expected_tests(*given, 4).numpy())
            if not replacement:
                chance = torch.Generator().manual_seed(0)
                tries = [accepted_without_replacement(*given, int(p.argmax()), 2, chance)[1] for _ in range(400)]
                own = torch.stack(tries).mean(0).numpy()
            assert (own <= best + (1e-9 if replacement else 0.02)).all()
            gaps.append(best[1] - own[1])
    assert max(gaps) > 0.01  # there is something to gain


def test_drafts_that_draw_nothing_or_one_token_are_bounded():
    p = torch.tensor([0.3, 0.7])
    for replacement in (True, False):
        assert best_acceptance(p, torch.zeros(2), 2, replacement).tolist() == [0, 0]
        assert best_acceptance(p, torch.tensor([1.0, 0.0]), 2, replacement).tolist() == pytest.approx([0.3, 0.3])


def test_a_text_in_which_nothing_was_drafted_has_no_share_of_the_best(recwarn):
    """Of two texts; the interval is the other one's, which no draw of texts changes."""
    decoder = SpeculativeDecoder(tiny_llama(), byte_tokenizer(), ["ngram"])
    trace = record(decoder, [[1] * 9, [2]], max_new_tokens=2, temperature=1.0, seed=3, nodes=0, depth=2, draws=2)
    value, low, high = replay(trace, Sampled((2, 2))).bound.share
    assert 0 < value == low == high
    assert not recwarn.list


def test_a_replay_says_how_close_to_the_best_rule_it_comes():
    """A chain of speculative sampling is the best; wider levels are not; what the trace cannot bound has no bound."""
    trace = trace_of(temperature=0.8)
    for replacement in (True, False):
        chain = replay(trace, Sampled((1, 1), replacement))
        assert chain.bound.accepted == pytest.approx(chain.bound.most, rel=1e-5)
        assert chain.bound.share == pytest.approx([1, 1, 1], rel=1e-5)
        assert chain.bound.accepted == pytest.approx(chain.accepted, abs=0.2)  # the same, but for the texts' chance
        wide = replay(trace, Sampled((2, 1), replacement))
        assert 0.7 < wide.bound.share[0] < 0.9999
        assert wide.bound.accepted[0] < wide.bound.most[0]
        assert "of what any rule could" in str(wide)
    assert replay(trace, Sampled((3,))).bound is None
    assert replay(trace, Sampled((1,), True), ExactMatch()).bound is None
    assert replay(trace, Chain(2)).bound is None


# ---- files ----


def same(one, other):
    """Two texts, array by array."""
    arrays = [(getattr(one, name), getattr(other, name)) for name in ("target_tokens", "target_probs", "probability")]
    for a, b in zip(one.drafted, other.drafted, strict=True):
        arrays += [(getattr(a, field.name), getattr(b, field.name)) for field in fields(Drafted)]
    ids = [(text.prompt_ids, text.token_ids, text.seed) for text in (one, other)]
    return ids[0] == ids[1] and all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in arrays)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_trace_comes_back_from_its_folder(tmp_path, temperature):
    """Settings and every array, with their types."""
    trace = trace_of("model and n-grams", temperature)
    trace.save(tmp_path / "trace")
    found = Trace.load(tmp_path / "trace", decoder("model and n-grams"))
    assert found.settings == trace.settings
    assert len(found.texts) == len(trace.texts)
    assert all(map(same, found.texts, trace.texts))
    assert replay(found, BestFirst(9, 4)).to_dict() == replay(trace, BestFirst(9, 4)).to_dict()
    assert json.dumps(replay(found, BestFirst(9, 4)).to_dict())


def test_a_recording_goes_on_where_it_stopped(tmp_path):
    """Only what is missing is recorded; the result is that of one go."""
    sizes = {"max_new_tokens": 6, "nodes": 3, "depth": 2, "batch": 1, "out": tmp_path / "trace"}
    whole, asked = record(decoder(), PROMPTS, **sizes), []
    (tmp_path / "trace" / "00001.safetensors").unlink()

    again = record(decoder(), PROMPTS, progress=lambda *told: asked.append(told), **sizes)
    number, new = len(PROMPTS), len(again.texts[1].token_ids)
    assert asked == [("texts", number - 1, number, {"tokens": 0}), ("texts", number, number, {"tokens": new})]
    assert all(map(same, again.texts, whole.texts))
    assert len(Trace.load(tmp_path / "trace").texts) == len(PROMPTS)
    with pytest.raises(InputError, match=r"begun with other settings .*depth was 2, now 1"):
        record(decoder(), PROMPTS, **{**sizes, "depth": 1})
    other = SpeculativeDecoder(tiny_llama(3), byte_tokenizer(), drafts_of("model"), ANY)
    with pytest.raises(InputError, match=r'other settings .*target\.weights was "\w{32}", now "\w{32}"'):
        record(other, PROMPTS, **sizes)
    with pytest.raises(InputError, match="another prompt"):
        record(decoder(), [*PROMPTS[::-1]], **sizes)


def test_a_folder_says_what_made_it_and_has_a_line_for_each_prompt(tmp_path):
    record(decoder(), PROMPTS, max_new_tokens=6, nodes=0, depth=2, out=tmp_path, seed=4)
    settings = json.loads((tmp_path / SETTINGS).read_text())
    assert settings.keys() >= {
        "target",
        "drafts",
        "dtype",
        "depth",
        "temperature",
        "device",
        "cpu",
        "torch",
        "specinfer",
    }
    lines = [json.loads(line) for line in (tmp_path / RECORDS).read_text().splitlines()]
    assert [line["number"] for line in lines] == [0, 1, 2]
    assert [line["prompt_tokens"] for line in lines] == list(map(len, PROMPTS))
    assert [(line["seed"], line["new_tokens"]) for line in lines] == [(4, 6), (5, 6), (6, 6)]


def test_prompts_that_cannot_be_used_are_reported_in_their_place(tmp_path, logged):
    """The others' seeds are their own, nobody is asked twice, and the trace says it when it is read again."""
    bad = {1: "x" * 300, 2: " ", 4: 7, 5: "\ud800", 6: ["a", "b"], 7: [1, 999]}
    prompts = [bad.get(number, [5, 9, number]) for number in range(9)]
    sizes = {"max_new_tokens": 6, "nodes": 3, "depth": 2, "batch": 2, "temperature": 0.8}
    made = record(decoder(), prompts, out=tmp_path, **sizes)
    assert list(made.refused) == list(bad)
    assert "context of 256" in made.refused[1]
    assert "is empty" in made.refused[2]
    assert "prompt 1 is left out" in logged.getvalue()
    assert "3 texts, 18 tokens, 6 prompts refused" in repr(made)
    alone = record(decoder(), [[5, 9, 8]], seed=8, **sizes)
    assert same(made.texts[2], alone.texts[0])
    before = (tmp_path / RECORDS).read_bytes()
    again = record(decoder(), prompts, out=tmp_path, **sizes)
    assert (tmp_path / RECORDS).read_bytes() == before
    for found in (again, Trace.load(tmp_path), record(decoder(), prompts, **sizes)):
        assert found.refused == made.refused
        assert all(map(same, found.texts, made.texts))
    made.save(tmp_path / "copy")
    assert Trace.load(tmp_path / "copy").refused == made.refused
    assert [path.name for path in sorted((tmp_path / "copy").glob("*.safetensors"))] == [
        f"0000{number}.safetensors" for number in (0, 3, 8)
    ]
    with pytest.raises(InputError, match="is empty"):
        record(decoder(), ["x" * 300, " "], **sizes)


def test_texts_of_a_folder_need_not_fit_into_memory(tmp_path):
    """A long trace is read as it is replayed: its files are mapped."""
    trace = trace_of()
    trace.save(tmp_path)
    found = Trace.load(tmp_path)
    assert f"{tmp_path}/00000.safetensors" in Path("/proc/self/maps").read_text()
    assert replay(found, Chain(3)).to_dict() == replay(trace, Chain(3)).to_dict()
    assert same(found.texts[-1], trace.texts[-1])
    assert same(pickle.loads(pickle.dumps(found)).texts[-1], trace.texts[-1])
    with pytest.raises(IndexError):
        found.texts[len(PROMPTS)]


def test_a_killed_recording_loses_nothing(tmp_path):
    """Kill -9 in the middle; the same command goes on, and files are those of a run that never stopped."""
    for name, model in (("target", tiny_llama(0)), ("near", like(tiny_llama(0)))):
        model.float().save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    rows = [json.dumps({"prompt": f"{i}, {i + 1}, {i}, "}) + "\n" for i in range(12)]
    (tmp_path / "many.jsonl").write_text("".join(rows))
    prompts = [json.loads(row)["prompt"] for row in rows]
    options = ["record", "--prompts", tmp_path / "many.jsonl", "--count", 0]
    options += ["--target", tmp_path / "target", "--draft", tmp_path / "near", "--out", tmp_path / "out"]
    options += ["--max-new-tokens", 8, "--nodes", 4, "--depth", 3, "--batch", 2, "--dtype", "float32"]
    out, started = tmp_path / "out", monotonic()
    with copied(run_command, *options) as process:
        while not ((out / RECORDS).exists() and (out / RECORDS).read_bytes().count(b"\n") >= 3):
            assert process.exitcode is None
            assert monotonic() - started < 120
            sleep(0.001)
    survived = (out / RECORDS).read_bytes()
    assert 3 <= survived.count(b"\n") < 12
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    own = SpeculativeDecoder.from_pretrained(str(tmp_path / "target"), [str(tmp_path / "near")], dtype="float32")
    sizes = {"max_new_tokens": 8, "nodes": 4, "depth": 3, "batch": 2}
    found, whole = record(own, prompts, out=out, **sizes), record(own, prompts, **sizes)
    assert (out / RECORDS).read_bytes().startswith(survived[: survived.rindex(b"\n") + 1])
    assert len(found.texts) == 12
    for line in survived.splitlines()[: survived.count(b"\n")]:
        name = f"{json.loads(line)['number']:05d}.safetensors"
        assert (out / name).stat().st_mtime_ns == times[name]  # it was not made twice
    assert all(map(same, found.texts, whole.texts))


def test_other_models_versions_and_files_are_refused(tmp_path):
    """A clear error each, before anything is replayed."""
    trace = trace_of()
    trace.save(tmp_path)
    other = SpeculativeDecoder(tiny_llama(3), byte_tokenizer(), drafts_of("model"), Chain(1))
    with pytest.raises(InputError, match=r"of other models: its target"):
        Trace.load(tmp_path, other)
    with pytest.raises(InputError, match=r"its drafts"):
        Trace.load(tmp_path, decoder("two models"))
    with pytest.raises(InputError, match="holds no trace"):
        Trace.load(tmp_path / "elsewhere")
    (tmp_path / "00002.safetensors").write_bytes(b"half")
    with pytest.raises(InputError, match="00002"):
        Trace.load(tmp_path)
    settings = json.loads((tmp_path / SETTINGS).read_text())
    (tmp_path / SETTINGS).write_text(json.dumps(settings | {"format": 99}))
    with pytest.raises(InputError, match="format 99"):
        Trace.load(tmp_path)


# ---- what cannot be answered ----


@pytest.mark.parametrize(
    ("policy", "verifier", "asked", "message"),
    [
        (Auto(), None, {}, "cannot be replayed"),
        (BestFirst(NODES + 1, 2), None, {}, "larger nodes"),
        (Chain(DEPTH + 1), None, {}, "larger depth"),
        (Expansion((1, TOP + 1)), None, {}, "larger top"),
        (Expansion((1,)), None, {"drafts": ["none"]}, "no draft 'none'"),
        (Sampled((1,)), None, {"drafts": [0]}, "with a temperature"),
        (BestFirst(4, 2), None, {"coupled": False, "sampled": True}, "know the noise"),
        (Sampled((1,)), None, {"sampled": True}, "one draft"),
        (Sampled((2, 3), True), None, {"drafts": [0], "sampled": True}, "larger draws"),
        (Sampled((2,)), ExactMatch(), {"drafts": [0], "sampled": True}, "with replacement"),
    ],
)
def test_what_was_not_recorded_is_refused(policy, verifier, asked, message):
    """Each by its reason."""
    asked = dict(asked)
    trace = trace_of("two models", 0.8 if asked.pop("sampled", False) else 0.0)
    with pytest.raises(InputError, match=message):
        replay(trace, policy, verifier, **asked)


def test_biased_pairs_are_refused():
    """As in the decoder."""
    with pytest.raises(PairingError):
        replay(trace_of(), Expansion((2,)), MultiStep())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"nodes": -1}, "nodes=-1"),
        ({"depth": 0}, "depth=0"),
        ({"max_new_tokens": 1}, "max_new_tokens=1"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_sizes_that_record_nothing_are_refused(sizes, message):
    """Before any model runs."""
    with pytest.raises(InputError, match=message):
        record(decoder(), PROMPTS, **sizes)


def test_a_decoder_without_drafts_has_nothing_to_record():
    """Which also is what tree=None means."""
    with pytest.raises(InputError, match="no drafts"):
        record(decoder(tree=None), PROMPTS)


# ---- statistics ----


def test_hits_and_calibration_count_candidates():
    """By hand, from the recorded arrays."""
    trace = trace_of("two models", 0.8)
    table, curve = hits(trace, 1), calibration(trace, 1, bins=4)
    counts, said = np.zeros((DEPTH, TOP), int), []
    for text in trace.texts:
        own = text.drafted[1]
        for place, level in np.ndindex(len(text.token_ids), DEPTH):
            if place + level < NEW - 1:
                for rank, token in enumerate(own.tokens[place, level].tolist()):
                    right = token == text.token_ids[place + level]
                    counts[level, rank] += right
                    said.append((np.exp(own.log_probs[place, level, rank]), right))
    assert table.counts.tolist() == counts.tolist()
    assert table.tried.tolist() == [len(PROMPTS) * (NEW - 1 - level) for level in range(DEPTH)]
    assert table.within[:, -1] == pytest.approx(counts.sum(1) / table.tried)
    assert curve.count.sum() == len(said)
    upper = [right for probability, right in said if probability >= 0.75]
    assert curve.accepted[3] == pytest.approx(np.mean(upper))
    gaps = [abs(np.mean([p - r for p, r in said if b / 4 <= p < (b + 1) / 4])) for b in range(4)]
    sizes = [sum(b / 4 <= p < (b + 1) / 4 for p, _ in said) for b in range(4)]
    assert curve.error == pytest.approx(np.average(gaps, weights=sizes), abs=1e-6)
    assert (curve.low <= curve.accepted).all()
    assert (curve.accepted <= curve.high).all()


def test_probabilities_that_are_right_are_off_by_chance():
    """As simulated; the more observations, the less."""
    numbers = np.random.default_rng(0)
    for count in (200, 2000):
        said = numbers.random(count) ** 3
        errors = [curve("", said, numbers.random(count) < said, 10).error for _ in range(300)]
        assert curve("", said, said > 0.5, 10).chance == pytest.approx(np.mean(errors), rel=0.1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_edges_are_nodes_whose_parents_were_accepted(temperature):
    """As many are accepted at each depth as the replay accepts tokens there; other nodes do not count."""
    trace, policy = trace_of(temperature=temperature), BestFirst(12, 4)
    made, steps = edge_calibration(trace, policy), replay(trace, policy)
    accepted = steps.accepted * steps.steps.sum()
    for groups in made.curves.values():
        found = [np.nansum(groups[group].accepted * groups[group].count) for group in ("1", "2", "3 and deeper", "all")]
        assert found == pytest.approx([accepted[0], accepted[1], accepted[2:].sum(), accepted.sum()])
    nodes = sum(len(text.drafted[0].tree_tokens) for text in trace.texts)
    assert 0 < made.curves["q"]["all"].count.sum() < nodes / 2
    assert f"{made.curves['auto']['2'].error:.3f}" in str(made)
    with pytest.raises(InputError, match="larger nodes"):
        edge_calibration(trace, BestFirst(NODES + 1, 2))


def test_auto_corrects_edges_by_what_was_accepted_before():
    """By hand for trees of one node: the expectation so far, over what was accepted, older ones lighter."""
    trace = trace_of("two models")
    made = edge_calibration(trace, BestFirst(1, 1), drafts=[1], bins=1)
    accepted = expected = PRIORS[0]
    estimates, right = [], []
    for text in trace.texts:
        place = 0
        while place < NEW:
            node = text.drafted[1].first[place]
            if place == NEW - 1:  # the last token is not drafted
                break
            q = float(np.exp(text.drafted[1].tree_scores[node]))
            hit = text.drafted[1].tree_tokens[node] == text.token_ids[place]
            estimates.append(min(1.0, q * accepted / expected))
            right.append((q, hit))
            fade = 1 - 1 / REMEMBERED
            accepted, expected = fade * accepted + hit, fade * expected + q
            place += 1 + hit
    curves = {name: groups["all"] for name, groups in made.curves.items()}
    assert curves["q"].count.tolist() == [len(right)]
    assert curves["q"].probability == pytest.approx(np.mean([q for q, _ in right]))
    assert curves["auto"].probability == pytest.approx(np.mean(estimates))
    assert curves["auto"].accepted == pytest.approx(np.mean([hit for _, hit in right]))
    assert curves["auto"].error < curves["q"].error


def test_the_cost_model_fits_and_predicts():
    """b comes back from tokens that it made; a speed-up is tokens over time, in either notation."""
    assert expected_tokens(0.5, np.array([1, 2, 3])) == pytest.approx([1.5, 1.75, 1.875])
    model = cost_model(trace_of(), Costs(draft=0.01, target=0.1, verify=0.12), [1, 3])
    assert model.tokens == pytest.approx([replay(trace_of(), Chain(g)).tokens_per_pass[0] for g in (1, 3)])
    assert model.speed_up == pytest.approx(model.tokens / [(0.01 + 0.12) / 0.1, (0.03 + 0.12) / 0.1])
    one = cost_model(trace_of(), Costs(0.01, 0.1, 0.1), [1])
    assert one.fitted == pytest.approx(one.tokens, abs=1e-3)
    with pytest.raises(InputError, match="lengths"):
        cost_model(trace_of(), Costs(1, 1, 1), [])


def test_costs_are_read_from_a_comparison():
    """Seconds a pass, and the speed-up of decoding without prefill."""
    head = {"draft": "head", "passes": 40, "tokens": 9, "only": 9, "seconds": 0.4}
    sizes = {"nodes_per_step": 4.0, "levels_per_step": 4.0, "plain_steps": 0}
    sequence = {"tokens": 20, "target_passes": 10, "draft_passes": 40, "drafts": [head], "tree_sizes": sizes}
    sequence["seconds"] = {"total": 3.0, "prefill": 1.0, "target": 1.5, "draft": 0.4, "bookkeeping": 0.1}
    plain = {"tokens": 20, "target_passes": 20, "draft_passes": 0, "drafts": [], "tree_sizes": sizes}
    plain["seconds"] = {"total": 3.5, "prefill": 0.5, "target": 2.8, "draft": 0.0, "bookkeeping": 0.2}
    methods = {"sequence": sequence, "autoregressive": plain}
    where = {"set": "chat", "temperature": 0.0, "skipped": {}}
    records = [{**where, "place": place, "methods": methods} for place in (0, 1)]

    def costs(draft="head", temperature=0.0, **settings):
        return measured(Comparison({"depth": 4, "max_rows": 1} | settings, records), draft, temperature)

    assert costs() == pytest.approx((0.01, 0.14, 0.15, 4, 1.5))
    for asked, message in (
        ({"temperature": 1.0}, "temperature 1"),
        ({"draft": "ngram"}, "timed passes of head, not of ngram"),
        ({"depth": 3}, r"4\.0 passes a step for 3 levels"),
        ({"max_rows": 8}, "8 prompts at a time"),
    ):
        with pytest.raises(InputError, match=message):
            costs(**asked)


# ---- the paper's tables, and the command line ----


def test_paper_tables_stand_beside_the_papers(tmp_path):
    """Rows for every set and all of them; k rises; the traces are there for a second look."""
    sets = {"alpaca": PROMPTS[:2], "mine": PROMPTS[2:]}
    made = paper_tables(decoder("model and n-grams"), sets, max_new_tokens=8, out=tmp_path)
    rows = {(row["table"], row["set"], row["rule"]): row for row in made.rows}
    assert len(rows) == len(made.rows) == 3 * (3 + 3 + 1)
    for (table, name, rule), row in rows.items():
        values = [value for value, _, _ in row["ours"]]
        assert (row["paper"] is not None) == (name == "alpaca" and rule != "coupled")
        assert len(values) == len(row["columns"]) == (len(RULES) if table == 3 else len(WIDTHS))
        if table == 1 or (table, rule) == (2, "MSS"):
            assert values == sorted(values)
    table_3 = rows[3, "all", "all"]
    assert table_3["ours"][1] == rows[2, "all", "MSS"]["ours"][4]
    assert table_3["ours"][0] < table_3["ours"][1]
    assert rows[1, "alpaca", "greedy"]["paper"] == [0.68, 0.77, 0.81, 0.84, 0.85]
    assert "draft draft," in str(made)  # the first draft alone
    sampled = Trace.load(tmp_path / "alpaca" / "sampled")
    assert replay(sampled, Expansion(expansion(5))).tokens_per_pass == rows[3, "alpaca", "all"]["ours"][3]
    assert json.loads(json.dumps(made.to_dict())) == made.to_dict()
    for sets, message in (({"none": []}, "at least one"), ({"cp": "text"}, "at least one"), ({"all": ["a"]}, "'all'")):
        with pytest.raises(InputError, match=message):
            paper_tables(decoder(), sets)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command on toy models; return exit code, standard output and standard error."""

    def load(name=None, dtype="auto", device="auto", *_, **__):
        model = drafts_of("model")[0] if name == "near" else target_of("model")
        return Loaded(model, byte_tokenizer(), str(name))

    monkeypatch.setattr(specinfer.loading, "load", load)

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["specinfer", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return call


def test_the_command_line_records_and_replays(run, tmp_path):
    """A trace from prompts, its table, and the same as JSON."""
    sizes = ["--max-new-tokens", 8, "--nodes", 4, "--depth", 3, "--temperature", 1]
    code, out, _ = run("record", "--prompt", "abcabc", "--draft", "near", "--out", tmp_path, *sizes)
    assert (code, "8 tokens" in out) == (0, True)
    again = run("record", "--prompt", "abcabc", "--draft", "near", "--out", tmp_path, *sizes, "--json")[1]
    assert json.loads(again)["tokens"] == 8
    code, out, err = run("replay", tmp_path)
    assert (code, err) == (0, "")
    trees = "BestFirst(max_nodes=4", "Chain(length=3)", "MultiStep(replacement=True)", "oracle", "not coupled"
    for shown in (*trees, "by depth", "T = 1;", "by chance"):
        assert shown in out
    code, out, _ = run("replay", tmp_path, "--tree", "expansion", "--expansion", "1,2", "--json")
    made = json.loads(out)
    assert [own["policy"] for own in made["replays"]] == ["Expansion(expansion=(1, 2))"] * 2
    greedy = tmp_path / "greedy"
    assert run("record", "--prompt", "abcabc", "--draft", "near", "--out", greedy, "--max-new-tokens", 4)[0] == 0
    code, out, err = run("replay", greedy, "--tree", "sampled")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert made["edges"]["auto"].keys() == {"1", "2", "3 and deeper", "all"}
    assert made["replays"][0]["tokens_per_pass"] == replay(Trace.load(tmp_path), Expansion((1, 2))).tokens_per_pass


def test_the_command_line_prints_the_papers_tables(run, tmp_path):
    """From prompt files, a set each; twice from the same folder."""
    file = tmp_path / "cp.jsonl"
    file.write_text('{"prompt": "abcabc"}\n{"prompt": "why, why?"}\n')
    arguments = ["paper-tables", "--prompts", file, "--draft", "near", "--max-new-tokens", 6, "--out", tmp_path / "t"]
    code, out, _ = run(*arguments)
    assert code == 0
    assert all(title in out for title in ("Table 1", "Table 2", "Table 3", "cp, MSS", "paper", "k = 5"))
    assert run(*arguments, "--json")[0] == 0
    assert (tmp_path / "t" / "cp" / "greedy" / SETTINGS).exists()


@pytest.mark.parametrize(
    "recorded", [{"draws": 3, "temperature": 1}, {"top": 3}, {"depth": 2}, {"max_new_tokens": 3}], ids=str
)
def test_every_trace_is_replayed_as_far_as_it_goes(run, tmp_path, recorded):
    """Without options that say how far, each tree once; as JSON that others can read."""
    sizes = {"max_new_tokens": 8, "nodes": 4, "depth": 4} | recorded
    given = [part for name, value in sizes.items() for part in (f"--{name.replace('_', '-')}", value)]
    assert run("record", "--prompt", "abcabc", "--draft", "near", "--out", tmp_path, *given)[0] == 0
    code, out, err = run("replay", tmp_path, "--json")
    assert (code, err) == (0, "")
    made = json.loads(out, parse_constant=pytest.fail)
    asked = [(own["policy"], own["verifier"], own["how"]) for own in made["replays"]]
    assert len(asked) == len(set(asked)) > 2


def test_drafts_of_one_name_are_told_apart_by_place(run, tmp_path):
    """A name that several have names none; on the command line all propose."""
    trace = trace_of("two models")
    assert trace.drafts == ["draft", "draft"]
    with pytest.raises(InputError, match="several drafts called 'draft'"):
        hits(trace, "draft")
    assert calibration(trace, 0).error != calibration(trace, 1).error
    trace.save(tmp_path)
    code, out, err = run("replay", tmp_path, "--tree", "best-first")
    assert (code, err, out.count("draft, draft")) == (0, "", 1 + 2 * 3)  # the trace; replays and oracles of 4, 8, 16
    code, _, err = run("replay", tmp_path, "--draft", "draft")
    assert (code, "by its index, from 0" in err) == (2, True)
    told = [
        json.loads(run("replay", tmp_path, "--json", *options)[1])["drafts"]
        for options in (["--draft", 1], ["--draft", 1, "--draft", 1], [])
    ]
    assert told[0] == told[1] == [told[2][1]] != [told[2][0]]


def load_error(folder, decoder=None):
    """Return why a trace is refused, None if it is not; other errors fail the test."""
    try:
        Trace.load(folder, decoder)
    except InputError as error:
        return str(error)
    return None


BAD = [None, "x", [], [[1]], {}, {"a": {}}, -1, -(10**30), 0.25, float("nan"), float("inf"), True, "\n", 10**30]


@pytest.mark.parametrize(
    "name", ["format", "depth", "nodes", "top", "draws", "max_new_tokens", "temperature", "drafts", "model"]
)
def test_changed_settings_of_a_trace_are_one_line(name, tmp_path):
    """Whatever stands in the place of a value, or nothing."""
    trace_of(temperature=0.8).save(tmp_path)
    settings = json.loads((tmp_path / SETTINGS).read_text())
    without = {key: value for key, value in settings.items() if key != name}
    for other in [without, *({**settings, name: value} for value in BAD)]:
        (tmp_path / SETTINGS).write_text(json.dumps(other))
        error = load_error(tmp_path)
        assert error is not None
        assert str(tmp_path) in error
        assert "\n" not in error


@pytest.mark.parametrize("value", [[], "x", 5, None, [{"format": 1}]])
def test_settings_that_are_no_object_are_one_line(value, tmp_path):
    trace_of().save(tmp_path)
    (tmp_path / SETTINGS).write_text(json.dumps(value))
    with pytest.raises(InputError, match="holds no trace"):
        Trace.load(tmp_path)


def test_a_text_that_is_not_what_was_recorded_is_one_line(tmp_path):
    """Cut off, a changed byte anywhere, another text of the trace, another trace's, a record without a digest, none."""
    trace_of().save(tmp_path)
    trace_of(temperature=0.8).save(tmp_path / "other")
    path, records = tmp_path / "00001.safetensors", tmp_path / RECORDS
    whole, lines = path.read_bytes(), records.read_text().splitlines()
    changed = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (0, 9, len(whole) // 2, len(whole) - 1)]
    others = [(folder / "00000.safetensors").read_bytes() for folder in (tmp_path, tmp_path / "other")]
    for data in (b"", whole[:-1], whole + b"x", *changed, *others):
        path.write_bytes(data)
        error = load_error(tmp_path)
        assert str(path) in error
        assert "\n" not in error
    path.write_bytes(whole)
    assert load_error(tmp_path) is None
    cut = {name: value for name, value in json.loads(lines[1]).items() if name != "sha256"}
    records.write_text("\n".join([lines[0], json.dumps(cut), *lines[2:]]) + "\n")
    assert str(path) in load_error(tmp_path)


def test_a_folder_that_another_run_fills_is_refused(tmp_path):
    """Nothing is written to it."""
    with locked(tmp_path):
        for call in (
            lambda: record(decoder(), PROMPTS, max_new_tokens=4, out=tmp_path),
            lambda: paper_tables(decoder(), {"set": PROMPTS}, max_new_tokens=4, out=tmp_path),
            lambda: trace_of().save(tmp_path),
        ):
            with pytest.raises(InputError, match="another run writes to"):
                call()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_settings_under_which_nothing_was_recorded_are_replaced(tmp_path):
    """Unless they may be somebody else's."""
    trace = trace_of()
    records = TraceFolder(tmp_path, {}).records
    records.begin({**trace.settings, "depth": 99})
    records.begin(trace.settings)
    trace.save(tmp_path)
    with pytest.raises(InputError, match=f"begun with other settings .*depth was {DEPTH}, now 99"):
        records.begin({**trace.settings, "depth": 99})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "nowhere"], "holds no trace"),
        (["record", "--out", "x"], "nothing to record"),
        (["paper-tables", "--prompts", "nowhere.jsonl"], "cannot read"),
        (["record", "--prompts", "nowhere.jsonl", "--out", "x", "--count", "-1"], "--count"),
        (["record", "--prompts", "words.jsonl", "--out", "x"], "words.jsonl, line 2 is not JSON"),
    ],
)
def test_bad_input_is_one_line(run, arguments, message, tmp_path, monkeypatch):
    """And exit code 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.jsonl").write_text('{"prompt": "a"}\nwords\n')
    code, _, err = run(*arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
