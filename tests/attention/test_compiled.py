"""Compiled passes: they compute what the model does, are used only while they do, and nothing half-made is.

Few graphs are compiled, all tiny, each for many tests; ``pytest -m slow`` compiles every family of architectures.
"""

import copy
import gc
import json
import os
import shutil
import sys
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import EOS_TEXT, PROMPTS, VOCAB, byte_tokenizer, copied, tiny_llama
from test_families import EXACT, build
from test_heads import draft_for
from test_memory import in_memory
from torch import nn
from torch.nn.utils import parametrize
from typer.testing import CliRunner

import specinfer.attention.compiler.linear as linear
import specinfer.attention.compiler.making as making
import specinfer.attention.compiler.packages as packages
from specinfer import BestFirst, Chain, SpeculativeDecoder
from specinfer.attention import TreeCache, TreeModel, TreeSession, lay_out_chains, resumed, verdicts
from specinfer.attention.check import toy_tree
from specinfer.attention.compiler.linear import fits, forms, pack
from specinfer.attention.compiler.making import check, computing
from specinfer.attention.compiler.watch import architecture
from specinfer.attention.passes.compiled import RECORD, CompiledPass
from specinfer.attention.passes.graphs import GraphedPass
from specinfer.attention.passes.plain import TensorPass
from specinfer.attention.passes.registry import equip
from specinfer.cli import app
from specinfer.common.memory import LargePages
from specinfer.drafts.head import HeadDraft
from specinfer.drafts.online import Budget
from specinfer.errors import InputError, NotCompiled
from specinfer.results import Result

TREE = BestFirst(12, 4)
GREEDY = {"max_new_tokens": 12, "temperature": 0, "eos_token_id": EOS_TEXT}
SAMPLED = {"max_new_tokens": 12, "temperature": 1.0, "top_k": 0, "seed": 3}


def float_llama(seed: int = 0) -> Any:
    """As `tiny_llama`, in float32, where linear layers are packed."""
    return tiny_llama(seed).float()


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder with the packages of a tiny llama and of a head for it; CI's own, so that they are made once."""
    folder = Path(os.environ.get("SPECINFER_CACHE") or tmp_path_factory.mktemp("cache"))
    patch = pytest.MonkeyPatch()
    patch.setenv("SPECINFER_CACHE", str(folder))
    target = float_llama()
    made = SpeculativeDecoder(target, byte_tokenizer(), [draft_for(target)], TREE, compile=True)
    assert made.passes == "passes: compiled"
    yield folder
    patch.undo()


def decoder(model: Any, tree: Any = TREE, drafts: Any = None, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(model, byte_tokenizer(), ["ngram"] if drafts is None else drafts, tree, **options)


def ids(made: SpeculativeDecoder, prompt: Any = PROMPTS, **options: Any) -> Any:
    results = made.generate(prompt, **{**GREEDY, **options})
    return [r.token_ids for r in results] if isinstance(results, list) else results.token_ids


def compiled(model: Any) -> tuple[SpeculativeDecoder, CompiledPass]:
    made = decoder(model)
    assert made.target.ways.fast is not None, made.passes
    return made, made.target.ways.fast


def test_what_is_compiled_is_found_and_said() -> None:
    result = decoder(float_llama(7)).generate(PROMPTS[0], **GREEDY)  # other weights of the same architecture
    assert "passes: compiled" in result.stats.notes
    plain = decoder(float_llama(), compile=False)
    assert plain.target.ways.fast is None
    assert "not compiled, as asked" in plain.passes
    with pytest.raises(InputError, match="compile='yes'"):
        decoder(float_llama(), compile="yes")


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say what of a file is in memory")
def test_weights_that_were_packed_are_not_held_twice(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("target", "draft")]
    for seed, folder in enumerate(folders):
        float_llama(seed).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    for mode in ("auto", False):
        made = SpeculativeDecoder.from_pretrained(folders[0], [str(folders[1])], TREE, dtype="float32", compile=mode)
        held = [in_memory(folder / "model.safetensors") > 0 for folder in folders]
        assert held == [network.ways.fast is None for network in made.networks] == [not mode] * 2


@pytest.mark.parametrize("options", [GREEDY, SAMPLED])
@pytest.mark.parametrize("tree", [None, Chain(3), TREE])
def test_ids_are_those_of_the_plain_model(tree: Any, options: dict[str, Any]) -> None:
    """Ragged batches whose rows end at different steps, n-grams and a head."""
    model = float_llama()
    both = [decoder(model, tree, [draft_for(model), "ngram"], compile=mode) for mode in (False, "auto")]
    assert both[1].passes == "passes: compiled"
    plain, own = (ids(made, **options) for made in both)
    assert own == plain
    assert ids(both[1], PROMPTS[2], **options) == ids(both[0], PROMPTS[2], **options)


def test_a_package_is_compared_once_with_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(float_llama())
    for kept in Path(os.environ["SPECINFER_CACHE"]).glob("compiled/*/LlamaForCausalLM-*"):
        kept.unlink()  # of an earlier run
    compared: list[Any] = []
    monkeypatch.setattr(packages, "check", lambda model, passes: compared.append(check(model, passes)))
    compiled(float_llama())
    assert len(compared) == 1  # a small model takes no time, and its verdict is not kept
    monkeypatch.setattr(verdicts, "LEAST", 0)
    for seed, count in (0, 2), (0, 2), (1, 3), (0, 3), (1, 3):
        compiled(float_llama(seed))
        assert len(compared) == count
    monkeypatch.setattr(packages, "check", Mock(side_effect=NotCompiled("they are off")))
    for _ in range(2):  # what failed is not kept
        with pytest.raises(NotCompiled, match="they are off"):
            packages.offer(TreeModel(float_llama(2)), (), "auto")


def test_every_node_is_the_plain_models() -> None:
    model = TreeModel(float_llama())
    own = packages._usable(model, "packed", ())
    assert own is not None
    with resumed(model):
        assert check(model, own, range(1, 40)) < 1e-5


@pytest.mark.parametrize("words", [1, 31, 33, VOCAB, VOCAB + 1])
def test_logits_of_the_first_ids_are_those_of_all(words: int) -> None:
    model = compiled(float_llama())[0].target
    layout, found = lay_out_chains([[5, 6], [7]], model.device), []
    with resumed(model):
        for wanted in (None, words):
            session = model.session(2, 32)
            session.prefill([[1, 2, 3], [4]])
            found.append(session.append(layout, words=wanted).flat())
    assert found[1].shape[1] == min(words, VOCAB)
    assert torch.allclose(found[1], found[0][:, :words], atol=1e-6)


def test_drafts_multiply_in_8_bits_and_targets_never_do() -> None:
    """Where the machine is fast at that; their trees are nearly the plain ones, texts are the target's."""
    model = float_llama()
    made = decoder(model, TREE, [draft_for(model)])
    target, head = made.networks
    assert target.ways.fast.form == "packed"
    assert head.ways.fast.form == ("dynamic_int8" if fits(model.lm_head.weight, "dynamic_int8") else "rounded")
    kinds = {source.kind for runner in head.ways.fast.runners.values() for source in runner.sources}
    assert kinds & {"packed", "rounded", "dynamic_int8"} == {head.ways.fast.form}
    assert not {"rounded", "dynamic_int8"} & {
        source.kind for runner in target.ways.fast.runners.values() for source in runner.sources
    }
    with resumed(head):
        assert check(head, head.ways.fast) < 0.1


def test_a_machine_that_is_slow_in_8_bits_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {**torch.cpu.get_capabilities(), "avx512_vnni": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: slow)
    assert not fits(torch.zeros(4, 4), "dynamic_int8")
    weights = [weight for weight in float_llama().parameters() if weight.ndim == 2]
    assert "dynamic_int8" not in linear.forms(weights, True)


@pytest.fixture(scope="module")
def halved() -> SpeculativeDecoder:
    """A decoder whose target's weights are bfloat16 numbers in float32, with its passes."""
    return decoder(bfloat16_llama(), compile=True)


def bfloat16_llama(seed: int = 0) -> Any:
    return tiny_llama(seed).bfloat16().float()


def test_float32_weights_that_are_bfloat16_numbers_are_read_in_half_the_bytes(halved: SpeculativeDecoder) -> None:
    """Sums are those of float32, over any number of nodes, whatever part of a block the last outputs fill."""
    own = halved.target.ways.fast
    assert halved.target.ways.fast.form == "bf16"
    assert isinstance(own, CompiledPass)
    with resumed(halved.target):
        assert check(halved.target, own, [*range(1, 30), 95, 96, 97, 110, 200]) < 1e-5
    model = halved.target.model
    for options in (GREEDY, SAMPLED):
        assert ids(halved, **options) == ids(decoder(model, compile=False), **options)
    packed = [
        (tensor, source)
        for runner in own.runners.values()
        for tensor, source in zip(runner.weights, runner.sources, strict=True)
        if source.kind == "bf16"
    ]
    assert packed
    for tensor, source in packed:
        assert tensor.dtype == torch.bfloat16
        assert tensor.count_nonzero() == sum(model.get_parameter(name).count_nonzero() for name in source.names)


def windows(dtype: torch.dtype) -> Any:
    """A model with a mask for each kind of layer, and scaled embeddings."""
    return build("gemma3_text", torch.bfloat16, vocab_size=VOCAB, initializer_range=0.25).to(dtype)


@pytest.fixture(scope="module")
def widened() -> Iterator[SpeculativeDecoder]:
    """A decoder whose target is in bfloat16 and has passes in float32, as on a processor of AVX2 or AVX512 alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "is_x86", lambda: True)
        patch.setattr(linear, "_multiplies_pairs", lambda: False)
        yield decoder(windows(torch.bfloat16), compile=True)


def test_passes_of_a_bfloat16_model_compute_in_float32_from_its_own_weights(widened: SpeculativeDecoder) -> None:
    """Texts are those of the same weights in float32; the model stays as it is, and is not copied."""
    target = widened.target
    before = [(weight, weight.clone()) for weight in target.model.parameters()]
    assert widened.passes == "passes: compiled (float32)"
    for options in (GREEDY, SAMPLED):
        assert ids(widened, **options) == ids(decoder(windows(torch.float32), None, compile=False), **options)
    session = target.session(1, 8)
    with resumed(target):
        session.prefill([[1, 2, 3]])
        assert session.score([toy_tree([4, 5], [0])]).row(0).dtype == torch.float32
    assert session.cache.layers[0].keys.dtype == torch.float32
    assert all(weight.dtype == torch.bfloat16 and weight.equal(copied) for weight, copied in before)
    given = [tensor for runner in target.ways.fast.runners.values() for tensor in runner.weights]
    assert target.model.get_input_embeddings().weight.data_ptr() in [tensor.data_ptr() for tensor in given]
    assert max(tensor.numel() for tensor in given if tensor.dtype == torch.float32) <= target.model.config.hidden_size


def test_a_bfloat16_model_whose_weights_change_runs_in_float32_with_the_new_ones(widened: SpeculativeDecoder) -> None:
    model = widened.target.model
    weights = [model.model.norm.weight, model.model.layers[0].mlp.up_proj.weight, model.model.embed_tokens.weight]
    wanted = windows(torch.float32)
    others = [wanted.model.norm.weight, wanted.model.layers[0].mlp.up_proj.weight, wanted.model.embed_tokens.weight]
    before = ids(widened)
    with torch.no_grad():
        for weight in (*weights, *others):
            weight[:7] *= -2
    try:
        assert ids(widened) == ids(decoder(wanted, None, compile=False)) != before
        assert widened.passes == "passes: compiled (float32)"
    finally:
        with torch.no_grad():
            for weight in weights:
                weight[:7] *= -0.5


@pytest.fixture(scope="module")
def rounding() -> Iterator[SpeculativeDecoder]:
    """A decoder whose target is in bfloat16 and rounds its states, as on a processor with AVX512-BF16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "is_x86", lambda: True)
        patch.setattr(linear, "_multiplies_pairs", lambda: True)
        model = tiny_llama().bfloat16()
        equip(TreeModel(model), draft_for(model).aux_layers, True)  # of the target alone: heads run plain
        yield decoder(model, TREE, [draft_for(model), "ngram"])


def test_rounded_states_are_those_of_a_bfloat16_model(rounding: SpeculativeDecoder) -> None:
    """Logits are nearer to those in float32 than the plain model's; sums are float32, weights are read as they are."""
    target = rounding.target
    assert target.ways.fast.form == linear.ROUNDED_STATES
    assert "target compiled (bfloat16 products, float32 sums)" in rounding.passes
    kinds = {source.kind for runner in target.ways.fast.runners.values() for source in runner.sources}
    assert "bf16" in kinds
    prompt = [[*range(1, 40)]]
    found = []
    whole = TreeModel(bfloat16_llama())
    for model, own in ((whole, whole.ways.usual), (target, target.ways.fast), (target, target.ways.usual)):
        session = TreeSession(model, TreeCache(1, 64), (), own)
        with resumed(target):
            found.append(session.append(lay_out_chains(prompt, model.device)).padded().double())
    wanted, rounded, plain = found
    assert 1e-4 < (rounded - wanted).norm() / wanted.norm() < (plain - wanted).norm() / wanted.norm() < 0.1


@pytest.mark.parametrize("options", [GREEDY, SAMPLED])
def test_texts_with_rounded_states_do_not_depend_on_speculation(
    rounding: SpeculativeDecoder, options: dict[str, Any]
) -> None:
    model = rounding.target.model
    alone = [ids(decoder(model, None), prompt, **options) for prompt in PROMPTS]
    for tree in (TREE, Chain(3), "auto"):
        made = decoder(model, tree, [draft_for(model), "ngram"])
        assert "bfloat16 products" in made.passes
        assert ids(made, **options) == alone


def test_rounded_states_are_refused_if_logits_depend_on_what_else_a_pass_holds(rounding: SpeculativeDecoder) -> None:
    target = rounding.target
    own = target.ways.fast
    assert isinstance(own, CompiledPass)

    class Off(TensorPass):
        """The same passes, but logits depend on the number of nodes in their last bits."""

        aux_layers, dtype, packs, form = own.aux_layers, own.dtype, own.packs, own.form

        def run(self, model: Any, inputs: Any, *given: Any) -> Any:
            logits, *states = own.run(model, inputs, *given)
            return logits * (1 + 1e-6 * inputs["input_ids"].shape[1]), *states

    with resumed(target):
        assert check(target, own) < 0.1
        with pytest.raises(NotCompiled, match="depend on what else a pass holds"):
            check(target, Off())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "falcon rotary", "qwen3_moe"])
def test_states_are_not_rounded_beside_products_that_are_not_ours(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bits depend on how many nodes they multiply, perhaps on more than a comparison of a few nodes shows."""
    monkeypatch.setattr(making, "compile_package", Mock())
    model = TreeModel(build(name, torch.bfloat16))
    with pytest.raises(NotCompiled, match="may depend on what else"):
        making.make(computing(model, linear.ROUNDED_STATES), linear.ROUNDED_STATES, (), tmp_path, model.model)


@pytest.mark.parametrize("name", ["halved", "rounding"])
def test_a_node_gets_the_same_bits_in_every_pass(name: str, request: pytest.FixtureRequest) -> None:
    """In a tree, beside other rows, in a prompt, and token by token."""
    target = request.getfixturevalue(name).target
    prompt, tokens = [*range(3, 25)], [5, 9, 11, 2, 7]
    tree = toy_tree([5, 40, 9, 41, 11, 42, 43, 2, 44, 7], [0, 0, 2, 2, 4, 4, 4, 7, 7])
    path = [0, 2, 4, 7, 9]

    def logits(rows: list[list[int]], trees: list[Any], nodes: list[int]) -> Any:
        session = target.session(len(rows), 96)
        session.prefill(rows)
        return session.score([*trees]).row(0)[nodes]

    with resumed(target):
        alone = torch.stack(
            [logits([[*prompt, *tokens[:n]]], [toy_tree([token], [])], [0])[0] for n, token in enumerate(tokens)]
        )
        companions, others = [prompt[:3], [*range(60)]], [toy_tree([1, 2], [0]), toy_tree([3], [])]
        assert torch.equal(logits([prompt], [tree], path), alone)
        assert torch.equal(logits([prompt, *companions], [tree, *others], path), alone)
        chain = toy_tree(tokens, [*range(4)])
        assert torch.equal(logits([prompt], [chain], [*range(5)]), alone)


def test_packed_passes_compute_no_padding(halved: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and trees of different sizes are fed as so many tokens as they have, a prompt of none as none."""
    target, fed = halved.target, []
    assert isinstance(target.ways.fast, CompiledPass)
    assert target.ways.fast.packs
    (runner,) = target.ways.fast.runners.values()
    run = runner.run
    monkeypatch.setattr(runner, "run", lambda given: fed.append(tuple(given[0].shape)) or run(given))
    session = target.session(3, 96)
    with resumed(target):
        session.prefill([[*range(20)], [5], []])
        logits = session.score([toy_tree([5, 6, 7], [0, 1]), toy_tree([3], []), toy_tree([4, 8], [0])])
    assert fed == [(1, 21), (1, 6)]
    assert [len(row) for row in logits] == [3, 1, 2]


class Resting(BestFirst):
    """Best-first trees, but in two of three steps no draft is asked."""

    steps = 0

    @property
    def idle(self) -> bool:
        """Whether no draft is asked in the next step."""
        return Resting.steps % 3 > 0

    def fit(self, trees: Any) -> Any:
        """Count the step."""
        Resting.steps += 1
        return super().fit(trees)


def trees_by_length(result: Result) -> dict[int, list[int]]:
    """Return the tokens of the trees of a text that its end does not limit, by the tokens before them."""
    places = accumulate((len(step.tokens) for step in result.steps), initial=0)
    trees = {place: step.tree.tokens.tolist() for place, step in zip(places, result.steps, strict=False)}
    return {place: tree for place, tree in trees.items() if len(tree) > 1 and place + 4 < len(result.token_ids)}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("tree", [Resting(7, 3), BestFirst(7, 3), None])
def test_prompts_are_read_beside_the_rows_that_run(
    tree: BestFirst | None, temperature: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids are those of each row alone, and so are the trees of a head, which reads the states at all tokens."""
    target, together = float_llama() if tree else bfloat16_llama(), TreeSession.score
    drafts = [draft_for(target), "ngram"] if tree else []
    made = SpeculativeDecoder(target, byte_tokenizer(), drafts, tree, compile=True)
    read: list[int] = []
    count = lambda session, trees: any(session.unread) and read.append(len(trees))  # noqa: E731
    monkeypatch.setattr(TreeSession, "score", lambda self, trees: count(self, trees) or together(self, trees))
    lengths = [12 + n % 5 if n % 6 else 1 for n in range(1, 16)]  # some texts end in their first step
    prompts = [{"prompt": [*range(n, 2 * n)], "max_new_tokens": new, "seed": n} for n, new in enumerate(lengths, 1)]
    found = sorted(made.generate_many(prompts, temperature=temperature, max_rows=4))
    assert len(read) > 4
    assert max(read) == 4
    compared = 0
    for prompt, done in zip(prompts, found, strict=True):
        alone = made.generate(**prompt, temperature=temperature)
        assert done.result
        assert done.result.token_ids == alone.token_ids
        trees, wanted = trees_by_length(done.result), trees_by_length(alone)
        assert {n: tree for n, tree in trees.items() if n in wanted} == {n: wanted[n] for n in trees if n in wanted}
        compared += len(trees.keys() & wanted.keys())
    assert compared > 5 or not drafts


def test_a_copy_in_float32_must_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TreeModel(tiny_llama().bfloat16())
    assert computing(target, "packed") is target
    assert computing(target, "bf16").dtype == torch.float32
    monkeypatch.setattr("specinfer.attention.compiler.making.free_bytes", lambda: 1000.0)
    with pytest.raises(NotCompiled, match=r"compiling LlamaForCausalLM takes .* GB of memory"):
        computing(target, "bf16")


def test_train_mode_between_the_steps_of_a_stream_is_left_as_it_is(halved: SpeculativeDecoder) -> None:
    model = halved.target.model
    stream = halved.stream(PROMPTS[0], **GREEDY)
    next(stream)
    model.train()
    list(stream)
    found = model.training
    model.eval()
    assert found
    assert stream.result.token_ids == ids(decoder(model, compile=False), PROMPTS[0])


def test_weights_that_stop_being_bfloat16_numbers_are_not_rounded(halved: SpeculativeDecoder) -> None:
    model = bfloat16_llama(3)
    made = decoder(model)
    assert made.passes == "passes: compiled"
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[5, 7] += 1e-5
    assert ids(made) == ids(decoder(model, compile=False))
    assert "not all are bfloat16 numbers any more" in made.passes
    assert ids(decoder(float_llama(3))) == ids(decoder(float_llama(3), compile=False))  # these have another package


def test_forms_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.randn(40, 16)
    assert "bf16" not in forms([numbers], rounded=False)
    assert forms([numbers.bfloat16().float()], rounded=False) == ["bf16", "packed"]
    assert forms([numbers.bfloat16().float(), numbers], rounded=False) == ["packed"]
    assert forms([numbers], rounded=True)[-2:] == ["rounded", "packed"]
    assert forms([numbers.bfloat16()], rounded=True)[-1] == "packed"
    assert not fits(numbers.half(), "bf16")
    cases = (
        (True, True, ["bf16_states", "bf16", "packed"]),
        (True, False, ["bf16", "packed"]),
        (False, True, ["packed"]),
    )
    for x86, pairs, wanted in cases:
        monkeypatch.setattr(linear, "is_x86", lambda x86=x86: x86)
        monkeypatch.setattr(linear, "_multiplies_pairs", lambda pairs=pairs: pairs)
        assert forms([numbers.bfloat16()], rounded=False) == wanted
    assert "bf16_states" not in forms([numbers.bfloat16().float()], rounded=False)  # the user asked for float32
    with pytest.raises(ValueError, match="not all are bfloat16"):
        pack([numbers], "bf16")
    found = pack([numbers[:24], numbers[24:]], "rounded")
    assert found.shape == (2, 8, 32, 2)
    for output in (0, 1, 16, 31, 32, 39):
        assert found[output // 32, :, output % 32].flatten().equal(numbers[output].bfloat16())
    assert not found[1, :, 8:].any()  # beyond the last output
    pages, whole = Mock(LargePages), numbers[:32].bfloat16()
    pack([whole], "bf16", pages)
    assert pages.copy.call_args.args[0].data_ptr() == whole.data_ptr()  # it is copied once
    assert not fits(numbers[:, :15], "bf16")  # pairs of inputs


def test_caches_grow_under_compiled_passes() -> None:
    model = float_llama()
    made, own = compiled(model)
    sessions = [
        TreeSession(made.target, TreeCache(1, 4, 256, uniform_layers=2), (), each)
        for each in (made.target.ways.usual, own)
    ]
    with resumed(made.target):
        for session in sessions:
            session.prefill([list(range(60))])
        trees = [made.generate(PROMPTS[2], **GREEDY).steps[0].tree]
        logits = [session.score(trees).row(0) for session in sessions]
    assert sessions[1].cache.capacity >= 60
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    sessions[1].cache.check_integrity()


def test_sessions_that_want_other_hidden_states_run_plain() -> None:
    made, own = compiled(float_llama())
    assert made.target.session(1, 8, aux_layers=own.aux_layers[:1]).run is own
    other = made.target.session(1, 8, aux_layers=(0,))
    assert 0 not in own.aux_layers
    with resumed(made.target):
        other.prefill([[1, 2, 3]])
    assert other.run is made.target.ways.usual


def test_compiled_passes_are_what_graphs_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over places that stay the same, and slots that are told by a tensor; here by running them again."""
    monkeypatch.setattr(
        "specinfer.attention.passes.graphs.CudaCapture", lambda: lambda run, places: lambda: run(places)
    )
    model = float_llama()
    made, own = compiled(model)
    tree = made.generate(PROMPTS[2], **GREEDY).steps[0].tree
    fixed, usual = (made.target.session(1, 64, 128, graphs=graphs) for graphs in (True, False))
    assert fixed.run is own
    with resumed(made.target):
        for session in (fixed, usual):
            session.prefill([PROMPTS[2]])
        for _ in range(6):
            logits = [session.score([tree]).row(0) for session in (fixed, usual)]
            torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
            for session in (fixed, usual):
                session.commit([(0,)])
    assert isinstance(fixed.repeated, GraphedPass)
    assert fixed.repeated.graphs.made


def test_weights_written_or_replaced_are_packed_anew() -> None:
    model = float_llama()
    made, own = compiled(model)
    before, places = ids(made), own.weights(made.target)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-3)
    written = ids(made)
    assert own.weights(made.target) != places  # so that graphs are captured anew
    model.model.layers[0].mlp.down_proj.weight.data += 1  # as merging an adapter does, which no version counts
    merged = ids(made)
    model.model.layers[1].self_attn.q_proj.weight = nn.Parameter(torch.randn(32, 32))
    replaced = ids(made)
    assert "passes: compiled" in made.passes
    assert replaced == ids(decoder(model, compile=False))
    assert len({str(before), str(written), str(merged), str(replaced)}) == 4


def test_weights_learnt_online_are_packed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head's better weights take over behind the passes that its first weights had."""
    monkeypatch.setattr(Budget, "fits", lambda self, *_: len(self.times["comparison"]) < 2)
    model = float_llama()
    made = decoder(model, drafts=[draft_for(model)], online=True)
    head = made.drafts[0]
    first, wanted = head.model.ways.fast, ids(decoder(model, None))
    assert ids(made) == wanted
    assert head.swaps
    assert made.passes == "passes: compiled"
    assert head.model.ways.fast is not first
    assert head.model.ways.fast.network() is head.model.model
    assert first.network() is not head.model.model
    frozen = [HeadDraft(head.head, head.fingerprint)]
    trees = [
        [step.tree for step in decoder(model, drafts=drafts).generate(PROMPTS[0], **GREEDY).steps]
        for drafts in (frozen, [draft_for(model)])
    ]
    found = [step.tree for step in made.generate(PROMPTS[0], **GREEDY).steps]
    assert [tree.tokens.tolist() for tree in found] == [tree.tokens.tolist() for tree in trees[0]]
    assert [tree.tokens.tolist() for tree in found] != [tree.tokens.tolist() for tree in trees[1]]


def hooked(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, given, output: output * 0.5)


def patched(model: Any) -> None:
    layer = model.model.layers[0].mlp
    layer.forward = lambda states: states


def reset(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 3.0


def parametrised(model: Any) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    parametrize.register_parametrization(model.model.layers[0].mlp.down_proj, "weight", Doubled())


def swapped(model: Any) -> None:
    model.model.layers[0].mlp = nn.Identity()


def eager(model: Any) -> None:
    model.set_attn_implementation("eager")


def doubled(model: Any) -> None:
    model.double()


def tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


@pytest.mark.parametrize("change", [hooked, patched, reset, parametrised, swapped, eager, doubled, tied])
def test_a_changed_model_runs_plain_and_says_why(change: Any) -> None:
    model = float_llama()
    made, _ = compiled(model)
    before = ids(made)
    change(model)
    after = made.generate(PROMPTS, **GREEDY)
    assert "plain (" in made.passes
    assert any("plain (" in note for note in after[0].stats.notes)
    found = [result.token_ids for result in after]
    assert found == ids(decoder(model, compile=False))
    assert (found != before) == (change not in (eager, doubled))


def test_heads_tied_to_the_embedding_may_be_untied() -> None:
    """Names of tied weights stand for each other only while they are tied: here in a head that borrows nothing."""
    model = float_llama()
    weights = architecture(model)[1]
    assert len({first for _, first, *_ in weights}) == len(weights)
    tied(model)
    assert len({first for _, first, *_ in architecture(model)[1]}) == len(weights) - 1


def test_a_hook_of_all_modules_runs_plain() -> None:
    model = float_llama()
    made, _ = compiled(model)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        ids(made)
        assert "plain (all modules have a hook)" in made.passes
    finally:
        handle.remove()
    ids(made)
    assert made.passes == "passes: compiled"


def test_a_patched_class_runs_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    model = float_llama()
    made, _ = compiled(model)
    before, cls = ids(made), type(model.model.layers[0].mlp)
    monkeypatch.setattr(cls, "forward", lambda self, states: states * 0.1)
    assert ids(made) == ids(decoder(model, compile=False)) != before
    assert "changed" in made.passes
    monkeypatch.undo()
    assert ids(made) == before
    assert made.passes == "passes: compiled"


def test_a_wrong_package_is_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrongly(weights: Any, form: str, pages: LargePages) -> torch.Tensor:
        return pack([weight * 1.1 for weight in weights], form, pages)

    monkeypatch.setattr("specinfer.attention.passes.compiled.pack", wrongly)
    made = decoder(float_llama())
    assert made.target.ways.fast is None
    assert "are off by" in made.passes


def damage_code(folder: Path) -> None:
    path = folder / "pass-0.pt2"
    path.write_bytes(path.read_bytes()[:-100])


def damage_record(folder: Path) -> None:
    (folder / RECORD).write_text('{"aux_layers": [')


def lose_code(folder: Path) -> None:
    (folder / "pass-0.pt2").unlink()


@pytest.mark.parametrize("damage", [damage_code, damage_record, lose_code])
def test_a_damaged_package_is_not_used(damage: Any, cache: Path, tmp_path: Path, monkeypatch: Any) -> None:
    shutil.copytree(cache / "compiled", tmp_path / "compiled")
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))
    model = float_llama()
    damage(packages.package_of(TreeModel(model), "packed"))
    made = decoder(model)
    assert made.target.ways.fast is None
    assert "is damaged" in made.passes
    assert ids(made) == ids(decoder(model, compile=False))


def test_packages_of_other_versions_and_machines_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TreeModel(float_llama())
    own = packages.package_of(model, "packed")
    assert own.is_dir()
    for name, value in (
        ("torch.__version__", "2.12.0"),
        ("specinfer.attention.compiler.packages.machine", lambda _: ["a toaster"]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            assert packages.package_of(model, "packed") != own
            assert "not compiled yet" in decoder(model.model).passes
    other = tiny_llama(num_hidden_layers=3).float()
    assert packages.package_of(TreeModel(other), "packed") != own


def test_without_a_compiler_or_a_folder_all_works_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    model = float_llama()
    wanted = ids(decoder(model, compile=False))
    monkeypatch.setenv("SPECINFER_CACHE", str(file))
    made = decoder(model, compile=True)
    assert ids(made) == wanted
    assert "cannot be kept in" in made.passes
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "new"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    made = decoder(model, compile=True)
    assert ids(made) == wanted
    assert "no C++ compiler" in made.passes
    assert packages.packages() == []


def test_a_killed_compilation_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECINFER_CACHE", str(tmp_path))
        with copied(decoder, float_llama(), compile=True) as process:
            deadline = time.monotonic() + 120
            while not list(tmp_path.glob("compiled/.making-*/*/*")):
                assert process.exitcode is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert packages.packages() == []
        assert "not compiled yet" in decoder(float_llama()).passes
        assert packages.remove_packages() == 0
        assert not list(tmp_path.glob("compiled/.making-*"))


def test_weights_that_do_not_fit_in_memory_twice_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.attention.passes.compiled.free_bytes", lambda: 1000.0)
    made = decoder(float_llama())
    assert made.target.ways.fast is None
    assert "of memory" in made.passes


def test_packed_weights_are_had_once_for_a_model_and_freed_with_it() -> None:
    model = float_llama()
    first, second = compiled(model)[0], compiled(model)[0]
    own = weakref.ref(first.target.ways.fast)
    assert own() is second.target.ways.fast
    del first, second
    gc.collect()
    assert own() is not None
    del model
    gc.collect()
    assert own() is None


def test_the_model_is_only_read() -> None:
    def inside() -> list[dict[str, Any]]:  # transformers itself leaves hooks where hidden states were asked for
        return [{k: v for k, v in vars(module).items() if "hook" not in k} for module in model.modules()]

    model = float_llama()
    before, state = copy.deepcopy(inside()), copy.deepcopy(model.state_dict())
    ids(compiled(model)[0])
    assert [own.keys() for own in before] == [own.keys() for own in inside()]
    assert [own["training"] for own in before] == [own["training"] for own in inside()]
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


# ---- threads ----


def test_eight_threads_on_one_decoder_and_two_decoders_on_one_model() -> None:
    model = float_llama()
    both = [decoder(model, "auto", [draft_for(model), "ngram"]), decoder(model, Chain(3))]
    wanted = [ids(both[0], prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(8) as pool:
        jobs = [(made, prompt) for _ in range(6) for prompt in PROMPTS for made in both]
        found = list(pool.map(lambda job: ids(*job), jobs))
    assert found == [wanted[PROMPTS.index(prompt)] for _, prompt in jobs]


def test_interleaved_streams_and_generate_in_a_streamers_callback() -> None:
    model = float_llama()
    made = decoder(model, "auto", [draft_for(model), "ngram"])
    alone = [ids(made, prompt) for prompt in PROMPTS]
    runs = [made.open(prompt, **GREEDY) for prompt in PROMPTS]
    steps = [iter(run) for run in runs]
    while [step for step in steps if next(step, None)]:
        pass
    assert [run.results()[0].token_ids for run in runs] == alone
    inner = []

    class Streamer:
        def put(self, value: Any) -> None:
            inner.append(ids(made, PROMPTS[1]))

        def end(self) -> None:
            pass

    assert ids(made, PROMPTS[0], streamer=Streamer()) == alone[0]
    assert all(found == alone[1] for found in inner)


def test_models_in_train_mode_are_evaluated_in_all_threads_and_left_as_they_were() -> None:
    model = tiny_llama(attention_dropout=0.5)
    made = decoder(model, compile=False)
    wanted = [ids(made, prompt) for prompt in PROMPTS]
    model.train()
    model.model.layers[0].eval()
    flags = [module.training for module in model.modules()]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda prompt: ids(made, prompt), PROMPTS * 6)) == wanted * 6
    assert [module.training for module in model.modules()] == flags


# ---- kinds of models ----


def test_sixteen_bits_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel of ours reads them, passes are in bfloat16, as the weights."""
    monkeypatch.setattr(linear, "is_x86", lambda: False)
    monkeypatch.setattr(linear, "_multiplies_pairs", lambda: False)
    model = build("llama", torch.bfloat16, num_hidden_layers=1)
    made = SpeculativeDecoder(model, None, ["ngram"], TREE, compile=True)
    assert made.passes == "passes: compiled"
    listed = {row["package"]: row["layers"] for row in packages.packages()}
    assert listed[packages.package_of(made.target, made.target.ways.fast.form).name] == 1


def test_what_does_not_export_runs_plain_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))
    model = float_llama()
    layer = type("Branching", (type(model.model.layers[0].mlp),), {})
    layer.forward = lambda self, x: x if (0 * x).sum() == 0 else -x
    model.model.layers[0].mlp.__class__ = layer
    made = decoder(model, compile=True)
    assert "cannot be compiled" in made.passes
    assert ids(made) == ids(decoder(model, compile=False))
    flexible = TreeModel(build("llama", attention="flex_attention"))
    equip(flexible, (), True)
    assert "flex attention" in flexible.ways.missing


def test_the_command_lists_uses_and_removes(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(cache / "compiled", tmp_path / "cache" / "compiled")
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "cache"))
    model = float_llama()
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    run = CliRunner()
    options = ["compile", "--target", str(tmp_path / "model"), "--draft", "ngram", "--dtype", "float32", "--json"]
    made = run.invoke(app, options)
    assert made.exit_code == 0, made.output
    rows = json.loads(run.invoke(app, ["compile", "--list", "--json"]).stdout)
    kinds = {row["package"].split("-")[0]: row["is"] for row in rows}
    assert kinds.items() >= {"HeadNetwork": "draft head", "LlamaForCausalLM": "language model"}.items()
    shown = run.invoke(app, ["compile", "--list"])
    assert shown.stdout.splitlines()[0].split() == ["model", "is", "layers", "error", "limit", "MB"]
    assert max(map(len, shown.output.splitlines())) <= 100
    assert "limit: what rounding explains" in " ".join(shown.stderr.split())
    assert run.invoke(app, ["compile", "--remove"]).exit_code == 0
    assert packages.packages() == []
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    failed = run.invoke(app, options)
    assert isinstance(failed.exception, NotCompiled)


def test_a_new_package_keeps_its_model_error_and_limit(cache: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """One of an older version has none of them."""
    model = TreeModel(float_llama())
    own = packages.package_of(model, "packed")
    monkeypatch.setattr(packages, "make", lambda *given: shutil.copytree(own, given[3], dirs_exist_ok=True))
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))
    model.model.config._name_or_path = "models/tiny"
    equip(model, (), True)
    assert model.ways.missing == ""
    (row,) = packages.packages()
    assert (row["model"], row["is"], row["limit"]) == ("models/tiny", "language model", 1e-3)
    assert 0 <= row["error"] <= 1e-3
    path = packages.package_of(model, "packed") / "package.json"
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "made"}))
    (row,) = packages.packages()
    assert (row["model"], row["error"], row["limit"]) == ("LlamaForCausalLM", None, None)
    assert "?" in CliRunner().invoke(app, ["compile", "--list"]).stdout


def test_passes_attend_to_all_slots_of_a_cache_or_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager products with keys of their own copy them where there are more slots, and export names the case."""
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))
    model = TreeModel(build("llama", attention="eager", num_key_value_heads=4, num_hidden_layers=1))
    equip(model, (), True)
    assert model.ways.fast is not None, model.ways.missing
    with resumed(model):
        for capacity in (8, 9):
            found = []
            for run in (model.ways.usual, model.ways.fast):
                session = TreeSession(model, run.cache(model, 2, capacity, None, False), (), run)
                session.prefill([[1, 2, 3, 4, 5, 6], [4]])
                found.append(session.append(lay_out_chains([[5, 6], [7]], model.device)).flat())
                assert (session.cache.kv_length, session.cache.capacity) == (8, capacity)
            assert torch.allclose(*found, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_every_family_computes_the_same_compiled(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))
    model = TreeModel(build(name))
    equip(model, (0, 2), True)
    assert model.ways.fast is not None, model.ways.missing
    with resumed(model):
        assert check(model, model.ways.fast, range(1, 20)) < 1e-4


def test_ids_beyond_the_vocabulary_never_reach_compiled_code() -> None:
    with pytest.raises(InputError):
        decoder(float_llama()).generate([VOCAB + 1], **GREEDY)
