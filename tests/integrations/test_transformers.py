"""`custom_generate` inside `model.generate`: the same greedy ids, left padding, processors, outputs, refusals."""

import runpy
from pathlib import Path

import pytest
import torch
from conftest import EOS_TEXT, PROMPTS, byte_tokenizer, counted, following, tiny_llama
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaForCausalLM,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
    TextStreamer,
)

import specinfer
from specinfer import BestFirst, Chain, Expansion, Sampled, SpeculativeDecoder
from specinfer.attention.forward import cache_name
from specinfer.errors import InputError, SamplingError, UnsupportedModel
from specinfer.integrations.transformers import SpeculativeOutput, custom_generate

PAD = 1
CACHE = cache_name(LlamaForCausalLM.forward)


def padded(prompts):
    """Left-padded ids and attention mask, as a tokenizer makes them."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def both(target, inputs, ours=None, **options):
    """What transformers generates by itself, and through the plug-in."""
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": PAD, **options}
    wanted = target.generate(**inputs, **options)
    return wanted, target.generate(**inputs, **options, custom_generate=specinfer.custom_generate, **(ours or {}))


@pytest.mark.parametrize("policy", [BestFirst(8, 4), Expansion((2, 2)), Chain(3), None])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["single", "left-padded"])
def test_greedy_sequences_are_those_of_generate(target, near, prompts, policy):
    """Single prompts and left-padded batches, with a model, the n-gram draft, or both."""
    for draft in (near, "ngram", [near, "ngram"]):
        wanted, got = both(target, padded(prompts), {"draft_model": draft, "tree": policy})
        assert torch.equal(got, wanted)


def test_rows_that_end_early_are_padded_as_by_generate(target, near):
    """After a row's end of sequence the pad token fills it up."""
    inputs = padded(PROMPTS)
    text = target.generate(**inputs, max_new_tokens=16, do_sample=False, pad_token_id=PAD)
    ends = [int(text[0, inputs["input_ids"].shape[1] + 3]), int(text[2, inputs["input_ids"].shape[1] + 8])]
    wanted, got = both(target, inputs, {"draft_model": near}, eos_token_id=ends)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.5},
        {"bad_words_ids": [[7], [31, 2]]},
        {"min_new_tokens": 6, "eos_token_id": list(range(0, 264, 3))},
        {"suppress_tokens": [7, 9]},
        {"max_length": 20, "max_new_tokens": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("prompts", [PROMPTS[2:3], PROMPTS], ids=["single", "left-padded"])
def test_options_of_generate_act_through_the_plug_in(target, near, prompts, options):
    """Processors that transformers built see each node's own path, padding included."""
    wanted, got = both(target, padded(prompts), {"draft_model": near}, **options)
    assert torch.equal(got, wanted)


def test_custom_processors_and_criteria_act_through_the_plug_in(target, near):
    """The caller's own processor and stop strings."""
    tokenizer = byte_tokenizer()
    prompt = list(b"say ")
    force = following(tokenizer("so then END or not")["input_ids"], len(prompt))
    wanted, got = both(
        target,
        padded([prompt]),
        {"draft_model": near},
        logits_processor=LogitsProcessorList([force]),
        stopping_criteria=StoppingCriteriaList([StopStringCriteria(tokenizer, ["END"])]),
    )
    assert torch.equal(got, wanted)
    assert tokenizer.decode(got[0]).endswith("END")


def test_return_dict_brings_sequences_and_results(target, near):
    """`return_dict_in_generate` gives transformers' own kind of output, with a Result a row."""
    wanted, got = both(target, padded(PROMPTS), {"draft_model": near}, return_dict_in_generate=True)
    assert isinstance(got, SpeculativeOutput)
    assert torch.equal(got.sequences, wanted.sequences)
    assert [result.prompt_ids for result in got.results] == PROMPTS
    assert all(result.stats.target_passes <= 16 for result in got.results)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5, "repetition_penalty": 1.2}])
def test_sampling_is_the_decoders_own(target, near, options):
    """The same seed gives the ids that the decoder gives, with and without trees."""
    generate = {"max_new_tokens": 12, "do_sample": True, **options}
    decoder = SpeculativeDecoder(target, tree=None)
    for policy in (BestFirst(8, 4), None):
        got = target.generate(
            **padded(PROMPTS[2:3]),
            **generate,
            pad_token_id=PAD,
            custom_generate=specinfer.custom_generate,
            draft_model=near,
            tree=policy,
            seed=7,
        )
        wanted = decoder.generate(PROMPTS[2], seed=7, **generate)
        assert got[0, len(PROMPTS[2]) :].tolist() == wanted.token_ids


def test_sampled_rows_do_not_depend_on_padding(target, near):
    """A row of a left-padded batch with its own seed is the row alone."""
    options = {"do_sample": True, "max_new_tokens": 8, "pad_token_id": PAD}
    options |= {"custom_generate": specinfer.custom_generate, "draft_model": near}
    batch = target.generate(**padded(PROMPTS), **options, seed=[1, 2, 3, 4])
    for i, prompt in enumerate(PROMPTS):
        alone = target.generate(**padded([prompt]), **options, seed=i + 1)
        assert batch[i, -8:].tolist() == alone[0, -8:].tolist()


def test_streamers_come_under_a_name_of_their_own(target, capsys):
    """`spec_streamer` prints the text as it is decided."""
    tokenizer = byte_tokenizer()
    force = following([*tokenizer("hello 🌳")["input_ids"], EOS_TEXT], 4)
    both(
        target,
        padded([list(b"say ")]),
        {"spec_streamer": TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)},
        logits_processor=LogitsProcessorList([force]),
        eos_token_id=EOS_TEXT,
    )
    assert capsys.readouterr().out.strip() == "hello 🌳"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_beams": 2}, SamplingError, "num_beams=2"),
        ({"top_p": 1.5, "do_sample": True}, SamplingError, "top_p=1.5"),
        ({"max_new_tokens": 500}, InputError, "context of 256"),
        ({"cache_implementation": "static"}, SamplingError, "cache_implementation"),
        ({"seed": [1, 2]}, InputError, "seed"),
        ({"output_scores": True, "return_dict_in_generate": True}, SamplingError, "output_scores"),
    ],
    ids=str,
)
def test_what_trees_cannot_do_is_refused(target, options, error, message):
    """transformers would accept some of these silently; here they are errors."""
    options = {"max_new_tokens": 4, "pad_token_id": PAD, **options}
    with pytest.raises(error, match=message):
        target.generate(**padded(PROMPTS[:1]), **options, custom_generate=specinfer.custom_generate)


def test_right_padding_is_refused(target):
    """Padding on the right would stand between prompt and text."""
    inputs = {"input_ids": torch.tensor([[5, 6, PAD]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    with pytest.raises(InputError, match=r"row 0.*left"):
        both(target, inputs)
    ids, mask = torch.tensor([[5, 6], [7, 8]]), torch.tensor([[1, 1], [0, 0]])
    with pytest.raises(InputError, match="row 1 is empty"):
        both(target, {"input_ids": ids, "attention_mask": mask})


def test_sampled_trees_work_through_the_plug_in(target, near):
    """Multi-step sampling, greedy here, gives the ids of generate."""
    wanted, got = both(target, padded(PROMPTS), {"draft_model": near, "tree": Sampled((2, 2))})
    assert torch.equal(got, wanted)


def test_models_are_restored(near):
    """generate leaves the training flags as they were."""
    model = tiny_llama(0).train()
    model.generate(**padded(PROMPTS[:1]), max_new_tokens=4, custom_generate=specinfer.custom_generate, draft_model=near)
    assert model.training


def test_a_prefix_constraint_knows_its_row(target):
    """`prefix_allowed_tokens_fn` is asked with the number of the row, in a batch too."""
    ids = torch.tensor([[5, 9, 7], [8, 6, 4]])
    allowed = {"prefix_allowed_tokens_fn": lambda row, _: [10 + row]}
    options = {"max_new_tokens": 3, "do_sample": False, "custom_generate": custom_generate, **allowed}
    assert target.generate(ids, **options)[:, 3:].tolist() == [[10] * 3, [11] * 3]


def test_inputs_that_would_be_dropped_are_refused(target):
    """A filled cache given from outside is an error, not silently another text."""
    cache = DynamicCache()
    with torch.no_grad():
        target(torch.tensor([[5, 9]]), **{CACHE: cache})
    ids = torch.tensor([[5, 9, 7]])
    with pytest.raises(InputError, match=CACHE):
        target.generate(ids, **{CACHE: cache}, max_new_tokens=3, custom_generate=custom_generate)


# ---- what transformers does not pass on, and what it prepares ----


def test_streamer_and_assistant_model_act_as_in_generate(target, near, capsys):
    """transformers keeps both from a custom loop; the streamer has the prompt once, and the draft drafts."""
    tokenizer = byte_tokenizer()
    force = following([*tokenizer("hello 🌳")["input_ids"], EOS_TEXT], 4)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": PAD, "eos_token_id": EOS_TEXT}
    with counted(near) as passes:
        target.generate(
            **padded([list(b"say ")]),
            **options,
            logits_processor=LogitsProcessorList([force]),
            assistant_model=near,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            custom_generate=specinfer.custom_generate,
        )
    assert capsys.readouterr().out.strip() == "hello 🌳"
    assert passes


class Listener:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.heard, self.ended = [], 0

    def put(self, tokens):
        """Keep tokens."""
        self.heard += tokens.flatten().tolist()

    def end(self):
        """Count the end."""
        self.ended += 1


@pytest.mark.parametrize("name", ["streamer", "spec_streamer"])
@pytest.mark.parametrize("wrap", [False, True])
def test_a_streamer_hears_prompt_and_text_once(target, name, wrap):
    """By transformers' name and by ours, also where the loop is wrapped in a function."""
    listener, options = Listener(), {"max_new_tokens": 6, "do_sample": False}

    def wrapped(*given, spec_streamer=None, **named):
        return custom_generate(*given, spec_streamer=spec_streamer, **named)

    loop = wrapped if wrap else custom_generate
    got = target.generate(**padded(PROMPTS[:1]), **options, **{name: listener}, custom_generate=loop)
    assert (listener.heard, listener.ended) == (got[0].tolist(), 1)


@pytest.mark.parametrize(
    ("twice", "message"),
    [
        (("draft_model", "assistant_model"), "draft_model and assistant_model"),
        (("spec_streamer", "streamer"), "spec_streamer and streamer"),
    ],
)
def test_the_same_thing_given_twice_is_refused(target, near, twice, message):
    """A draft by both names, a streamer by both names."""
    given = dict.fromkeys(twice, near if "draft_model" in twice else Listener())
    with pytest.raises(InputError, match=message):
        target.generate(**padded(PROMPTS[:1]), max_new_tokens=2, **given, custom_generate=custom_generate)


def test_a_streamer_takes_one_row(target):
    """Two rows cannot share one."""
    with pytest.raises(InputError, match="one prompt"):
        target.generate(**padded(PROMPTS[:2]), max_new_tokens=2, streamer=Listener(), custom_generate=custom_generate)


def tiny(name):
    """A random model of a family that takes token types."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES[name], "vocab_size": 96, "is_decoder": True})
    return AutoModelForCausalLM.from_config(config).double().eval()


SIZES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64, "rotary_dim": 4},
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("kind", [0, 1])
def test_token_types_are_refused_unless_they_change_nothing(name, kind):
    """GPT-2 and its kin add an embedding for every type, BERT for absent ones that of 0."""
    model = tiny(name)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 5, 6]]), "token_type_ids": torch.full((1, 5), kind)}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    if name == "bert" and not kind:
        wanted = model.generate(**inputs, **options)
        assert torch.equal(model.generate(**inputs, **options, custom_generate=custom_generate), wanted)
    else:
        with pytest.raises(InputError, match="token_type_ids"):
            model.generate(**inputs, **options, custom_generate=custom_generate)


def test_positions_are_taken_where_they_are_the_usual_ones(target, near):
    """Counted from 0 over the attention mask; others are refused, by name."""
    inputs = padded(PROMPTS)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    wanted, got = both(target, {**inputs, "position_ids": positions}, {"draft_model": near})
    assert torch.equal(got, wanted)
    with pytest.raises(InputError, match="position_ids"):
        target.generate(**inputs, position_ids=positions + 3, max_new_tokens=2, custom_generate=custom_generate)


def test_a_recurrent_model_that_cannot_continue_is_told_so():
    """Not about the cache that transformers prepared for it."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 96}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes)).eval()
    with pytest.raises(UnsupportedModel, match="by one token only"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, custom_generate=custom_generate)


def test_what_a_configuration_merely_carries_refuses_no_call():
    """XGLM carries an encoder-decoder's default; a caller who names one is told."""
    sizes = {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "vocab_size": 96}
    torch.manual_seed(0)
    config = AutoConfig.for_model("xglm", **sizes, max_position_embeddings=64)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert model.generation_config.decoder_start_token_id is not None
    wanted, got = both(model, {"input_ids": torch.tensor([[5, 6, 7]])}, eos_token_id=None)
    assert torch.equal(got, wanted)
    with pytest.raises(SamplingError, match="decoder_start_token_id"):
        both(model, {"input_ids": torch.tensor([[5, 6, 7]])}, decoder_start_token_id=7)


def test_no_end_of_sequence_is_none(near):
    """None said to `generate` is meant, and not filled in from the checkpoint."""
    model = tiny_llama(0)
    text = model.generate(**padded(PROMPTS[:1]), max_new_tokens=8, do_sample=False, pad_token_id=PAD)
    model.generation_config.eos_token_id = int(text[0, len(PROMPTS[0]) + 3])
    wanted, got = both(model, padded(PROMPTS[:1]), {"draft_model": near}, eos_token_id=None)
    assert torch.equal(got, wanted)


def test_the_hubs_form_calls_the_same(target, near):
    """`custom_generate/generate.py`, called as transformers calls what it loads from a repository."""
    file = Path(__file__).parents[2] / "custom_generate" / "generate.py"
    if not file.exists():
        pytest.skip("the repository is not beside the tests (an installed wheel)")
    generate = runpy.run_path(str(file))["generate"]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}
    given = {"generation_config": None, "streamer": None, "assistant_model": near, "tree": Chain(2)}
    with counted(near) as passes:
        got = generate(model=target, **padded(PROMPTS), **options, **given)
    assert torch.equal(got, target.generate(**padded(PROMPTS), **options))
    assert passes
