"""EAGLE-style heads: drafting equals what training saw, ids do not depend on them, and whose they are."""

import copy
import gc
import json
import weakref
from contextlib import suppress
from functools import wraps

import pytest
import torch
from conftest import PROMPTS, VOCAB, byte_tokenizer, tiny_llama
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import DynamicCache

from specinfer import BestFirst, Chain, Expansion, ModelDraft, Sampled, SpeculativeDecoder
from specinfer.attention import TreeModel, TreeSession
from specinfer.drafts.head import HeadDraft, target_fingerprint
from specinfer.drafts.head_network import HeadNetwork
from specinfer.drafts.lookup.ngram import NGramDraft
from specinfer.drafts.published.layers import network_config
from specinfer.drafts.unrolled import chained_mask
from specinfer.errors import ModelError, TokenizerMismatch, UnsupportedModel

AUX_LAYERS = (1, 2)


def tiny_head(seed=0, ids=range(0, VOCAB, 2), **options):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    rest = {
        "max_position_embeddings": 256,
        "vocab_size": len(ids),
        "rms_norm_eps": 1e-6,
        "aux_layers": list(AUX_LAYERS),
    }
    config = network_config(**{**sizes, "num_hidden_layers": 1, **rest, **options})
    return HeadNetwork(config, torch.tensor(list(ids))).double()


def draft_for(target, name="head", **options):
    return HeadDraft(tiny_head(**options), target_fingerprint(target, byte_tokenizer()), name)


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


def states_of(target, ids):
    """The target's aux_states states that chose each token: zeros for the first, (1, n, K, H)."""
    with torch.no_grad():
        hidden = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
    chosen = torch.stack([hidden[layer] for layer in AUX_LAYERS], 2)
    return torch.cat([torch.zeros_like(chosen[:, :1]), chosen[:, :-1]], 1)


def unrolled(head, ids, states, steps):
    """Logits of successive training steps, each (1, n, V')."""
    columns, cache, own, found = torch.arange(len(ids)), DynamicCache(), None, []
    with torch.no_grad():
        for step in range(steps):
            mask = chained_mask(columns, step)[None, None]
            given = {"target_states": states} if own is None else {"draft_states": own}
            output = head(torch.tensor([ids]), mask, columns[None], cache, **given)
            found.append(output.logits)
            own = functional.pad(output.hidden_states[0][:, :-1], (0, 0, 1, 0))
    return found


def test_drafting_along_the_text_equals_the_successive_training_steps(target):
    """A tree's edge at depth d is what training step d computed with the path as the text."""
    draft = draft_for(target, ids=range(VOCAB))
    decoder = SpeculativeDecoder(target, None, [draft], Expansion((2, 1, 1)))
    head, checked = decoder.drafts[0].model.model, 0
    for run in (decoder.open(prompt, max_new_tokens=9) for prompt in PROMPTS):
        for ((row, step),) in run:
            ids = row.ids[: len(row.ids) - len(step.tokens)]
            for node in range(1, len(step.tree)):
                text = [*ids, *step.tree.path(node)]
                depth = int(step.tree.depths[node])
                logits = unrolled(head, text, states_of(target, text), depth)[-1][0, -2].log_softmax(-1)
                parent = int(step.tree.parents[node])
                edge = float(step.tree.scores[node] - step.tree.scores[parent])
                assert edge == pytest.approx(float(logits[text[-1]]), abs=1e-5)
                checked += 1
    assert checked > 50


def test_a_head_reads_tokens_that_it_does_not_propose(target):
    """Committed tokens beyond the size of its vocabulary are fed as they are."""
    decoder, fed = SpeculativeDecoder(target, None, [draft_for(target, ids=range(100))], Chain(1)), []
    head = decoder.drafts[0].model.model
    head.register_forward_pre_hook(lambda _, __, inputs: fed.extend(inputs["input_ids"][0].tolist()), with_kwargs=True)
    decoder.generate([250, 3, 200], max_new_tokens=2)
    assert fed[:3] == [250, 3, 200]


@pytest.mark.parametrize("tree", [BestFirst(12, 4), Expansion((3, 2)), Chain(4), "auto"], ids=str)
@pytest.mark.parametrize("temperature", [0, 1])
def test_ids_do_not_depend_on_heads(target, tree, temperature):
    options = {"max_new_tokens": 24, "temperature": temperature, "seed": [3, 4, 5, 6]}
    wanted = SpeculativeDecoder(target, None, [], None).generate(PROMPTS, **options)
    drafts = [draft_for(target, "a"), draft_for(target, "b", seed=1), NGramDraft()]
    found = SpeculativeDecoder(target, None, drafts, tree).generate(PROMPTS, **options)
    assert [row.token_ids for row in found] == [row.token_ids for row in wanted]


def test_sampled_trees_draw_tokens_of_the_heads_vocabulary(target):
    run = SpeculativeDecoder(target, None, [draft_for(target)], Sampled((3, 2))).generate([5, 6], seed=1, temperature=1)
    drawn = {int(token) for step in run.steps for token in step.tree.tokens[1:]}
    assert drawn
    assert all(token % 2 == 0 for token in drawn)


@pytest.mark.parametrize("before", [[], [[5, 6, 7]]], ids=["alone", "in a batch"])
def test_a_window_leaves_out_what_is_far(target, before):
    """Only tokens that are nearer than the window change what a head says."""
    window, ids, states = 4, list(range(10, 22)), torch.rand(12, len(AUX_LAYERS), 32, dtype=torch.double)
    model = draft_for(target, sliding_window=window).attach(TreeModel(target), byte_tokenizer()).model

    def logits(changed):
        session, fed = model.session(1 + len(before), 40), [*ids]
        fed[changed] = 99
        given = [*(states[: len(row)] for row in before), states]
        found = session.append(session.chains([*before, fed]), target_states=torch.cat(given))
        return found.row(len(before))

    for changed in range(1, 6):
        differ = (logits(changed) != logits(0)).any(-1).nonzero()[:, 0].tolist()
        assert max(differ) == changed + window - 1


def test_saved_and_loaded_heads_draft_alike(target, tmp_path):
    draft = draft_for(target, sliding_window=9)
    draft.save(tmp_path / "head")
    loaded = HeadDraft.load(tmp_path / "head")
    assert (loaded.name, loaded.aux_layers, loaded.fingerprint) == (draft.name, AUX_LAYERS, draft.fingerprint)
    assert loaded.head.config.sliding_window == 9
    for name, weight in draft.head.state_dict().items():
        wanted = weight.to(torch.bfloat16) if weight.is_floating_point() else weight
        assert torch.equal(loaded.head.state_dict()[name].double(), wanted.double())


def test_sharpness_is_kept_and_checked(target, tmp_path):
    """What was saved is loaded; heads of before have 1; what is no factor is refused."""
    draft = draft_for(target)
    draft.inverse_temperature = 1.3
    draft.save(tmp_path)
    assert HeadDraft.load(tmp_path).inverse_temperature == 1.3
    record = json.loads((tmp_path / "config.json").read_text())
    for value in (0, -1, float("nan"), float("inf")):
        (tmp_path / "config.json").write_text(json.dumps({**record, "inverse_temperature": value}))
        with pytest.raises(ModelError, match="inverse_temperature"):
            HeadDraft.load(tmp_path)
    del record["inverse_temperature"]
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert HeadDraft.load(tmp_path).inverse_temperature == 1


def test_decoders_of_one_target_share_a_bound_head(target):
    """Compiled passes are the head's while its modules are; weights may be replaced."""
    draft = draft_for(target)
    head = draft.attach(TreeModel(target), byte_tokenizer()).model.model
    output, rows = head.output, head.output.weight
    for again in (draft, SpeculativeDecoder(target, None, [draft]).drafts[0]):
        (own,) = SpeculativeDecoder(target, None, [again]).drafts
        assert own.model.model is head
    assert head.output is output
    assert head.output.weight is not rows
    assert torch.equal(head.output.weight, rows)


def test_a_bound_head_shares_the_weights_of_the_callers_which_stays_as_it_was(target):
    draft = draft_for(target)
    before = {name: (value, value.clone()) for name, value in draft.head.state_dict(keep_vars=True).items()}
    given = dict(vars(draft))
    same, other = (SpeculativeDecoder(own, None, [draft]).drafts[0] for own in (target, copy.deepcopy(target).float()))
    assert vars(draft) == given
    assert draft.head.output is None
    assert draft.head.embedding is None
    now = draft.head.state_dict(keep_vars=True)
    assert list(now) == list(before)
    assert all(now[name] is old and torch.equal(old, value) for name, (old, value) in before.items())
    assert same.model.model.mix.weight is draft.head.mix.weight
    assert other.model.model.mix.weight.dtype == torch.float32


def test_one_head_in_two_decoders_of_other_precision_drafts_for_both(target):
    """Ids are those of no speculation, and trees those of a head of its own; the outer matrices differ, too."""
    small = copy.deepcopy(target).float()
    small.lm_head.weight.data = small.lm_head.weight.data.roll(1, 0)
    shared, both = draft_for(target), (target, small)

    def run(decoder):
        results = decoder.generate(PROMPTS, max_new_tokens=24, temperature=0)
        return [(row.token_ids, [step.tree.tokens.tolist() for step in row.steps]) for row in results]

    def decoder(model, draft):
        return SpeculativeDecoder(model, None, [draft], BestFirst(12, 4))

    alone = [run(decoder(model, draft_for(target))) for model in both]
    made = [decoder(model, shared) for model in both]
    assert [run(own) for own in made] == alone
    for model, rows in zip(both, alone, strict=True):
        plain = SpeculativeDecoder(model, None, (), None).generate(PROMPTS, max_new_tokens=24, temperature=0)
        assert [ids for ids, _ in rows] == [row.token_ids for row in plain]


def test_a_head_that_is_trained_on_is_bound_anew(target):
    """Weights of another precision are no views of it."""
    small, draft = copy.deepcopy(target).float(), draft_for(target)
    SpeculativeDecoder(small, None, [draft])
    with torch.no_grad():
        draft.head.mix.weight.mul_(2)
    (own,) = SpeculativeDecoder(small, None, [draft]).drafts
    assert torch.equal(own.model.model.mix.weight, draft.head.mix.weight.float())


def test_bound_heads_go_with_their_target_or_head():
    targets = [tiny_llama(), tiny_llama()]
    drafts = [*map(draft_for, targets)]
    bound = [weakref.ref(d.attach(TreeModel(own)).model.model) for d, own in zip(drafts, targets, strict=True)]
    del targets[0], drafts[1]
    gc.collect()
    assert [ref() for ref in bound] == [None, None]


def test_a_model_as_a_draft_may_serve_decoders_that_run_it_differently(target):
    """What a decoder's passes run on is its own, and the caller's object is not touched."""
    draft = ModelDraft(tiny_llama(1))
    given = dict(vars(draft))
    made = [SpeculativeDecoder(target, None, [draft], compile=way) for way in ("auto", False)]
    models = [draft.model, *(own.drafts[0].model for own in made)]
    assert len({id(model) for model in models}) == 3
    assert len({id(model.model) for model in models}) == 1
    assert vars(draft) == given


def test_a_long_prompt_is_read_in_prefill_passes(target, monkeypatch):
    """They are not passes over trees, and no longer than others; what is drafted stays the same."""
    draft, prompts = draft_for(target, ids=range(VOCAB)), [list(range(1, 60)), [3, 1, 4]]
    options = {"max_new_tokens": 9, "temperature": 0}
    decoder = SpeculativeDecoder(target, None, [draft], Chain(3))
    runs, read, prefill = [], [], TreeSession.prefill

    def noted(self, tokens, **inputs):
        read.extend(
            (len(own), len(states)) for own, states in zip(tokens, inputs.get("target_states", ()), strict=False)
        )
        return prefill(self, tokens, **inputs)

    monkeypatch.setattr(TreeSession, "prefill", noted)
    for chunk, catch_up in ((512, 10**6), (16, 32)):
        monkeypatch.setattr("specinfer.attention.model.PREFILL_CHUNK", chunk)
        monkeypatch.setattr("specinfer.drafts.rows.CATCH_UP", catch_up)
        runs.append(decoder.generate(prompts, **options))
    trees = [[step.tree.tokens.tolist() for row in run for step in row.steps] for run in runs]
    assert trees[0] == trees[1]
    assert read == [(58, 58), (2, 2)]  # all but the roots, in the second run alone
    at_once, apart = (run[0].stats for run in runs)
    assert at_once.draft_passes == apart.draft_passes
    assert apart.drafts[0].passes == at_once.drafts[0].passes


@pytest.mark.parametrize("field", ["tokenizer", "layers", "sketch", "short"])
def test_a_fingerprint_that_is_none_is_named(target, tmp_path, field):
    """Before it is compared with a target's."""
    draft_for(target).save(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    if field == "short":
        record["fingerprint"]["sketch"] = "0.5 1"
    else:
        del record["fingerprint"][field]
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(ModelError, match="sketch" if field == "short" else field):
        HeadDraft.load(tmp_path)


@pytest.mark.parametrize("damage", ["nothing", "config", "weights", "other"])
def test_a_folder_that_holds_no_head_is_named(target, tmp_path, damage):
    folder = tmp_path / "head"
    draft_for(target).save(folder)
    if damage == "nothing":
        folder = tmp_path / "none"
    elif damage == "config":
        (folder / "config.json").write_text("{")
    elif damage == "weights":
        (folder / "model.safetensors").write_bytes(b"short")
    else:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match=str(folder)):
        HeadDraft.load(folder)


BAD = [None, "x", [], {}, [[1]], -1, 0, 0.5, 10**9, 10**30, float("nan"), float("inf"), True]


@pytest.mark.parametrize("group", [None, "head", "fingerprint"])
def test_a_damaged_configuration_is_one_line(target, tmp_path, group):
    """Whatever stands in the place of a value; and nothing of a wrong size is made."""
    draft_for(target).save(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    for name, value in (record[group] if group else record).items():
        for bad in [*BAD, "nothing"]:
            other = copy.deepcopy(record)
            own = other[group] if group else other
            own[name] = bad
            if bad == "nothing":
                del own[name]
            (tmp_path / "config.json").write_text(json.dumps(other))
            fine = {
                "name": ("x",),
                "inverse_temperature": ("nothing", 0.5, 10**9, 10**30, True),
                "rms_norm_eps": (0.5,),
                "sliding_window": (None, "nothing"),
            }
            if bad == value or bad in fine.get(name, ()) or group == "fingerprint":
                with suppress(ModelError):  # or another target's, or as good as the old one
                    HeadDraft.load(tmp_path).attach(TreeModel(target), byte_tokenizer())
                continue
            with pytest.raises(ModelError, match=str(tmp_path)) as caught:
                HeadDraft.load(tmp_path)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["uncached", "shorter", "longer", "no number", "more"])
def test_a_damaged_head_is_one_line(target, tmp_path, damage):
    """Every tensor that it lacks, that has another shape, or that holds no numbers."""
    draft_for(target).save(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    for name, weight in whole.items():
        left = {
            "uncached": {},
            "shorter": {name: weight[:-1].clone()},
            "longer": {name: torch.cat([weight, weight[-1:]])},
            "no number": {name: weight.float() * torch.nan},
            "more": {name: weight, f"{name}.more": weight.clone()},
        }[damage]
        save_file({n: w for n, w in whole.items() if n != name} | left, path)
        with pytest.raises(ModelError, match=str(tmp_path)) as caught:
            HeadDraft.load(tmp_path)
        assert "\n" not in str(caught.value)


def test_two_precisions_of_one_target_take_the_same_head(target):
    """Coarse weights, as a quantised file has them, are near enough."""
    coarse = copy.deepcopy(target)
    with torch.no_grad():
        for weight in coarse.parameters():
            scale = weight.abs().max() / 8
            weight.copy_((weight / scale).round() * scale)
    for version in (coarse, copy.deepcopy(target).to(torch.bfloat16)):
        SpeculativeDecoder(version, byte_tokenizer(), [draft_for(target)])


def test_heads_of_other_targets_are_refused_before_anything_runs(target):
    draft = draft_for(target)
    with pytest.raises(ModelError, match="other weights"):
        SpeculativeDecoder(tiny_llama(seed=7), byte_tokenizer(), [draft])
    with pytest.raises(ModelError, match="layers 2, not 3"):
        SpeculativeDecoder(tiny_llama(num_hidden_layers=3), byte_tokenizer(), [draft])
    with pytest.raises(TokenizerMismatch, match="other tokens"):
        SpeculativeDecoder(target, byte_tokenizer(eos_token="<end>"), [draft])


def test_a_target_that_hides_its_states_is_named(target, monkeypatch):
    forward = target.forward

    @wraps(forward)
    def silent(*args, output_hidden_states=False, **options):
        return forward(*args, **options)

    monkeypatch.setattr(target, "forward", silent)
    with pytest.raises(UnsupportedModel, match="hands out no hidden states"):
        SpeculativeDecoder(target, None, [draft_for(target)], Chain(2)).generate([5, 9, 6], max_new_tokens=4)


def test_a_head_alone_cannot_draft(target):
    with pytest.raises(ModelError, match="attach"):
        draft_for(target).open(None)
