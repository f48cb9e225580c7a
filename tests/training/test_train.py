"""Training drafts: losses against autograd, successive steps, boost weights, checkpoints, a loss that is no number."""

import errno
import os
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, byte_tokenizer, tiny_llama
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    PhiConfig,
)

from specinfer.drafts.head import HeadDraft
from specinfer.drafts.unrolled import chained_mask
from specinfer.errors import InputError, NumericalError, SpecinferError, UnsupportedModel
from specinfer.training import Recipe, distill, losses, optimise, train
from specinfer.training.data import Batch, Texts
from specinfer.training.job import TrainingJob, TrainingSettings
from specinfer.training.logits import check_logits
from specinfer.training.losses import SoftCrossEntropy
from specinfer.training.recorded_text import TrainingPrompt
from specinfer.training.train import train_causal_lm, train_head

AUX_LAYERS = (1, 2)
SETTINGS = TrainingSettings(
    epochs=2.0, tokens_per_batch=128, vocabulary=64, held_out=0.1, checkpoint_every=4, learning_rate=5e-3, unroll=2
)


@pytest.fixture(scope="module")
def target():
    return tiny_llama(spread=0.5).float()


@pytest.fixture(scope="module")
def shards(target, tmp_path_factory):
    """Texts that the target writes greedily, with the states that chose each token."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, VOCAB, (40, 4), generator=generator)
    ids = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=20, do_sample=False)
    with torch.no_grad():
        hidden = target(ids, output_hidden_states=True).hidden_states
    states = torch.stack([hidden[layer] for layer in AUX_LAYERS], 2)
    states = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
    rows, length = ids.shape
    columns = {"ids": ids.flatten().int(), "states": states.flatten(0, 1).contiguous()}
    lengths = {"lengths": torch.full((rows,), length), "prompt_lengths": torch.full((rows,), 4)}
    path = tmp_path_factory.mktemp("text") / "00000.safetensors"
    save_file(columns | lengths, path)
    return [path]


def trained(target, shards, out, settings=SETTINGS, earlier=(), start=None, progress=lambda *_: None):
    job = TrainingJob(out, "head", settings, AUX_LAYERS, earlier, start)
    return train_head(target, byte_tokenizer(), shards, job, progress)


@pytest.fixture(scope="module")
def learnt(target, shards, tmp_path_factory):
    """A head that has learnt: its folder, figures, and what was told of its progress."""
    seen, folder = [], tmp_path_factory.mktemp("heads") / "1"
    settings = replace(SETTINGS, epochs=12.0)
    return folder, trained(target, shards, folder, settings, progress=lambda *told: seen.append(told)), seen


def test_the_gradient_made_on_the_way_forward_is_autograds():
    torch.manual_seed(0)
    logits, weights = torch.randn(5, 9, requires_grad=True), torch.rand(5)
    distribution = torch.randn(5, 9).softmax(-1)
    (SoftCrossEntropy.apply(logits, distribution) * weights).sum().backward()
    found, logits.grad = logits.grad, None
    loss = -(distribution * logits.log_softmax(-1)).sum(-1)
    (loss * weights).sum().backward()
    torch.testing.assert_close(found, logits.grad)
    torch.testing.assert_close(SoftCrossEntropy.apply(logits, distribution), loss)


# ---- the target's own logits ----

SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": None, "eos_token_id": None}
TARGETS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.5, initializer_range=0.5),
    "granite": lambda: GraniteConfig(**SIZES, logits_scaling=8.0, initializer_range=0.5),
    "cohere": lambda: CohereConfig(**SIZES, logit_scale=0.25, initializer_range=0.5),
    "phi": lambda: PhiConfig(**SIZES),  # its output has a bias
    "gpt2": lambda: GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "opt": lambda: OPTConfig(
        vocab_size=40, hidden_size=16, word_embed_proj_dim=16, ffn_dim=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64,
    ),
}  # fmt: skip


@cache
def target_of(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TARGETS[family]()).eval()
    if family == "phi":
        torch.nn.init.normal_(model.lm_head.bias)
    return model


def written(model):
    """A batch of what the model reads, states as recorded, and its own logits (N, V) of the tokens to learn."""
    ids = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    states = torch.stack([output.hidden_states[layer] for layer in AUX_LAYERS], 2)
    states = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
    return Batch(ids, states, torch.ones(2, 8, dtype=torch.bool)), output.logits[:, :-1].flatten(0, 1)


@pytest.mark.parametrize("family", TARGETS)
def test_heads_learn_from_the_targets_own_logits(family):
    """Capped, scaled, with a bias, as its forward makes them."""
    model = target_of(family)
    batch, logits = written(model)
    check_logits(model)
    token_ids = torch.arange(3, 40, 2)
    head = train.new_head(model, AUX_LAYERS, 1, token_ids).bind(model)
    loss = losses.HeadLoss(head, model, SETTINGS)
    _, distribution = loss.goal(batch.ids[:, 1:].flatten(), batch.states[:, 1:, -1].flatten(0, 1))
    torch.testing.assert_close(distribution, logits[:, token_ids].softmax(-1))
    assert not distribution.requires_grad


@pytest.mark.parametrize("family", TARGETS)
def test_a_small_language_model_learns_from_the_targets_own_logits(family):
    """And with its own: one that is the target has the loss of the target's own distribution."""
    model = target_of(family)
    batch, logits = written(model)
    keep = torch.ones(16)
    loss, hits = losses.CausalLMLoss(model, model, SETTINGS)(batch.ids, batch.states, batch.learn, keep)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(loss, entropy)
    assert hits[0].sum() == (logits.topk(5).indices == batch.ids[:, 1:].flatten()[:, None]).sum()


def test_targets_whose_logits_do_not_follow_from_their_states_are_refused(monkeypatch):
    """Their drafts would learn another distribution."""
    forward = LlamaForCausalLM.forward

    @wraps(forward)
    def shifted(self, input_ids, *more, **options):
        output = forward(self, input_ids, *more, **options)
        output.logits = output.logits + input_ids[..., None]
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", shifted)
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM: its logits cannot be worked out"):
        check_logits(target_of("llama"))


def test_a_later_draft_step_sees_older_target_states_and_its_own_path():
    """Step 2 at token 3: the target-fed tokens 0 and 1, step 1's own at 2, step 2's own at 3."""
    row = chained_mask(torch.arange(4), 2)[3].view(3, 4).int().tolist()
    assert row == [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_training_learns_and_says_how_well(learnt):
    folder, figures, seen = learnt
    assert [done for _, done, _, _ in seen] == list(range(1, figures["steps"] + 1))
    assert len(figures["hits"]) == SETTINGS.unroll
    for rates in figures["hits"]:
        assert rates == sorted(rates)
    first, last = figures["history"][0], figures["history"][-1]
    assert last["loss"] < 0.8 * first["loss"]  # 80 held-out tokens tell little from chance
    assert 0 < figures["coverage"] <= 1
    draft = HeadDraft.load(folder)
    assert len(draft.head.token_ids) == SETTINGS.vocabulary


def test_a_killed_training_goes_on_and_ends_as_if_it_had_not_been(target, shards, tmp_path):
    whole = trained(target, shards, tmp_path / "whole")

    def kill(stage, done, *_):
        if done == 6:  # two steps after a checkpoint
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(target, shards, tmp_path / "killed", progress=kill)
    again = []
    figures = trained(target, shards, tmp_path / "killed", progress=lambda _, done, *__: again.append(done))
    assert again[0] == 5
    assert figures["history"] == whole["history"]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed")]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name])


def test_training_by_the_clock_plans_its_steps_by_the_rate_of_the_first_ten(target, shards, tmp_path, monkeypatch):
    """Nine of them in a second, a held-out batch for every 12, and 10 seconds left.  What goes on keeps the plan."""
    clock = iter(range(10**6))
    monkeypatch.setattr(optimise, "perf_counter", lambda: float(next(clock)))
    settings, totals = replace(SETTINGS, minutes=0.2, checkpoint_every=12), []

    def watch(_, done, total, __):
        totals.append(total)
        if done == 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(target, shards, tmp_path / "1", settings, progress=watch)
    planned = 10 + round(10 / ((1 + 1 / 12) / 9))
    assert totals[9:] == [planned] * 4
    figures = trained(target, shards, tmp_path / "1", settings)
    assert (figures["steps"], figures["history"][-1]["step"]) == (planned, planned)


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_checkpoint(target, shards, tmp_path, monkeypatch):
    steps = []
    boost_weights = losses.boost_weights

    def poisoned(*arguments):
        steps.append(arguments)
        return boost_weights(*arguments) * (float("nan") if len(steps) == 7 else 1)

    monkeypatch.setattr(optimise, "boost_weights", poisoned)
    with pytest.raises(NumericalError, match=r"step 7.*smaller learning rate"):
        trained(target, shards, tmp_path / "1")
    kept = load_file(tmp_path / "1.checkpoint.safetensors")
    assert all(torch.isfinite(weight).all() for weight in kept.values())
    assert not (tmp_path / "1").exists()


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("moment", ["checkpoint", "end"])
def test_a_full_disk_is_one_error_and_training_goes_on_from_the_last_checkpoint(
    target, shards, tmp_path, monkeypatch, moment
):
    with monkeypatch.context() as patched:
        replace_file = os.replace

        def full(fresh, path):
            if Path(path).name == ("1.checkpoint.safetensors" if moment == "checkpoint" else "model.safetensors"):
                full_disk()
            replace_file(fresh, path)

        patched.setattr(os, "replace", full)
        with pytest.raises(SpecinferError, match="disk is full"):
            trained(target, shards, tmp_path / "1")
    again = []
    trained(target, shards, tmp_path / "1", progress=lambda _, done, *__: again.append(done))
    assert again[:1] == ([1] if moment == "checkpoint" else [])


def test_tokens_that_an_earlier_draft_proposes_first_weigh_less(target, shards, learnt, tmp_path):
    folder, *_ = learnt
    texts = Texts(shards, SETTINGS.held_out)
    batch = texts.load(texts.train)
    head = HeadDraft.load(folder).head.to(target.dtype).bind(target)
    weights = losses.boost_weights([head], batch, SETTINGS.boost)
    _, hits = losses.HeadLoss(head, target, SETTINGS)(*batch, torch.ones_like(weights))
    assert 0 < int(hits[0, 0]) == int((weights != 1).sum()) < len(weights)
    assert set(weights[weights != 1].tolist()) == {torch.tensor(SETTINGS.boost).item()}
    second = trained(target, shards, tmp_path / "2", earlier=[folder])
    assert second["steps"] > 0


@pytest.mark.parametrize(("long", "window"), [(0, 256), (2, 256), (4, 512)])
def test_a_head_attends_as_far_as_nine_in_ten_texts_reach(target, shards, tmp_path, monkeypatch, long, window):
    texts = Texts(shards)
    texts.train = [text._replace(length=300 if number < long else 40) for number, text in enumerate(texts.train * 30)][
        :30
    ]
    assert texts.window == window
    monkeypatch.setattr(Texts, "window", 512)
    trained(target, shards, tmp_path / "1")
    assert HeadDraft.load(tmp_path / "1").head.config.sliding_window == 512


@pytest.mark.parametrize("rows", [0, 1])
def test_too_few_texts_are_refused(shards, tmp_path, rows):
    """One is held out, so one alone leaves nothing to train on."""
    whole = load_file(shards[0])
    tokens = int(whole["lengths"][:rows].sum())
    per_text, per_token = ("lengths", "prompt_lengths"), ("ids", "states")
    few = {n: whole[n][:rows] for n in per_text} | {n: whole[n][:tokens] for n in per_token}
    save_file(few, tmp_path / "few.safetensors")
    with pytest.raises(InputError, match="at least 2"):
        Texts([tmp_path / "few.safetensors"])


def test_the_inverse_temperature_makes_up_for_flat_distributions(target, shards, tmp_path, monkeypatch):
    """1 where the head knows the target's distribution; as much as its logits are smaller, where they are."""
    trained(target, shards, tmp_path / "1")
    draft = HeadDraft.load(tmp_path / "1")
    assert draft.inverse_temperature in train.INVERSE_TEMPERATURES
    head, texts = draft.head.to(target.dtype).bind(target), Texts(shards, 0.5)
    for flatness in (1, 1.4):
        monkeypatch.setattr(
            train,
            "first_logits",
            lambda own, batch, flatness=flatness: own.logits(batch.states[:, 1:, -1][batch.learn]) / flatness,
        )
        assert train.fit_inverse_temperature(losses.HeadLoss(head, target, SETTINGS), texts) == pytest.approx(
            flatness, abs=0.11
        )


def test_a_deeper_draft_starts_as_the_earlier_one(target, shards, tmp_path):
    trained(target, shards, tmp_path / "1")
    earlier = HeadDraft.load(tmp_path / "1").head.to(target.dtype).bind(target)
    deeper = train.new_head(target, earlier.config.aux_layers, 2, earlier.token_ids, [tmp_path / "1"])
    deeper = deeper.to(target.dtype).bind(target)
    batch = (texts := Texts(shards, SETTINGS.held_out)).load(texts.train)
    weights = torch.ones(int(batch.learn.sum()))
    both = [losses.HeadLoss(head, target, SETTINGS)(*batch, weights)[0] for head in (earlier, deeper)]
    assert torch.allclose(*both)


def test_a_head_that_is_trained_on_ends_half_way(target, shards, tmp_path, monkeypatch):
    """Its weights are the mean of those it had and of those at the end of the run; sizes and vocabulary stay."""
    evaluated, evaluate = [], optimise.evaluate

    def recorded(model, *rest):
        evaluated.append((model.head.mix.weight.detach().clone(), evaluate(model, *rest)))
        return evaluated[-1][1]

    monkeypatch.setattr(train, "evaluate", recorded)
    monkeypatch.setattr(optimise, "evaluate", recorded)
    trained(target, shards, tmp_path / "1", replace(SETTINGS, layers=2))
    figures = trained(target, shards, tmp_path / "more", replace(SETTINGS, vocabulary=8), start=tmp_path / "1")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("1", "more"))
    run = load_file(tmp_path / "more.checkpoint.safetensors")
    assert before.keys() == after.keys()
    for name in before.keys() - {"token_ids"}:
        mean = ((before[name] + run[f"model.head.{name}"]) / 2).bfloat16()
        torch.testing.assert_close(after[name], mean, rtol=0.01, atol=1e-3)
        assert not torch.equal(after[name], before[name])
    assert torch.equal(before["token_ids"], after["token_ids"])
    measured, rates = evaluated[-1]  # the rates told are those of the weights kept
    assert torch.equal(measured.bfloat16(), after["mix.weight"])
    assert figures["hits"] == rates


def mixed(family, **options):
    """A random model of four layers of several kinds."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(family, vocab_size=VOCAB, num_key_value_heads=2, **sizes, **special, **options)
    return AutoModelForCausalLM.from_config(config).eval()


def test_outer_layers_keep_which_of_them_rotate():
    """The fourth of SmolLM3's layers has no rotary positions, wherever it stands."""
    target = mixed("smollm3")
    assert target.config.no_rope_layers == [1, 1, 1, 0]
    assert train.outer_layers(target, 2).config.no_rope_layers == [1, 0]


def test_outer_layers_of_other_kinds_are_refused_before_text_is_made(tmp_path):
    """A dense first layer cannot be the place of a mixture of experts."""
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    target = mixed("qwen3_moe", decoder_sparse_step=2, **experts)
    assert len(train.outer_layers(target, 2).model.layers) == 2
    recipe = Recipe(1, "lm", training=replace(SETTINGS, layers=1))
    prompts = [TrainingPrompt("a", "file", 1), TrainingPrompt("b", "file", 2)]
    with pytest.raises(UnsupportedModel, match=r"layers of several kinds, and its layers \[3\] make no model of 1"):
        distill(target, byte_tokenizer(), prompts, tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


def test_a_small_language_model_is_the_targets_outer_layers_and_anybodys_to_load(shards, tmp_path):
    target = tiny_llama(spread=0.5, num_hidden_layers=4).float()
    cut = train.outer_layers(target, 2)
    for own, layer in zip(cut.model.layers, (target.model.layers[0], target.model.layers[3]), strict=True):
        for name, weight in own.state_dict().items():
            assert torch.equal(weight, layer.state_dict()[name])
    job = TrainingJob(tmp_path / "lm", "lm", replace(SETTINGS, layers=2), AUX_LAYERS)
    figures = train_causal_lm(target, byte_tokenizer(), shards, job, lambda *_: None)
    assert len(figures["hits"]) == 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "lm", dtype=torch.float32)
    assert torch.equal(model.get_input_embeddings().weight, target.get_input_embeddings().weight.bfloat16().float())
