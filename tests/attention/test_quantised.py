"""Quantised, adapted and otherwise changed targets: exact with and without speculation, or refused with the reason."""

import pytest
import torch
from conftest import PROMPTS, gap_at_difference, tiny_llama
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from specinfer import BestFirst, SpeculativeDecoder, check_model
from specinfer.attention import Support
from specinfer.errors import UnsupportedModel

ao = pytest.importorskip("torchao.quantization", reason="an extra")
peft = pytest.importorskip("peft", reason="an extra")
pytest.importorskip("bitsandbytes", reason="an extra")

NEW = 16


def base(dtype=torch.float32):
    return tiny_llama(hidden_size=64, intermediate_size=128).to(dtype)


def torchao(config):
    model = base()
    ao.quantize_(model, config)
    return model


def bitsandbytes(folder, **options):
    base().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**options), dtype=torch.float32
    ).eval()


def adapter():
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)


def adapted():
    """A model with two adapters, of which the first is active."""
    model = base()
    for number, name in enumerate(("first", "second")):
        torch.manual_seed(number)
        model.add_adapter(adapter(), adapter_name=name)
    model.set_adapter("first")
    return model.eval()


def compiled_forward():
    model = base()
    model.forward = torch.compile(model.forward, dynamic=True, backend="eager")
    return model


FOUR_BITS = {"weight_dtype": torch.int4}
EXACT = {
    "torchao, int8 weights": lambda folder: torchao(ao.Int8WeightOnlyConfig()),
    "torchao, int4 weights": lambda folder: torchao(ao.IntxWeightOnlyConfig(**FOUR_BITS, granularity=ao.PerGroup(32))),
    "torchao, int4 weights, int8 states by token": lambda folder: torchao(
        ao.Int8DynamicActivationIntxWeightConfig(**FOUR_BITS, weight_granularity=ao.PerGroup(32))
    ),
    "torchao, float8 weights": lambda folder: torchao(ao.Float8WeightOnlyConfig()),
    "bitsandbytes, 4 bits": lambda folder: bitsandbytes(
        folder, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
    "adapters": lambda folder: adapted(),
    "adapters of peft, unwrapped": lambda folder: peft.get_peft_model(base(), adapter()).eval().get_base_model(),
    "a compiled forward": lambda folder: compiled_forward(),
}
REFUSED = {  # and words of the reason
    "torchao, int8 states and weights": (
        lambda folder: torchao(ao.Int8DynamicActivationInt8WeightConfig()),
        "even a chain is off",
    ),
    "bitsandbytes, 8 bits": (lambda folder: bitsandbytes(folder, load_in_8bit=True), "later tokens or other rows"),
    "torch, dynamic": (
        lambda folder: torch.ao.quantization.quantize_dynamic(base(), {torch.nn.Linear}, torch.qint8),
        "later tokens or other rows",
    ),
    "a wrapper of peft": (lambda folder: peft.get_peft_model(base(), adapter()).eval(), "get_base_model"),
    "a wrapper of torch.compile": (lambda folder: torch.compile(base()), "_orig_mod"),
}


@torch._dynamo.config.patch(recompile_limit=2)  # of each function: other shapes run as they are
@pytest.mark.parametrize("kind", EXACT)
def test_ids_do_not_depend_on_speculation(kind, tmp_path):
    model = EXACT[kind](tmp_path)
    assert check_model(model).support is Support.EXACT
    drafted = SpeculativeDecoder(model, None, ["ngram", "recycling"], BestFirst(7, 4), compile=False)
    plain = SpeculativeDecoder(model, None, [], None, compile=False)
    accepted = 0
    for temperature in (0, 1):
        options = {"max_new_tokens": NEW, "temperature": temperature, "seed": 1}
        wanted = [plain.generate(prompt, **options).token_ids for prompt in PROMPTS]
        found = [drafted.generate(prompt, **options) for prompt in PROMPTS]
        assert [result.token_ids for result in found] == wanted
        assert [result.token_ids for result in drafted.generate(PROMPTS, **options)] == wanted
        accepted += sum(len(step.path) for result in found for step in result.steps)
    assert accepted


def test_float16_is_exact_up_to_near_ties():
    """Where processors multiply in float16, a logit's last bits depend on how many tokens share a pass."""
    model = base(torch.float16)
    assert check_model(model).support is Support.EXACT
    drafted = SpeculativeDecoder(model, None, ["ngram", "recycling"], BestFirst(7, 4), compile=False)
    plain = SpeculativeDecoder(model, None, [], None, compile=False)
    for prompt in PROMPTS:
        wanted, found = (
            decoder.generate(prompt, max_new_tokens=NEW, temperature=0).token_ids for decoder in (plain, drafted)
        )
        assert gap_at_difference(model, prompt, wanted, found) < 0.01


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_exact_is_refused_with_the_reason(kind, tmp_path):
    make, words = REFUSED[kind]
    model = make(tmp_path)
    with pytest.raises(UnsupportedModel, match=words):
        SpeculativeDecoder(model, None, ["ngram"], BestFirst(7, 4), compile=False).generate(PROMPTS[0])


def test_adapters_that_are_switched_between_calls_are_seen():
    """By the same decoder; and so is that none is active."""
    model, texts = adapted(), {}
    made = SpeculativeDecoder(model, None, ["ngram", "recycling"], BestFirst(7, 4), compile=False)
    plain = SpeculativeDecoder(model, None, [], None, compile=False)

    def check(name):
        options = {"max_new_tokens": NEW, "temperature": 0}
        texts.setdefault(name, made.generate(PROMPTS[0], **options).token_ids)
        assert texts[name] == made.generate(PROMPTS[0], **options).token_ids
        assert texts[name] == plain.generate(PROMPTS[0], **options).token_ids

    for name in ("first", "second", "first"):
        model.set_adapter(name)
        check(name)
    model.disable_adapters()
    check("none")
    assert len({*map(tuple, texts.values())}) == 3
