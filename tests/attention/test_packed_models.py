"""Models whose weights are packed: compiled passes, trees and heads do what plain ones do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import byte_tokenizer, tiny_llama
from test_compiled import GREEDY, SAMPLED, TREE, compiled, decoder, ids
from test_heads import draft_for
from test_packed_products import plain_rows, spanned
from torch import nn

from specinfer import BestFirst, Chain, SpeculativeDecoder
from specinfer.attention import check_model, resumed
from specinfer.attention.compiler import making
from specinfer.attention.compiler.making import _has_same_bits, check
from specinfer.attention.packed import products
from specinfer.attention.packed.formats import KINDS, quantised
from specinfer.attention.packed.layout import pack
from specinfer.attention.packed.modules import PackedEmbedding, PackedLinear, round_states
from specinfer.attention.passes.plain import TensorPass
from specinfer.errors import NotCompiled, UnsupportedModel
from specinfer.training import Recipe, distill

SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}  # K formats have blocks of 256 inputs
MIX, OTHER_MIX = ("Q4_K", "Q6_K"), ("Q8_0", "128 inputs, minima", "IQ4_XS", "256 inputs, 8 bits", "Q3_K")


def packed_llama(kinds: tuple[str, ...] = MIX) -> Any:
    """A tiny llama whose matrices are random ones of some kinds, in turns; its embeddings are its output matrix.

    One of its layers takes the inputs in an order of their own.
    """
    model = tiny_llama(tie_word_embeddings=False, **SIZES).float()
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for index, name in enumerate(layers):
        old, kind = model.get_submodule(name), kinds[index % len(kinds)]
        order = torch.arange(old.in_features).flip(0) if name == "model.layers.1.mlp.down_proj" else None
        new = PackedLinear(old.in_features, old.out_features, bias=False, order=order)
        if kind in KINDS:
            rows = plain_rows(kind, old.out_features)[:, : 256 // KINDS[kind].inputs * KINDS[kind].size].clone()
        part = quantised(kind, rows) if kind in KINDS else spanned(kind, *old.weight.shape)
        new.packed = pack([part], *old.weight.shape)
        model.set_submodule(name, new)
    embedding = PackedEmbedding(model.vocab_size, 256)
    embedding.packed = model.lm_head.packed
    model.set_submodule("model.embed_tokens", embedding)
    return model.eval()


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder with a package of the model."""
    if products.library() is None:
        pytest.skip("no C++ compiler")
    folder, patch = tmp_path_factory.mktemp("cache"), pytest.MonkeyPatch()
    patch.setenv("SPECINFER_CACHE", str(folder))
    made = SpeculativeDecoder(packed_llama(), byte_tokenizer(), [], TREE, compile=True)
    assert made.passes == "passes: compiled"
    yield folder
    patch.undo()


@pytest.mark.parametrize("options", [GREEDY, SAMPLED])
@pytest.mark.parametrize("tree", [None, Chain(3), BestFirst(12, 4)], ids=str)
def test_ids_are_those_of_the_plain_model(tree: Any, options: dict[str, Any]) -> None:
    model = packed_llama()
    plain, own = (ids(decoder(model, tree, compile=mode), **options) for mode in (False, "auto"))
    assert own == plain == ids(decoder(model, None, []), **options)


@pytest.mark.parametrize("tree", [None, Chain(3), BestFirst(12, 4)], ids=str)
def test_states_of_8_bits_give_a_text_of_their_own_with_and_without_trees(tree: Any) -> None:
    model = packed_llama()
    round_states(model)
    made = decoder(model, tree, compile="auto")
    assert made.passes == "passes: compiled (activations in 8 bits)"
    assert ids(made, **SAMPLED) == ids(decoder(model, None, [], compile="auto"), **SAMPLED)


@pytest.mark.parametrize("bits", [16, 8])
def test_nodes_have_the_same_bits_in_every_pass(bits: int) -> None:
    model = packed_llama()
    if bits == 8:
        round_states(model)
    made, passes = compiled(model)
    assert _has_same_bits(made.target, passes)


def test_checks_compare_products_by_states_of_16_bits() -> None:
    """Rounding to 8 bits moves logits by more than a wrong mask can."""
    model, other = packed_llama(), packed_llama()
    round_states(other)
    rounded, exact = (check_model(each) for each in (other, model))
    assert rounded.error == exact.error
    given = torch.arange(20)[None]
    assert (other(given).logits - model(given).logits).abs().max() > 1e-3 * model(given).logits.std()


@pytest.mark.parametrize(("every", "kept"), [(512, True), (40, False)])
def test_one_token_in_hundreds_may_magnify_its_rounded_states(every: int, kept: bool) -> None:
    made, own = compiled(packed_llama())

    class Off(TensorPass):
        """The same passes, but some nodes of a long one have other logits."""

        aux_layers, dtype, packs, form = own.aux_layers, own.dtype, own.packs, own.form

        def run(self, model: Any, inputs: Any, *given: Any) -> Any:
            logits, *states = own.run(model, inputs, *given)
            if inputs["input_ids"].shape[1] == 512:
                logits[:, ::every] *= 1.1
            return logits, *states

    with resumed(made.target):
        if kept:
            assert check(made.target, Off(), [512]) < 1e-3  # type: ignore[arg-type]
        else:
            with pytest.raises(NotCompiled, match=r"are off by 1\.0e-01"):
                check(made.target, Off(), [512])  # type: ignore[arg-type]


def test_one_package_serves_every_mix_of_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("compiled anew")

    monkeypatch.setattr(making, "compile_package", never)
    model = packed_llama(OTHER_MIX)
    made = SpeculativeDecoder(model, byte_tokenizer(), ["ngram"], TREE, compile=True)
    assert made.passes == "passes: compiled"
    assert ids(made) == ids(decoder(model, compile=False))


def test_layers_that_read_the_same_states_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def kept(graph: Any, _path: Path) -> None:
        graphs.append(graph)
        raise RuntimeError("enough")

    monkeypatch.setattr(making, "compile_package", kept)
    monkeypatch.setattr("specinfer.attention.compiler.packages._usable", lambda *_, **__: None)
    SpeculativeDecoder(packed_llama(), byte_tokenizer(), [], TREE, compile=True)
    products_of = torch.ops.specinfer.packed_linear.default
    found = [len(node.args[1]) for node in graphs[0].graph.find_nodes(op="call_function", target=products_of)]
    logits = graphs[0].graph.output_node().args[0][0]
    while logits.target != products_of:
        logits = logits.all_input_nodes[0]
    (outputs,) = logits.args[2]
    assert outputs.args[0].name == "tensors_words"  # the output matrix makes the logits that are wanted
    assert found == [3, 1, 2, 1] * 2 + [1]  # queries, keys and values; output; gate and up; down; and the output matrix


def test_a_head_reads_a_packed_targets_embeddings() -> None:
    model = packed_llama()
    made = decoder(model, TREE, [draft_for(model, hidden_size=256)], compile=False)
    assert ids(made) == ids(decoder(model, None, [], compile=False))


def test_heads_are_not_trained_on_packed_targets(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="packed"):
        distill(packed_llama(), byte_tokenizer(), [], tmp_path / "head", Recipe(1))


def test_without_products_a_package_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code would call functions that the process has not."""
    monkeypatch.setattr(products, "library", lambda: None)
    made = decoder(packed_llama())
    assert made.target.ways.fast is None
    assert "packed weights cannot be compiled" in made.passes
