"""Verdicts of `check_model` that are kept in the cache folder: for whom they hold, and for whom they do not."""

import pytest
import torch
from conftest import tiny_llama
from transformers import LlamaForCausalLM

from specinfer.attention import Support, check, check_model, verdicts
from specinfer.attention.packed import products
from specinfer.checkpoints.rounding import round_weights


class Own(LlamaForCausalLM):
    """A model whose code has no version."""


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Keep the verdicts of small models, too, in a folder of the test's own."""
    monkeypatch.setattr(verdicts, "LEAST", 0)
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))
    return tmp_path / "checked"


@pytest.fixture
def judged(monkeypatch):
    """Models that passes were run of."""
    seen, judge = [], check._judge
    monkeypatch.setattr(check, "_judge", lambda model: seen.append(model) or judge(model))
    return seen


def test_a_model_like_one_that_was_checked_runs_no_pass(judged, folder):
    """Other weights of its architecture, in another object, as in another process."""
    wanted = check_model(tiny_llama(0))
    assert wanted.support is Support.EXACT
    assert check_model(tiny_llama(5)) == wanted
    assert (len(judged), len([*folder.iterdir()])) == (1, 1)


def test_models_that_compute_in_another_way_are_checked(judged, monkeypatch):
    check_model(tiny_llama())
    changed = [tiny_llama(num_hidden_layers=3), tiny_llama(rope_theta=9.0), tiny_llama().float()]
    changed.append(tiny_llama(attn_implementation="eager"))
    for model in changed:
        check_model(model)
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    check_model(tiny_llama())
    monkeypatch.setattr(verdicts, "machine", lambda _: ["a toaster"])
    check_model(tiny_llama())
    assert len(judged) == 1 + len(changed) + 2


def test_packed_models_are_checked_once_for_each_format(judged, monkeypatch):
    """Their layers are ours, and weigh little as parameters."""
    monkeypatch.setattr(products, "library", lambda: None)  # torch multiplies: nothing is compiled into this cache
    for form, checked in ("int8", 1), ("int8", 1), ("int4", 2), ("int8", 2):
        model = tiny_llama(hidden_size=32, intermediate_size=64)
        round_weights(model, form)
        assert check_model(model).support is Support.EXACT
        assert len(judged) == checked


def altered_models():
    model = tiny_llama()
    model.model.layers[0].register_forward_hook(lambda *_: None)
    yield model
    model = tiny_llama()
    model.model.norm.forward = model.model.norm.forward
    yield model
    yield Own(tiny_llama().config).double().eval()


def test_code_without_a_version_is_checked_every_time(judged, folder):
    """Hooks, patches, and classes from elsewhere."""
    for _ in range(2):
        for model in altered_models():
            assert check_model(model).support is Support.EXACT
    assert len(judged) == 6
    assert not folder.exists()


def test_what_is_unsupported_is_checked_again(judged, folder):
    """It may be due to the weights."""
    for _ in range(2):
        broken = tiny_llama()
        with torch.no_grad():
            broken.lm_head.weight[3] = torch.nan
        assert check_model(broken).support is Support.UNSUPPORTED
    assert len(judged) == 2
    assert not folder.exists()


def test_small_models_leave_no_file(judged, folder, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("SPECINFER_CACHE", str(folder.parent))
    check_model(tiny_llama())
    assert not folder.exists()


@pytest.mark.parametrize("content", ["", "[]", '["exact"]', '["perfect", "", 0]', '{"exact": 1}', '["exact", "", "x"]'])
def test_a_damaged_file_is_made_anew(judged, folder, content):
    wanted = check_model(tiny_llama())
    (file,) = folder.iterdir()
    whole = file.read_text()
    file.write_text(content)
    assert check_model(tiny_llama()) == wanted
    assert (len(judged), file.read_text()) == (2, whole)


def test_a_folder_that_cannot_be_written_is_no_error(judged, folder):
    folder.write_text("a file")
    for _ in range(2):
        assert check_model(tiny_llama()).support is Support.EXACT
    assert len(judged) == 2
