"""Distilling: text with the states that chose it, shards that survive a kill, orchestration, cards, one-line errors."""

import builtins
import errno
import json
import os
import re
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer, counted, launched, plain, run_command, tiny_llama
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

import specinfer.loading
from specinfer import BestFirst, SpeculativeDecoder, cli
from specinfer.attention import TreeModel
from specinfer.common import files
from specinfer.drafts.head import HeadDraft, target_fingerprint
from specinfer.errors import InputError, ModelError, SpecinferError
from specinfer.loading import Loaded
from specinfer.training import (
    Recipe,
    TextSettings,
    TrainingSettings,
    distill,
    read_documents,
    read_prompts,
    train,
)
from specinfer.training import recorded_text as text
from specinfer.training.card import describe_data, write_card
from specinfer.training.job import Checkpoint, TrainingJob
from specinfer.training.muon import Muon

NEW = 12
WORDS = ["abcabc", "a", "the cat sat on the mat", "def f(x):", "one two three", "zz"]
FIGURES = {
    "steps": 400,
    "history": [
        {"step": step, "loss": 3.0 - step / 400, "top1": 0.3, "held_out": [[0.3, 0.4, 0.5], [0.2, 0.3, 0.4]]}
        for step in (200, 400)
    ],
    "hits": [[0.3125, 0.4, 0.5], [0.2, 0.3, 0.4]],
    "coverage": 0.987,
    "window": 256,
    "inverse_temperature": 1.2,
}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(text, "BATCH", 4)


@pytest.fixture
def prompts(tmp_path):
    """A file of prompts, of which one is not for training."""
    rows = [{"id": i, "split": "train", "prompt": word} for i, word in enumerate(WORDS)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in [*rows, {"split": "dev", "prompt": "never"}]) + "\n")
    return read_prompts([file])


@pytest.fixture
def documents(tmp_path):
    """A file of two given documents, one longer than a piece."""
    file = tmp_path / "given.txt"
    file.write_text(f"First line\nsecond line.\n\n{'long ' * 130}\n")
    return read_documents([file])


def write(target, tokenizer, folder, prompts, documents=(), **options):
    """Plan text, lock its settings, write it; return its shards."""
    settings = TextSettings(**{"new_tokens": NEW, **options})
    aux_layers = text.default_aux_layers(target)
    batches = text.plan_text(TreeModel(target), tokenizer, prompts, documents, settings)
    made = text.TextFolder(folder, target, tokenizer, aux_layers, settings, batches)
    made.lock_settings()
    return made.write(lambda *_: None)[0]


def texts(shards):
    """Every text of the shards: ids, prompt length, temperature, states."""
    for shard in map(load_file, shards):
        assert shard["ids"].dtype == torch.int32
        start = 0
        columns = (shard[name].tolist() for name in ("lengths", "prompt_lengths", "temperatures"))
        for length, prompt_length, temperature in zip(*columns, strict=True):
            part = slice(start, start + length)
            yield shard["ids"][part].tolist(), prompt_length, temperature, shard["states"][part]
            start += length
        assert start == len(shard["ids"]) == len(shard["states"])


# ---- text ----


@pytest.mark.parametrize("layers", [2, 5])
def test_states_are_those_that_chose_the_tokens(tokenizer, prompts, documents, tmp_path, layers):
    """states[j] is what a separate pass of the model computes at token j - 1, of own and of given text."""
    model = tiny_llama(3, num_hidden_layers=layers, max_position_embeddings=1024)
    aux_layers = text.default_aux_layers(model)
    assert aux_layers == {2: (1, 2), 5: (2, 4, 5)}[layers]
    found = list(texts(write(model, tokenizer, tmp_path / "text", prompts, documents, samples=9)))
    assert len(found) == 9 + 3
    for ids, _, _, states in found:
        with torch.no_grad():
            output = model(torch.tensor([ids]), output_hidden_states=True)
        wanted = torch.stack([output.hidden_states[layer][0, :-1] for layer in aux_layers], 1)
        assert states.dtype == torch.float64
        assert not states[0].any()
        torch.testing.assert_close(states[1:], wanted)


def test_text_is_the_targets_own(target, tokenizer, prompts, tmp_path):
    """Every text is the decoder's for its seed and temperature; temperatures take turns; greedy text comes once."""
    settings = TextSettings(samples=20, new_tokens=NEW)
    batches = text.plan_text(TreeModel(target), tokenizer, prompts, (), settings)
    jobs = [job for batch in batches for job in batch]
    found = list(texts(write(target, tokenizer, tmp_path / "text", prompts, samples=20)))
    decoder = SpeculativeDecoder(target, tokenizer, tree=None)
    assert len(jobs) == len(found) == 20
    for job, (ids, prompt_length, temperature, _) in zip(jobs, found, strict=True):
        assert ids[:prompt_length] == job.ids
        assert temperature == pytest.approx(job.temperature)
        options = {"max_new_tokens": NEW, "temperature": job.temperature, "seed": job.seed}
        options |= {"top_k": 0} if job.temperature else {}
        assert ids[prompt_length:] == decoder.generate(job.ids, **options).token_ids
    greedy = [tuple(job.ids) for job in jobs if job.temperature == 0]
    assert len(greedy) == len(set(greedy)) == len(WORDS)
    assert {job.temperature for job in jobs} == {0, 0.7, 1.0}
    assert len({job.seed for job in jobs}) == 20


def test_the_end_of_a_text_has_its_state(tokenizer, prompts, tmp_path):
    """A text that ends early keeps its end of sequence, with the state that chose it; nothing follows."""
    model = tiny_llama(3)
    row = tokenizer(WORDS[0])["input_ids"]
    new = plain(model, row, NEW)
    model.generation_config.eos_token_id = eos = next(token for token in new[3:] if token not in new[:3])
    new = new[: new.index(eos) + 1]
    ((ids, _, _, states),) = texts(write(model, tokenizer, tmp_path / "text", prompts[:1], temperatures=(0.0,)))
    assert ids == row + new
    assert len(new) < NEW
    assert int(model.lm_head(states[-1, -1]).argmax()) == new[-1]


def test_finished_batches_are_never_made_again(target, tokenizer, prompts, documents, tmp_path):
    """After a kill only what was missing is made, and it is what it would have been."""
    folder = tmp_path / "text"
    shards = write(target, tokenizer, folder, prompts, documents, samples=9)
    before = {shard.name: shard.read_bytes() for shard in shards}
    with counted(target) as calls:
        assert write(target, tokenizer, folder, prompts, documents, samples=9) == shards
    assert not calls
    shards[1].unlink()
    rest = {shard: shard.stat().st_mtime_ns for shard in shards if shard.exists()}
    with counted(target) as calls:
        write(target, tokenizer, folder, prompts, documents, samples=9)
    assert 1 <= len(calls) <= NEW + 2  # a prefill pass, and one more token so that the last state is there
    assert {shard.name: shard.read_bytes() for shard in shards} == before
    assert all(shard.stat().st_mtime_ns == time for shard, time in rest.items())
    assert sorted(path.name for path in folder.iterdir()) == sorted([*before, "manifest.json"])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"new_tokens": 5}, "new_tokens"),
        ({"temperatures": (0.0, 1.0)}, "temperatures"),
        ({"seed": 2}, "seed"),
        ({"samples": 3}, "samples"),
    ],
)
def test_a_folder_of_other_settings_is_refused(target, tokenizer, prompts, tmp_path, options, name):
    """The message names what differs; nothing is overwritten and no pass is made."""
    write(target, tokenizer, tmp_path, prompts)
    with counted(target) as calls, pytest.raises(InputError, match=f"{name} was .*, now .*--out"):
        write(target, tokenizer, tmp_path, prompts, **options)
    assert not calls
    write(target, tokenizer, tmp_path, prompts)


def test_a_folder_of_another_target_or_other_prompts_is_refused(target, tokenizer, prompts, tmp_path):
    """Text of one model is no text of another."""
    write(target, tokenizer, tmp_path, prompts)
    with pytest.raises(InputError, match=r"target\.sketch was .*, now"):
        write(tiny_llama(5), tokenizer, tmp_path, prompts)
    with pytest.raises(InputError, match="texts was"):
        write(target, tokenizer, tmp_path, [prompts[0]._replace(text="other"), *prompts[1:]])


def test_a_full_disk_is_one_error_and_keeps_what_is_finished(target, tokenizer, prompts, tmp_path, monkeypatch):
    """The write fails midway: no half file stays, finished shards do, and a later run goes on."""
    replace, left = os.replace, [3]

    def full(*names):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(*names)

    folder = tmp_path / "text"
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(SpecinferError, match=r"disk is full.*go on"):
            write(target, tokenizer, folder, prompts, samples=20)
    assert len(list(folder.iterdir())) == 3  # the manifest and two shards
    assert len(list(texts(write(target, tokenizer, folder, prompts, samples=20)))) == 20


def test_a_folder_that_another_run_fills_is_refused(target, tokenizer, prompts, tmp_path):
    """Before the target runs."""
    with files.locked(tmp_path), counted(target) as calls, pytest.raises(InputError, match="another run writes to"):
        distill(target, tokenizer, prompts, tmp_path)
    assert not calls


@pytest.mark.parametrize("content", ["[]", "{}", "null", '{"steps": 1}', "[" * 100_000])
def test_damaged_figures_are_one_line(tmp_path, content):
    """They stand for a draft that was finished."""
    (tmp_path / "figures.json").write_text(content)
    job = TrainingJob(tmp_path, "head", TrainingSettings(), (1, 2))
    if content == "null":
        assert job.figures() is None
        return
    with pytest.raises(InputError, match=r"figures.json.*remove it") as caught:
        job.figures()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["[]", "{}", '{"step": 1, "history": []}', "[" * 100_000, "null", None])
def test_a_damaged_checkpoint_is_one_line(tmp_path, content):
    checkpoint = Checkpoint(tmp_path / "1")
    if content is None:
        checkpoint.path.write_bytes(b"short")
    else:
        save_file({"model.other": torch.zeros(1)}, checkpoint.path, {"progress": content})
    with pytest.raises(InputError, match="remove it") as caught:
        checkpoint.load(torch.nn.Linear(2, 2), [])
    assert "\n" not in str(caught.value)


def test_a_full_disk_in_a_safetensors_writer():
    """It raises its own error, with the reason in words."""
    with pytest.raises(SpecinferError, match="disk is full"), files.storing(Path("out")):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_prompts_and_documents_are_read(tmp_path, prompts, documents):
    """JSON lines without a split are all for training; documents are blocks, or lines where there are no blocks."""
    assert [prompt.text for prompt in prompts] == WORDS
    assert prompts[1].line == 2
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    (tmp_path / "b.txt").write_text("one\ntwo\n")
    found = read_prompts([tmp_path / "a.jsonl", tmp_path / "b.txt"])
    assert [prompt.text for prompt in found] == ["x", "y", "one", "two"]
    assert [document.text.split()[0] for document in documents] == ["First", "long"]
    assert [document.line for document in documents] == [1, 4]
    (tmp_path / "c.jsonl").write_text('{"prompt": "a\u2028b"}\n\n{"prompt": "c"}\n', encoding="utf-8")
    assert [(prompt.text, prompt.line) for prompt in read_prompts([tmp_path / "c.jsonl"])] == [
        ("a\u2028b", 1),
        ("c", 3),
    ]
    lines = read_documents([tmp_path / "b.txt"])
    assert [(line.text, line.line) for line in lines] == [("one", 1), ("two", 2)]


# ---- orchestration ----


@pytest.fixture
def trained(monkeypatch):
    """Training that takes no time; the calls of it."""
    calls = []

    def train_head(target, tokenizer, shards, job, progress):
        earlier, sizes = [folder.name for folder in job.earlier], (job.settings.layers, job.settings.vocabulary)
        calls.append((job.folder.name, earlier, list(shards), tuple(job.aux_layers), job.start, *sizes))
        progress(f"draft {job.folder.name}", 400, 400, {"loss": 2.0, "top1": 0.3, "held_out": FIGURES["hits"]})
        return FIGURES

    monkeypatch.setattr(train, "train_head", train_head)
    return calls


def test_drafts_are_trained_one_after_the_other(target, tokenizer, prompts, tmp_path, trained):
    """Each knows the earlier ones; a second call does nothing again; more drafts may be added."""
    recipe = Recipe(2, text=TextSettings(new_tokens=NEW))
    seen = []
    made = distill(target, tokenizer, prompts, tmp_path, recipe, progress=lambda *told: seen.append(told))
    shards = sorted((tmp_path / "text").glob("*.safetensors"))
    assert [call[:4] for call in trained] == [("1", [], shards, (1, 2)), ("2", ["1"], shards, (1, 2))]
    assert made["texts"] == len(WORDS)
    assert made["tokens"] == sum(len(ids) for ids, *_ in texts(shards))
    assert [draft["folder"] for draft in made["drafts"]] == [str(tmp_path / "1"), str(tmp_path / "2")]
    assert [stage for stage, *_ in seen] == ["text"] * len(shards) + ["draft 1", "draft 2"]
    assert seen[len(shards) - 1][1:3] == (6, 6)
    with counted(target) as calls:
        assert distill(target, tokenizer, prompts, tmp_path, recipe) == made
    assert (len(trained), calls) == (2, [])
    distill(target, tokenizer, prompts, tmp_path, replace(recipe, drafts=3))
    assert trained[2][:2] == ("3", ["1", "2"])


def test_a_draft_of_other_settings_is_refused_before_anything_runs(target, tokenizer, prompts, tmp_path, trained):
    """The text stays usable: removing the draft's folder trains it anew."""
    recipe = Recipe(1, text=TextSettings(new_tokens=NEW))
    distill(target, tokenizer, prompts, tmp_path, recipe)
    other = replace(recipe, training=TrainingSettings(epochs=1.0))
    with counted(target) as calls, pytest.raises(InputError, match=r"epochs was 3\.0, now 1\.0.*remove"):
        distill(target, tokenizer, prompts, tmp_path, other)
    assert (len(trained), calls) == (1, [])


def test_settings_under_which_nothing_was_made_are_replaced(target, tokenizer, prompts, tmp_path, monkeypatch):
    """A mistake in the first command does not spoil its folder."""

    def fail(*_):
        raise InputError("no, not so")

    with monkeypatch.context() as patched:
        patched.setattr(text.TextFolder, "write", fail)
        with pytest.raises(InputError, match="not so"):
            distill(target, tokenizer, prompts, tmp_path, Recipe(1, text=TextSettings(new_tokens=NEW + 1)))
    monkeypatch.setattr(text.TextFolder, "write", fail)
    with pytest.raises(InputError, match="not so"):  # and not: begun with other settings
        distill(target, tokenizer, prompts, tmp_path, Recipe(1, text=TextSettings(new_tokens=NEW)))
    manifest = json.loads((tmp_path / "text" / "manifest.json").read_text())
    assert manifest["new_tokens"] == NEW


def test_a_draft_depends_on_what_the_earlier_ones_were_trained_on_from(target, tokenizer, prompts, tmp_path, trained):
    """The second is boost-tuned after the first: another first one, another second."""
    for name, token in (("a", 0), ("b", 64)):
        head = train.new_head(target, (1, 2), 1, torch.arange(token, token + 64))
        HeadDraft(head, target_fingerprint(target, tokenizer)).save(tmp_path / name)
    recipe = Recipe(2, text=TextSettings(new_tokens=NEW), start=(tmp_path / "a",))
    distill(target, tokenizer, prompts, tmp_path / "out", recipe)
    shutil.rmtree(tmp_path / "out" / "1")
    with pytest.raises(InputError, match=r"out/2 was begun with other settings \(earlier was \[\"a "):
        distill(target, tokenizer, prompts, tmp_path / "out", replace(recipe, start=(tmp_path / "b",)))


def test_a_damaged_shard_is_named(tmp_path):
    (tmp_path / "00000.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"00000\.safetensors is damaged .*remove it"):
        text.count_tokens(tmp_path / "00000.safetensors")


def test_heads_are_trained_on_from_others(target, tokenizer, prompts, tmp_path, trained):
    """Each from its own, with the sizes of that; a further draft begins anew.  What does not fit is refused at once."""
    for name, layers in (("a", 1), ("b", 2)):
        head = train.new_head(target, (1, 2), layers, torch.arange(64))
        HeadDraft(head, target_fingerprint(target, tokenizer)).save(tmp_path / name)
    recipe = Recipe(3, text=TextSettings(new_tokens=NEW), start=(tmp_path / "a", tmp_path / "b"))
    distill(target, tokenizer, prompts, tmp_path / "out", recipe)
    assert [call[4:] for call in trained] == [(tmp_path / "a", 1, 64), (tmp_path / "b", 2, 64), (None, 1, 12_000)]
    assert "trained on from b; its weights are the mean" in (tmp_path / "out" / "2" / "README.md").read_text()
    with counted(target) as calls:
        for changed, complaint in (
            ({"start": (tmp_path / "nothing",)}, "cannot load an EAGLE-style head"),
            ({"start": (tmp_path / "b", tmp_path / "a")}, r'start was "a \w+", now "b \w+"'),
        ):
            with pytest.raises(SpecinferError, match=complaint):
                distill(target, tokenizer, prompts, tmp_path / "out", replace(recipe, **changed))
        with pytest.raises(ModelError, match="trained for other weights"):
            distill(tiny_llama(9), tokenizer, prompts, tmp_path / "other", recipe)
    assert not calls


def test_what_is_made_loads_as_a_draft(tokenizer, prompts, tmp_path, monkeypatch):
    """Real training of both architectures, in a few steps: the folders are drafts, and the text stays the target's."""
    target = tiny_llama(0).float()
    monkeypatch.setattr(specinfer.loading, "load", lambda *_, **__: Loaded(target, tokenizer, "tiny"))
    wanted = plain(target, [5, 9, 17], NEW)
    for arch in ("head", "lm"):
        training = TrainingSettings(epochs=1.0, tokens_per_batch=128, vocabulary=64, held_out=0.2)
        recipe = Recipe(1, arch, TextSettings(new_tokens=NEW), training)
        made = distill(target, tokenizer, prompts, tmp_path / arch, recipe, name="org/tiny")
        (draft,) = made["drafts"]
        assert "org/tiny" in (Path(draft["folder"]) / "README.md").read_text()
        decoder = SpeculativeDecoder.from_pretrained("tiny", [draft["folder"]], BestFirst(6, 3))
        assert decoder.generate([5, 9, 17], max_new_tokens=NEW).token_ids == wanted


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recipe(drafts=0), "drafts=0"),
        (lambda: Recipe(2, "lm"), "drafts=1"),
        (lambda: Recipe(1, start=(Path("1"), Path("2"))), "2 heads to train on from, but 1 drafts"),
        (lambda: Recipe(1, "lm", start=(Path("1"),)), "arch='head'"),
        (lambda: Recipe(arch="tree"), "arch 'tree' is unknown: choose head or lm"),
        (lambda: Recipe(training=TrainingSettings(loss="mse")), "loss 'mse'"),
        (lambda: Recipe(training=TrainingSettings(epochs=0)), "epochs=0"),
        (lambda: Recipe(training=TrainingSettings(minutes=0.0)), "minutes=0"),
        (lambda: TextSettings(samples=0), "samples=0"),
        (lambda: TextSettings(new_tokens=0), "new_tokens=0"),
        (lambda: TextSettings(temperatures=()), "temperatures"),
        (lambda: TextSettings(temperatures=(-1.0,)), "temperatures"),
        (lambda: TextSettings(temperatures=(float("nan"),)), "temperatures"),
    ],
)
def test_impossible_recipes(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_greedy_text_cannot_be_repeated(target, tokenizer, prompts):
    with pytest.raises(InputError, match="temperature above 0"):
        text.plan_text(TreeModel(target), tokenizer, prompts, (), TextSettings(9, NEW, (0.0,)))


def test_a_target_without_a_tokenizer(target, prompts, tmp_path):
    with pytest.raises(InputError, match="no tokenizer"):
        distill(target, None, prompts, tmp_path)


# ---- cards ----


@pytest.mark.parametrize("plots", [True, False])
def test_the_card_says_what_was_done(prompts, documents, tmp_path, monkeypatch, plots):
    """Target, data, settings, losses, rates, limits; a plot where matplotlib is installed, and a note where not."""
    if plots:
        pytest.importorskip("matplotlib")
    else:
        real = builtins.__import__

        def without(name, *rest):
            if name.startswith("matplotlib"):
                raise ImportError(name)
            return real(name, *rest)

        monkeypatch.setattr(builtins, "__import__", without)
    folder = tmp_path / "2"
    data = describe_data(prompts, documents, 42, 4321, TextSettings(seed=7))
    job = TrainingJob(
        folder, "head", TrainingSettings(learning_rate=0.125), (1, 2), [tmp_path / "1"], target="org/tiny"
    )
    write_card(job, data, FIGURES)
    card = (folder / "README.md").read_text()
    for words in (
        *("base_model: org/tiny", "prompts.jsonl (6)", "given.txt (2)", "42 texts, 4,321 tokens"),
        *("temperatures 0, 0.7, 1 in turn", "seed 7", "| learning_rate | 0.125 |", "| 400 | 2.0000 | 0.300 |"),
        *("| 1 | 0.312 | 0.400 | 0.500 |", "98.7%", "400 steps", "Boost-tuned after draft 1", "top-3"),
        "Not for any other target",
    ):
        assert words in card
    assert "{" not in card
    assert (folder / "loss.png").exists() == plots
    assert ("(loss.png)" in card) == plots
    assert ("No plot" in card) != plots


# ---- the command line, and loading what it made ----


@pytest.fixture
def run(target, monkeypatch, capsys, prompts):
    """Run ``specinfer distill`` on the tiny target; return exit code, standard output and standard error."""
    monkeypatch.setattr(specinfer.loading, "load", lambda *_, **__: Loaded(target, byte_tokenizer(), "tiny"))

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["specinfer", "distill", "--new-tokens", str(NEW), *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return call


def test_the_command(run, tmp_path, trained):
    """Options reach the text and the training; the result is a table or JSON."""
    options = [
        "--prompts",
        tmp_path / "prompts.jsonl",
        "--out",
        tmp_path / "out",
        "--samples",
        8,
        "--epochs",
        0.5,
    ]
    options += ["--temperatures", "0,1", "--seed", 3, "--vocabulary", 99, "--loss", "token", "--drafts", 1]
    code, out, err = run(*options, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["texts"] == 8
    settings = json.loads((tmp_path / "out" / "1" / "settings.json").read_text())
    assert {"arch": "head", "epochs": 0.5, "seed": 3, "vocabulary": 99, "loss": "token"}.items() <= settings.items()
    manifest = json.loads((tmp_path / "out" / "text" / "manifest.json").read_text())
    assert {"samples": 8, "new_tokens": NEW, "seed": 3}.items() <= manifest.items()
    assert manifest["temperatures"] == [0, 1]
    code, out, err = run(*options)
    assert (code, err, len(trained)) == (0, "", 1)
    assert out.split()[:5] == ["draft", "steps", "top-1", "top-2", "top-3"]
    assert "0.312" in out


BAD_FILES = {
    "not JSON": ("p.jsonl", '{"prompt": "x"}\nprompt\n', "p.jsonl, line 2 is not JSON"),
    "no prompt": ("p.jsonl", '{"text": "x"}\n', 'p.jsonl, line 1 has no "prompt"'),
    "no text": ("p.jsonl", '{"prompt": ["x"]}\n', 'p.jsonl, line 1 has no "prompt"'),
    "an empty prompt": ("p.jsonl", '{"prompt": "x"}\n{"prompt": " "}\n', 'p.jsonl, line 2 has no "prompt" with text'),
    "nothing to train on": ("p.jsonl", '{"prompt": "x", "split": "dev"}\n', "no prompts to train on"),
    "an empty file": ("p.txt", "", "no prompts to train on"),
    "no UTF-8": ("p.txt", b"\xff\xfe", "cannot read"),
    "no file": ("p.txt", None, "No such file"),
    "too long": ("p.txt", "x" * 250, "p.txt, line 1: 250 prompt tokens + 12 new ones exceed"),
    "half a character": ("p.jsonl", '{"prompt": "\\ud800"}\n', "p.jsonl, line 1 holds half a surrogate pair"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_prompts_are_one_line(run, target, tmp_path, name, content, message):
    """Exit code 2, file and line, and no pass of the target."""
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with counted(target) as calls:
        code, out, err = run("--prompts", tmp_path / name, "--out", tmp_path / "out")
    assert (code, out, err.count("\n"), calls) == (2, "", 1, [])
    assert message in err


def test_prompts_beyond_what_is_learnt_from_are_refused(run, target, tmp_path, monkeypatch):
    """Before the target has continued them for nothing."""
    monkeypatch.setattr(text, "LONGEST", 20)
    with counted(target) as calls:
        code, _, err = run("--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "out")
    assert (code, calls) == (2, [])
    assert "line 3: 22 prompt tokens" in err
    assert "20 tokens of a text" in err


BAD_OPTIONS = {
    "no prompts": (["--out", "{tmp}/out"], "--prompts"),
    "no folder": (["--prompts", "{tmp}/prompts.jsonl"], "--out"),
    "no room": (["--prompts", "{tmp}/prompts.jsonl", "--out", "{tmp}/out", "--new-tokens", "9000"], "(--new-tokens)"),
    "not a folder": (["--prompts", "{tmp}/prompts.jsonl", "--out", "{tmp}/prompts.jsonl"], "cannot write"),
    "no numbers": (["--prompts", "{tmp}/prompts.jsonl", "--out", "{tmp}/out", "--temperatures", "hot"], "'hot'"),
    "no draft": (["--prompts", "{tmp}/prompts.jsonl", "--out", "{tmp}/out", "--drafts", "0"], "drafts=0"),
    "one text": (["--prompts", "{tmp}/prompts.jsonl", "--out", "{tmp}/out", "--samples", "1"], "one text is held out"),
    "few tokens": (["--prompts", "{tmp}/prompts.jsonl", "--out", "{tmp}/out", "--vocabulary", "4"], "vocabulary=4"),
    "no such arch": (["--prompts", "{tmp}/prompts.jsonl", "--out", "{tmp}/out", "--arch", "rnn"], "'rnn'"),
    "no end": (["--prompts", "{tmp}/prompts.jsonl", "--out", "{tmp}/out", "--epochs", "inf"], "epochs=inf"),
    "two ends": (
        ["--prompts", "{tmp}/prompts.jsonl", "--out", "{tmp}/out", "--epochs", "1", "--time", "2"],
        "give one of them",
    ),
    "nothing bundled": (
        ["--prompts", "{tmp}/prompts.jsonl", "--out", "{tmp}/out", "--start", "bundled"],
        "no heads for",
    ),
    "no head": (
        ["--prompts", "{tmp}/prompts.jsonl", "--out", "{tmp}/out", "--start", "{tmp}/no"],
        "cannot load an EAGLE-style head",
    ),
    "no such text": (["--prompts", "{tmp}/prompts.jsonl", "--out", "{tmp}/out", "--text", "{tmp}/no"], "No such file"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_options_are_one_line(run, target, tmp_path, arguments, message):
    """Exit code 2, and no pass of the target."""
    with counted(target) as calls:
        code, out, err = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert (code, out, err.count("\n"), calls) == (2, "", 1, [])
    assert message in err


def test_the_command_has_exactly_these_options(run, monkeypatch):
    """The names are a promise: no more, no fewer."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", run("--help")[1])
    listed = set(re.findall(r"^\W*--([a-z][a-z-]*)", shown, re.MULTILINE)) - {"help"}
    wanted = "arch device drafts dtype epochs json layers learning-rate loss new-tokens out prompts samples seed start"
    assert sorted(listed) == [*wanted.split(), "target", "temperatures", "text", "time", "vocabulary"]


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", None])
def test_a_bad_draft_folder_is_one_line(target, tokenizer, tmp_path, monkeypatch, broken):
    """A folder that says it is an EAGLE-style head and is not: a ModelError that names it."""
    monkeypatch.setattr(specinfer.loading, "load", lambda *_, **__: Loaded(target, tokenizer, "tiny"))
    config = {"model_type": "specinfer_eagle_head", "head": {}, "fingerprint": {}, "name": "1"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    if broken == "model.safetensors":
        (tmp_path / broken).unlink()
    if broken == "config.json":
        (tmp_path / broken).write_text('{"model_type": "specinfer_eagle_head"}')
    with pytest.raises(ModelError, match=str(tmp_path)) as caught:
        SpeculativeDecoder.from_pretrained("tiny", [str(tmp_path)])
    assert "\n" not in str(caught.value)


def test_processes_of_a_launcher_share_the_steps(tmp_path, monkeypatch, capfd):
    """Two of them need half the steps for as many epochs, and one of them speaks."""
    tiny_llama(spread=0.5).float().save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.txt").write_text("\n".join(WORDS) + "\n")
    monkeypatch.chdir(tmp_path)

    def distil(*command):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # that of the copied process, which was alone
        run_command(*command)

    command = f"distill --json --out made --drafts 1 --target target --prompts prompts.txt --new-tokens {NEW}"
    options = "--vocabulary 64 --epochs 12 --device cpu"
    assert launched(distil, *f"{command} {options}".split()) == 0
    (made,) = map(json.loads, capfd.readouterr().out.splitlines())
    assert [draft["steps"] for draft in made["drafts"]] == [6]


def test_muon_takes_torchs_steps_in_float32_and_its_state() -> None:
    shapes = (48, 16), (16, 48), (24, 24)
    weights = [[nn.Parameter(torch.randn(shape)) for shape in shapes]]
    weights.append([nn.Parameter(weight.detach().clone()) for weight in weights[0]])
    settings = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    torchs, own = (kind(group, **settings) for kind, group in zip((torch.optim.Muon, Muon), weights, strict=True))
    for step in range(4):
        if step == 2:  # a checkpoint of one goes on with the other
            own.load_state_dict(deepcopy(torchs.state_dict()))
        before = [weight.detach().clone() for weight in weights[0]]
        for pair in zip(*weights, strict=True):
            pair[0].grad = torch.randn(pair[0].shape)
            pair[1].grad = pair[0].grad.clone()
            pair[1].data.copy_(pair[0].data)
        torchs.step()
        own.step()
        for first, second, old in zip(*weights, before, strict=True):
            assert (first - second).norm() < 0.04 * (first - old).norm()  # torch's iterates in bfloat16
