"""Inspections: the target's rescored of every node, worked out again, and trees changed by hand."""

from collections import Counter

import pytest
import torch
from conftest import PROMPTS, counted, like, oracle, plain
from transformers import MptConfig, MptForCausalLM

import specinfer.evaluation.inspect.rescoring
from specinfer import Auto, BestFirst, Chain, Sampled, SpeculativeDecoder, inspect
from specinfer.engine.gumbel import COUPLING, gumbel, key
from specinfer.engine.sequence import RowView
from specinfer.engine.verify import MultiStep
from specinfer.errors import InputError, PairingError, SamplingError, TreeError, UnsupportedModel
from specinfer.evaluation.inspect.inspection import StepInspection
from specinfer.results import Result, State, Stats

WARPED = {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "repetition_penalty": 1.2}
WAYS = {"greedy": {}, "sampled": {"temperature": 1.0, "top_k": 0, "seed": 3}, "warped": {**WARPED, "seed": 5}}


@pytest.fixture(scope="module")
def decoder(target, near, tokenizer):
    return SpeculativeDecoder(target, tokenizer, drafts=["ngram", near], tree=BestFirst(7, 4))


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS.keys())
def case(request, decoder):
    """A decoder, a result, its inspection, and the options."""
    options = {name: value for name, value in request.param.items() if name != "seed"}
    result = decoder.generate(PROMPTS[2], max_new_tokens=24, seed=request.param.get("seed"), **options)
    return decoder, result, inspect(decoder, result, **options), options


@pytest.fixture(scope="module")
def greedy(decoder):
    return inspect(decoder, decoder.generate(PROMPTS[0], max_new_tokens=24))


def distributions(target, prefix, options):
    """Log-probabilities after a prefix, by a plain pass and transformers' own processors."""
    from specinfer.engine.processors import Processors
    from specinfer.engine.sampling import resolve

    distribution = Processors.of(
        resolve(target.generation_config, max_new_tokens=24, **options), len(PROMPTS[2]), torch.device("cpu")
    )
    with torch.inference_mode():
        logits = target(torch.tensor([prefix])).logits[:, -1]
    return distribution.scores(logits, [prefix])[0].log_softmax(-1)


# ---- what is worked out again ----


def test_every_node_has_the_laws_of_a_plain_pass_over_its_path(case, target):
    """p, noise, margin and choice are what a pass without a tree gives, node by node."""
    _, result, inspection, options = case
    prefix = list(result.prompt_ids)
    for step in inspection.steps:
        for node in step.nodes[1:]:
            ids = prefix + step.tree.path(node.node)
            log_p = distributions(target, ids[:-1], options)
            assert node.p == pytest.approx(float(log_p[node.token].exp()), abs=1e-9)
            assert node.q == step.tree.probability(node.node)
            assert node.position == len(ids) - 1
            values = log_p
            if result.seed is not None:
                noise = gumbel(key(result.seed, COUPLING, node.position), len(log_p))
                assert node.noise == pytest.approx(float(noise[node.token]))
                values = log_p + noise
            others = torch.cat([values[: node.token], values[node.token + 1 :]])
            assert node.margin == pytest.approx(float(values[node.token] - others.max()), abs=1e-6)
        for node in step.nodes:
            assert node.choice == node.top[0].token
            assert [token for token, *_ in node.top] == list(dict.fromkeys(token for token, *_ in node.top))
        prefix += result.steps[step.number].tokens


def test_paths_and_states_are_those_of_the_record(case):
    """An inspection says what happened: paths, bonus tokens, states, and the sign of margins."""
    _, result, inspection, _ = case
    assert inspection.differences == inspection.notes == ()
    assert len(inspection.steps) == len(result.steps)
    fates = Counter()
    for step, own in zip(result.steps, inspection.steps, strict=True):
        assert (own.path, own.tokens, own.drafted_by) == (step.path, step.tokens, step.drafted_by)
        assert own.bonus == step.bonus or step.bonus is None
        assert [node.state for node in own.nodes] == step.states
        fates.update(step.states)
        for node in own.nodes[1:]:
            assert node.margin is not None
            if node.state is not State.UNREACHED:
                assert (node.margin > 0) == (node.state in (State.ACCEPTED, State.CUT))
    assert {State.ROOT, State.ACCEPTED, State.REJECTED, State.UNREACHED} <= set(fates)


def test_slots_are_those_of_the_row_alone(greedy):
    """The root's slot is its position; nodes follow in the tree's order."""
    for step in greedy.steps:
        first = step.nodes[0]
        assert first.slot == first.position
        assert [node.slot - first.slot for node in step.nodes] == list(range(len(step.tree)))


def test_ratios_are_left_out_where_q_is_given_the_noise(case):
    """A greedy node has p / q; under coupled sampling a draft's q is not a distribution of tokens."""
    _, result, inspection, _ = case
    nodes = [node for step in inspection.steps for node in step.nodes[1:]]
    for node in nodes:
        assert node.ratio == (None if result.seed is not None else pytest.approx(node.p / node.q))


def test_inspecting_takes_one_pass_a_step_and_leaves_the_result_alone(decoder, target):
    """As many passes as steps, and one over the prompt."""
    result = decoder.generate(PROMPTS[0], max_new_tokens=12)
    before = str(result), [step.to_dict() for step in result.steps]
    with counted(target) as calls:
        inspect(decoder, result)
    assert len(calls) == len(result.steps) + 1
    assert before == (str(result), [step.to_dict() for step in result.steps])


def test_rows_of_a_ragged_batch_are_inspected_one_by_one(decoder):
    """A row in a batch is the row alone, also afterwards."""
    for result in decoder.generate(PROMPTS, max_new_tokens=12):
        assert inspect(decoder, result).differences == ()


def test_a_text_that_ends_above_its_path_is_cut(target, near):
    """Nodes accepted below the end of the text are marked, and the walk's next token is known all the same."""
    token = plain(target, PROMPTS[0])[1]
    decoder = SpeculativeDecoder(target, drafts=[oracle(target)], tree=Chain(6))
    result = decoder.generate(PROMPTS[0], max_new_tokens=24, eos_token_id=token)
    step = inspect(decoder, result, eos_token_id=token).steps[-1]
    assert [node.state for node in step.nodes] == result.steps[-1].states
    assert State.CUT in result.steps[-1].states
    assert result.steps[-1].bonus is None
    assert step.bonus is not None
    assert "the text had ended" in step.why(len(step.path))


# ---- options that did not make the result ----


def test_other_options_are_an_error_that_names_the_place(decoder):
    """A temperature of another call leads to another text."""
    result = decoder.generate(PROMPTS[0], max_new_tokens=24, temperature=1.0, seed=3)
    with pytest.raises(InputError, match=r"step \d+: at position \d+ the target chooses .* nats"):
        inspect(decoder, result, temperature=0.3)


def test_sampling_and_greedy_are_not_mistaken_for_each_other(decoder, target):
    """Neither runs a model."""
    sampled = decoder.generate(PROMPTS[0], max_new_tokens=4, temperature=1.0, seed=3)
    greedy = decoder.generate(PROMPTS[0], max_new_tokens=4)
    with counted(target) as calls:
        with pytest.raises(InputError, match="sampled with seed 3, but these options are greedy"):
            inspect(decoder, sampled)
        with pytest.raises(InputError, match="greedy, but these options sample"):
            inspect(decoder, greedy, temperature=1.0)
        with pytest.raises(SamplingError, match="temperatur"):
            inspect(decoder, sampled, temperatur=1.0)
        with pytest.raises(InputError, match="no steps"):
            inspect(decoder, Result("", [], [1], "unfinished", None, Stats(0, 0, 0, (), greedy.stats.seconds), []))
        with pytest.raises(PairingError):
            inspect(SpeculativeDecoder(target, tree=Sampled((2,)), drafts=["ngram"]), greedy)
    assert calls == []


def test_another_target_is_an_error(decoder, far):
    """The tokens are not its choices."""
    with pytest.raises(InputError, match="the target chooses"):
        inspect(SpeculativeDecoder(far, drafts=["ngram"]), decoder.generate(PROMPTS[0], max_new_tokens=8))


def test_a_gap_that_rounding_explains_is_told_and_not_raised(decoder, target, monkeypatch):
    """With a tolerance as of a coarse format, a slightly different target is a rescorer with reservations."""
    result = decoder.generate(PROMPTS[0], max_new_tokens=24)
    noisy = SpeculativeDecoder(like(target, noise=0.02), drafts=["ngram"])
    with pytest.raises(InputError, match="rounding explains"):
        inspect(noisy, result)
    monkeypatch.setitem(specinfer.evaluation.inspect.rescoring.ROUNDING, torch.float64, 1.0)
    inspection = inspect(noisy, result)
    assert inspection.differences
    for difference, note in zip(inspection.differences, inspection.notes, strict=True):
        assert 0 < difference.gap < difference.explained
        assert result.token_ids[difference.position - len(PROMPTS[0])] == difference.written != difference.chosen
        assert f"{difference.gap:.2g} nats" in note
    assert [step.path for step in inspection.steps] == [step.path for step in result.steps]


def test_rounding_may_move_a_token_across_the_edge_of_top_k(decoder, target, monkeypatch):
    """The distance from the edge counts then; tokens that other options would keep are far from it."""
    rescoring, options = specinfer.evaluation.inspect.rescoring, {"temperature": 1.5, "top_k": 4}
    noisy = SpeculativeDecoder(like(target, noise=0.02), drafts=["ngram"])
    results = [decoder.generate(PROMPTS[0], max_new_tokens=24, seed=seed, **options) for seed in range(8)]
    with monkeypatch.context() as coarse:
        coarse.setitem(rescoring.ROUNDING, torch.float64, 0.3)
        found = [each for result in results for each in inspect(noisy, result, **options).differences]
        assert all(difference.gap < difference.explained < 2 for difference in found)
        coarse.setattr(rescoring, "_beyond_edge", lambda *_: (1.0, 0.0))
        with pytest.raises(InputError, match="by inf nats"):
            [inspect(noisy, result, **options) for result in results]
    with pytest.raises(InputError, match="by inf nats"):
        inspect(decoder, results[0], temperature=1.5, top_k=1)


# ---- coins ----


@pytest.mark.parametrize("drafts", [1, 2])
@pytest.mark.parametrize("replacement", [True, False])
def test_coins_are_those_that_were_tossed(target, near, monkeypatch, replacement, drafts):
    """Counted off again, every test that is known has the coin, and the ratio if it is known, of the run."""
    models = [near, like(target, noise=0.3, seed=2)][:drafts]
    policy = Sampled((4, 3), replacement=replacement)
    decoder = SpeculativeDecoder(target, drafts=models, tree=policy, verifier=MultiStep(replacement))
    tossed: dict[int, list[tuple[float, float]]] = {}
    accepts = RowView.accepts

    def watched(view, probability):
        result = accepts(view, probability)
        coin = specinfer.evaluation.inspect.rescoring.uniform(view.coins, view.tosses)
        tossed.setdefault(view.base, []).append((coin, probability))
        return result

    options = {"temperature": 0.7, "top_k": 6}  # few tokens, so that some are drawn again
    kinds = Counter()
    for seed in range(4):
        tossed.clear()
        with monkeypatch.context() as patch:
            patch.setattr(RowView, "accepts", watched)
            result = decoder.generate(PROMPTS[0], max_new_tokens=24, seed=seed, **options)
        inspection = inspect(decoder, result, **options)
        for step in inspection.steps:
            run = tossed.get(step.nodes[0].position + 1, [])
            known = [test for node in step.nodes for test in node.tests if test.coin is not None]
            assert len(known) <= len(run)
            for coin, ratio in known:
                probability = dict(run)[coin]
                assert ratio is None or ratio == pytest.approx(probability)
                kinds[ratio is None] += 1
            kinds["unknown"] += len(run) - len(known)
            for node in step.nodes:
                assert node.noise is node.margin is node.choice is None
                assert (node.state is State.REJECTED) <= bool(node.tests)
                assert step.why(node.node)
    assert kinds[True]
    assert kinds[False]
    assert drafts + replacement == 1 or kinds["unknown"]  # several draws of a token, of which one passed


def test_a_sampled_tree_grown_again_tells_every_ratio(target, near):
    """The same policy draws the same tree with its distributions, and comes to the same verdict by the same coins."""
    policy = Sampled((3, 2))
    decoder = SpeculativeDecoder(target, drafts=[near], tree=policy)
    options = {"temperature": 1.0, "top_k": 0}
    inspection = inspect(decoder, decoder.generate(PROMPTS[0], max_new_tokens=24, seed=3, **options), **options)
    for step in inspection.steps[:5]:
        again = step.with_policy(policy)
        assert again.tree.without_distributions() == step.tree
        assert again.verdict == step.verdict
        for own, other in zip(step.nodes, again.nodes, strict=True):
            assert [test.coin for test in own.tests] == pytest.approx([test.coin for test in other.tests])
            assert None not in [test.ratio for test in other.tests]
            assert own.state is other.state


# ---- trees changed by hand ----


def test_a_branch_of_the_targets_own_tokens_is_accepted(greedy, target):
    """Cut to nothing and given the right tokens, a step accepts them all; the originals stay what they were."""
    step = greedy.step(1)
    before = str(step)
    ids = PROMPTS[0] + [token for earlier in greedy.result.steps[:1] for token in earlier.tokens]
    right = plain(target, ids, 5)
    bare = step.with_budget(0)
    assert (bare.tree.num_drafted, bare.tokens) == (0, (right[0],))
    longer = bare.with_branch(0, right[:4])
    assert longer.tokens == tuple(right)
    assert [node.q for node in longer.nodes[1:]] == [None] * 4
    assert longer.drafted_by == (("by hand",),) * 4 + ((),)
    assert bare.compare(longer).endswith("+4 tokens")
    assert (str(step), bare.tree.num_drafted) == (before, 0)


def test_branches_share_what_is_there_already(greedy):
    """Only what is missing is added, below the node it continues."""
    step = next(step for step in greedy.steps if step.path)
    tokens = [int(step.tree.tokens[node]) for node in step.path]
    new = step.with_branch(0, [*tokens, step.bonus])
    assert new.tree.num_drafted == step.tree.num_drafted + 1 - (step.tree.child(step.path[-1], step.bonus) is not None)
    assert new.path[: len(step.path)] != ()
    assert len(new.path) > len(step.path)
    with pytest.raises(InputError, match="in the tree already"):
        step.with_branch(0, tokens)


def test_text_is_a_branch_too(greedy, tokenizer):
    """The tokenizer makes tokens of it."""
    paths = greedy.step(0).with_branch(0, "hi").tree.paths()
    assert "hi" in [tokenizer.decode(path) for path in paths]


def test_without_cuts_a_subtree_and_nothing_else(greedy):
    """What is left has the same paths, scores and proposers."""
    for step in greedy.steps[:4]:
        for node in range(1, len(step.tree)):
            smaller = step.without(node).tree
            stays = [i for i in range(len(step.tree)) if node not in step.tree.ancestors(i)]
            assert smaller.tokens.tolist() == step.tree.tokens[stays].tolist()
            assert smaller.scores.tolist() == step.tree.scores[stays].tolist()
            assert smaller.depths.tolist() == step.tree.depths[stays].tolist()


def test_without_an_accepted_node_the_path_ends_above_it(greedy):
    """The token is the target's own then: the text stays the same."""
    bare = greedy.step(1).with_budget(0)
    step = bare.with_branch(0, bare.tokens)
    shorter = step.without(step.path[0])
    assert (step.path, shorter.path) == ((1,), ())
    assert shorter.tokens == step.tokens[:1]
    assert step.compare(shorter).endswith("-1 tokens")


def test_a_budget_keeps_the_likeliest_paths(greedy):
    """As the policy would have cut it."""
    step = greedy.step(1)
    for nodes in range(step.tree.num_drafted + 1):
        assert step.with_budget(nodes).tree == step.tree.best(nodes, step.tree.scores)


def test_the_same_policy_grows_the_same_trees(case):
    """From a step's prefix, with its distribution and noise, drafts propose what they proposed."""
    _, _, inspection, _ = case
    for step in inspection.steps[:-1]:  # the last one could not be as deep
        again = step.with_policy(BestFirst(7, 4))
        assert again.tree == step.tree
        assert again.verdict == step.verdict
    assert inspection.steps[0].with_policy(Chain(2)).tree.depth == 2


def test_a_change_takes_one_pass_of_the_target(greedy, target):
    """The text before the step is read once."""
    step = greedy.step(2).with_budget(3)
    with counted(target) as calls:
        step.with_budget(2).with_branch(0, [1, 2, 3]).without(1)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda step: step.without(0), TreeError, "root"),
        (lambda step: step.without(99), TreeError, "there is no node 99"),
        (lambda step: step.with_branch(-1, [1]), TreeError, "there is no node -1"),
        (lambda step: step.with_branch(0, []), InputError, "at least one token"),
        (lambda step: step.with_branch(0, [9999]), InputError, "9999"),
        (lambda step: step.with_budget(-1), InputError, "budget of -1"),
        (lambda step: step.with_budget(99), InputError, "with_policy"),
        (lambda step: step.with_policy(Auto()), InputError, "clock"),
        (lambda step: step.with_policy("auto"), InputError, "clock"),
        (lambda step: step.with_policy(None), InputError, "fixed size"),
        (lambda step: step.why(1.5), TreeError, "there is no node 1.5"),
    ],
)
def test_impossible_changes_say_why(greedy, target, change, error, message):
    """Nothing is scored."""
    with counted(target) as calls, pytest.raises(error, match=message):
        change(greedy.step(1))
    assert calls == []


def test_steps_that_are_not_there_and_comparisons_across_steps_are_errors(greedy):
    """Both name the reason."""
    assert greedy.step(-1) is greedy.steps[-1]
    with pytest.raises(InputError, match="there is no step 99"):
        greedy.step(99)
    with pytest.raises(InputError, match="of one step"):
        greedy.step(0).compare(greedy.step(1))


def test_sampled_trees_are_not_edited_by_hand(target, near):
    """Each edit is refused, because the coins divide by distributions; growing another tree is not."""
    decoder = SpeculativeDecoder(target, drafts=[near], tree=Sampled((2, 1)))
    options = {"temperature": 1.0}
    step = inspect(decoder, decoder.generate(PROMPTS[0], max_new_tokens=8, seed=1, **options), **options).step(0)
    for edit in (lambda: step.without(1), lambda: step.with_branch(0, [1]), lambda: step.with_budget(1)):
        with pytest.raises(TreeError, match="biases the output"):
            edit()
    with pytest.raises(PairingError):
        step.with_policy(BestFirst(4, 2))
    assert isinstance(step.with_policy(Sampled((3,))), StepInspection)


def test_targets_that_score_chains_only_refuse_branches():
    """A tree that branches is not scored wrongly, it is not scored."""
    torch.manual_seed(0)
    config = MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=64)
    model = MptForCausalLM(config).double().eval()
    decoder = SpeculativeDecoder(model, drafts=[oracle(model)], tree=Chain(3))
    step = inspect(decoder, decoder.generate([5, 9, 17], max_new_tokens=12)).step(0)
    assert step.with_budget(1).with_branch(1, [3]).tree.depth == 2
    with pytest.raises(UnsupportedModel, match="chains only"):
        step.with_branch(0, [3 if step.tokens[0] != 3 else 4])


def test_inspections_tell_their_story_in_text(case):
    """One line a step; a tree with its verdict; a reason for every node."""
    _, result, inspection, _ = case
    assert len(str(inspection).splitlines()) == len(result.steps)
    for step in inspection.steps:
        assert f"step {step.number}, as decoded" in str(step)
        reasons = [step.why(node) for node in range(len(step.tree))]
        for node, reason in zip(step.nodes, reasons, strict=True):
            word = {"root": "last committed", "unreached": "not reached"}.get(node.state, str(node.state))
            assert word in reason
