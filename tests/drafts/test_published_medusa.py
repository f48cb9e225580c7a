"""Medusa heads: what their files mean, in plain torch, and what a decoder does with them."""

import json
from itertools import islice
from random import Random

import pytest
import torch
from conftest import PROMPTS, VOCAB, counted, tiny_llama
from safetensors.torch import save_file
from torch.nn import functional

from specinfer import Auto, BestFirst, Chain, Expansion, Sampled, SpeculativeDecoder
from specinfer.attention import TreeModel
from specinfer.drafts.published import medusa
from specinfer.drafts.published.checkpoint import Checkpoint
from specinfer.drafts.published.conventions import Convention, write_text
from specinfer.drafts.published.formats import PublishedDraft, load_published
from specinfer.engine.draft import DraftContext
from specinfer.engine.processors import Processors
from specinfer.errors import ModelError

SIZE = 32  # of the tiny target's states
LAST = Convention((2,))  # the tiny target has two layers


def random_weights(seed=0, heads=3, layers=1, size=SIZE, vocab=VOCAB):
    """The weights of a published file."""
    chance = torch.Generator().manual_seed(seed)
    weights = {}
    for head in range(heads):
        for layer in range(layers):
            weights[f"{head}.{layer}.linear.weight"] = torch.randn(size, size, generator=chance) / size**0.5
            weights[f"{head}.{layer}.linear.bias"] = torch.randn(size, generator=chance)
        weights[f"{head}.{layers}.weight"] = torch.randn(vocab, size, generator=chance) / size**0.5
    return weights


def write(folder, weights, file="medusa_lm_head.safetensors", prefix="", **config):
    """Write a checkpoint as it is published, with the wrong number of heads in its configuration."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1, **config}))
    weights = {prefix + name: weight for name, weight in weights.items()}
    if file.endswith(".safetensors"):
        save_file(weights, folder / file)
    else:
        torch.save(weights, folder / file)
    return Checkpoint.find(folder)


def draft_of(checkpoint, convention=LAST):
    return PublishedDraft("medusa", *medusa.load(checkpoint), convention=convention)


def by_formula(weights, head, layers, state):
    """W (h + silu(linear h)), in plain torch."""
    for layer in range(layers):
        matrix, bias = weights[f"{head}.{layer}.linear.weight"], weights[f"{head}.{layer}.linear.bias"]
        state = state + functional.silu(matrix @ state + bias)
    return weights[f"{head}.{layers}.weight"] @ state


def check_tree(tree, state, weights, layers):
    """Compare the score of each edge with the formula."""
    for node in range(1, len(tree)):
        depth, parent = int(tree.depths[node]), int(tree.parents[node])
        wanted = by_formula(weights, depth - 1, layers, state).log_softmax(-1)[int(tree.tokens[node])]
        assert float(tree.scores[node] - tree.scores[parent]) == pytest.approx(float(wanted), abs=1e-5)
    return len(tree) - 1


@pytest.mark.parametrize("seed", range(20))
def test_random_checkpoints_agree_with_the_formula_at_every_node(seed, tmp_path):
    """Rows of different lengths, two steps with a commit between, a row retired; other drafts read other layers."""
    chance = Random(seed)
    heads, layers, size = chance.randint(1, 6), chance.randint(0, 2), chance.choice([8, 24])
    file = chance.choice(["medusa_lm_head.pt", "medusa_lm_head.safetensors", "model.safetensors"])
    weights = random_weights(seed, heads, layers, size, vocab=50)
    network, session = medusa.load(write(tmp_path / "head", weights, file, chance.choice(["", "medusa_head."])))
    states = [torch.randn(n, 2, size) for n in (4, 1, 7)]
    context = DraftContext(
        *([[1, 2, 3, 4, 5], [6, 7], [8] * 8], 64, 64, 50, 0, Processors([]), [0] * 3), aux_layers=(1, 4), states=states
    )
    opened = session(network, (4,), context)
    with torch.inference_mode():
        trees = opened.propose(Expansion((3, 2, 2)), [5, 7, 8], 8)
        assert [int(tree.depths.max()) for tree in trees] == [min(3, heads)] * 3
        checked = sum(check_tree(tree, s[-1, 1], weights, layers) for tree, s in zip(trees, states, strict=True))
        new = [torch.randn(2, 2, size), None, torch.randn(1, 2, size)]
        opened.commit([[9, 10], None, [11]], new)
        trees = opened.propose(BestFirst(12, 4), [10, 11], 8)
        assert [int(tree.tokens[0]) for tree in trees] == [10, 11]
        left = [states for states in new if states is not None]
        checked += sum(check_tree(tree, s[-1, 1], weights, layers) for tree, s in zip(trees, left, strict=True))
    assert checked >= 3 * 3 + 2 * 12


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return draft_of(write(tmp_path_factory.mktemp("medusa") / "head", random_weights(heads=4)))


@pytest.mark.parametrize("tree", [BestFirst(12, 4), Expansion((2, 2, 1)), Chain(6), "auto"], ids=str)
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["ragged", "one"])
@pytest.mark.parametrize("drafts", [[], ["ngram"]], ids=["alone", "merged"])
def test_ids_do_not_depend_on_the_heads(target, head, tree, temperature, prompts, drafts):
    options = {"max_new_tokens": 16, "temperature": temperature, "seed": list(range(len(prompts)))}
    wanted = SpeculativeDecoder(target, None, [], None).generate(prompts, **options)
    found = SpeculativeDecoder(target, None, [head, *drafts], tree).generate(prompts, **options)
    assert [row.token_ids for row in found] == [row.token_ids for row in wanted]


def test_a_prompt_of_one_token_has_no_state_and_no_tree(target, head):
    """Alone or in a batch; from the second step on it has both."""
    for prompts, rows in (([[40]], [0]), (PROMPTS, [1])):
        run = SpeculativeDecoder(target, None, [head], BestFirst(8, 3)).open(prompts, max_new_tokens=12)
        first, second = islice(run, 2)
        for index in range(len(prompts)):
            assert first[index][1].tree.num_drafted == (0 if index in rows else 8)
        assert [step.tree.num_drafted for _, step in second] == [8] * len(prompts)


def test_the_heads_run_once_a_step_and_only_if_asked(target, head):
    attached = head.attach(TreeModel(target))
    decoder = SpeculativeDecoder(target, None, [attached], BestFirst(8, 3))
    with counted() as calls:
        hook = decoder.drafts[0].model.register_forward_pre_hook(lambda module, _: calls.append(module))
        result = decoder.generate(PROMPTS[0], max_new_tokens=8)
        hook.remove()
    assert len(calls) == len(result.steps) - (result.steps[-1].tree.num_drafted == 0)
    idle = Auto()
    idle.asked = 0
    session = attached.open(
        DraftContext([[1, 2]], 8, 8, VOCAB, 0, Processors([]), [0], aux_layers=(2,), states=[torch.randn(1, 1, SIZE)])
    )
    assert session.propose(idle, [2], 4)[0].num_drafted == 0
    assert session.passes == 0


def test_sampled_trees_keep_what_they_were_drawn_from(target, head):
    run = SpeculativeDecoder(target, None, [head], Sampled((3, 2))).generate([5, 6], seed=1, temperature=1)
    trees = [step.tree for step in run.steps if step.tree.num_drafted]
    assert trees
    for tree in trees:
        assert all(float(q.sum()) == pytest.approx(1) for q in tree.distributions.values())


def test_networks_and_passes_name_what_runs_passes_only(target, head):
    decoder = SpeculativeDecoder(target, None, [head])
    assert [model.name for model in decoder.networks] == ["LlamaForCausalLM"]
    assert decoder.passes.startswith("passes: plain")


def fitted(target, heads=2):
    """Heads that learnt the target's own text by least squares, without residual blocks."""
    model = TreeModel(target)
    text = write_text(model, None, [2])
    weights = {}
    for head in range(heads):
        pairs = [
            (states[i, 0], ids[i + 2 + head])
            for ids, states in zip(text.ids, text.states, strict=True)
            for i in range(len(states) - 1 - head)
        ]
        given = torch.stack([state for state, _ in pairs])
        wanted = functional.one_hot(torch.tensor([token for _, token in pairs]), VOCAB).double()
        weights[f"{head}.0.weight"] = torch.linalg.lstsq(given, wanted).solution.T.contiguous()
    return weights


def test_heads_that_fit_are_measured_and_pay(target, tmp_path):
    draft = draft_of(write(tmp_path / "head", fitted(target)), convention=None)
    decoder = SpeculativeDecoder(target, None, [draft], BestFirst(8, 4))
    ((convention, rates),) = decoder.drafts[0].agreements
    assert convention == "states 2"
    assert rates[0] > 0.5
    result = decoder.generate([1], max_new_tokens=24)
    assert len(result.steps) < 20


def test_random_heads_are_refused_with_numbers(target, tmp_path):
    draft = draft_of(write(tmp_path / "head", random_weights()), convention=None)
    with pytest.raises(ModelError, match=r"^draft medusa does not fit this target: .* 0 %") as error:
        SpeculativeDecoder(target, None, [draft])
    assert "\n" not in str(error.value)


def test_a_folder_is_loaded_as_what_it_is(target, tmp_path):
    weights = random_weights(heads=5)
    for number, file in enumerate(("medusa_lm_head.pt", "model.safetensors")):
        folder = tmp_path / f"medusa-{number}"
        write(folder, weights, file, "medusa_head.")
        draft = load_published(folder, LAST)
        assert (draft.name, type(draft.network), len(draft.network.heads)) == (folder.name, medusa.MedusaNetwork, 5)
        assert SpeculativeDecoder(target, None, [draft]).generate([1, 2], max_new_tokens=4).stats.drafts


@pytest.mark.parametrize(
    ("config", "recognised"),
    [
        ({"medusa_num_heads": 2}, True),
        ({"model_type": "medusa"}, True),
        ({"architectures": ["MedusaModel"]}, True),
        ({"model_type": "llama"}, False),
    ],
)
def test_what_is_recognised(config, recognised, tmp_path):
    assert medusa.recognises(Checkpoint("x", tmp_path, config)) is recognised


def without(name):
    return lambda weights: weights.pop(name)


BAD = {
    "a missing bias": (without("1.0.linear.bias"), r"1 missing \(heads.1.0.linear.bias\)"),
    "a missing head": (lambda w: [w.pop(k) for k in list(w) if k[0] == "1"], "3 missing"),
    "an unknown name": (lambda w: w.update({"x.weight": torch.ones(1)}), r"1 unknown \(heads.x.weight\)"),
    "a gated block": (lambda w: w.update({"0.0.gate.weight": torch.ones(1)}), "unknown"),
    "another shape": (lambda w: w.update({"2.0.linear.bias": torch.ones(3)}), r"is \(3,\) and should be \(32,\)"),
    "not a number": (lambda w: w["0.1.weight"].fill_(torch.nan), "numbers that are not finite"),
    "no head": (lambda w: [w.pop(k) for k in list(w) if k[:2] != "0."] + [w.pop("0.1.weight")], "it has no head"),
    "nothing": (lambda w: (w.clear(), w.update(other=torch.ones(1))), "it has no head"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_weights_are_one_line(name, tmp_path):
    spoil, said = BAD[name]
    weights = random_weights()
    spoil(weights)
    with pytest.raises(ModelError, match=said) as error:
        medusa.load(write(tmp_path / "head", weights))
    assert "\n" not in str(error.value)
    assert "head" in str(error.value)


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return print, ("unpickled",)


def test_damaged_files_and_pickles_with_code_are_one_line(tmp_path, capsys):
    cut, code = tmp_path / "cut", tmp_path / "code"
    write(cut, random_weights())
    file = cut / "medusa_lm_head.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    write(code, {"0.0.weight": Trap()}, "medusa_lm_head.pt")
    for folder in (cut, code):
        with pytest.raises(ModelError, match="cannot read the weights in") as error:
            medusa.load(Checkpoint.find(folder))
        assert "\n" not in str(error.value)
    assert "unpickled" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes", "said"),
    [({"size": 16}, "hidden_size 16, not 32"), ({"vocab": 99}, "vocab_size 99, not 264")],
)
def test_heads_of_another_target_are_refused(target, sizes, said, tmp_path):
    draft = draft_of(write(tmp_path / "head", random_weights(**sizes)))
    with pytest.raises(ModelError, match=said):
        SpeculativeDecoder(target, None, [draft])
