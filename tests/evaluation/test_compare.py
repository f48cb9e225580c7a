"""Comparisons on tiny models: counts, identity, continuing after a kill, hit rates, intervals; never times."""

import inspect
import json
import logging
import re
import sys
from html import unescape
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PROMPTS, byte_tokenizer, copied, like, plain, run_command, tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM

import specinfer.loading
from specinfer import Chain, ModelDraft, SpeculativeDecoder, TokenTree, check_model, cli, compare
from specinfer.common.records import RECORDS, SETTINGS
from specinfer.engine.sampling import whole_distribution
from specinfer.errors import InputError, ModelError, SpecinferError
from specinfer.evaluation.compare import Comparison
from specinfer.evaluation.compare.methods import METHODS, OURS, HitRates, OnePath, build_methods, count_hits
from specinfer.evaluation.compare.prompts import read_prompt_file
from specinfer.evaluation.compare.report import bootstrap, summarise
from specinfer.evaluation.compare.runner import common_prefix
from specinfer.evaluation.paper_figures import SPECINFER_TABLE_1
from specinfer.loading import Loaded
from specinfer.tree import Draw, Forest, merge

NEW = 8
PROMPTS_ON_DISK = 12
FIXED = tuple(name for name in METHODS if name not in ("auto", "graphs"))  # whose counts do not depend on time


@pytest.fixture(scope="module")
def models():
    target = tiny_llama(0)
    return {None: target, "near": like(target), "other": tiny_llama(5)}


@pytest.fixture
def asked(models, monkeypatch):
    """Names that the loader was asked for."""
    names = []

    def load(name=None, dtype="auto", device="auto", *_, **__):
        names.append(name)
        tokenizer = byte_tokenizer()
        if name == "other":
            tokenizer.add_tokens(["more"])
        return Loaded(models[name], tokenizer, str(name))

    monkeypatch.setattr(specinfer.loading, "load", load)
    return names


@pytest.fixture
def files(tmp_path):
    """Two sets of prompts: `code` with splits, `chat` without."""
    code = [
        {"id": "a", "split": "dev", "prompt": "abcabcab"},
        {"id": "b", "split": "train", "prompt": "never"},
        {"id": "c", "split": "dev", "prompt": "x = 1; x = "},
    ]
    chat = [{"prompt": "hello"}, {"prompt": "why, why?"}, {"prompt": "a third"}]
    paths = []
    for name, rows in {"code": code, "chat": chat}.items():
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


@pytest.fixture
def run(files, asked):
    """Compare on both sets, small, into a folder."""

    def call(out=None, prompts=files, **options):
        given = {"drafts": ("near", "ngram"), "assistant": "near", "max_new_tokens": NEW, "nodes": 6, "count": 2}
        given |= {"methods": ("autoregressive",), "dtype": "float32", "device": "cpu"}
        return compare(prompts, out=out, **{**given, **options})

    return call


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a command; return exit code, standard output and standard error."""

    def call(*arguments, command="compare"):
        monkeypatch.setattr("sys.argv", ["specinfer", command, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return call


def timeless(value):
    """Everything but seconds."""
    if isinstance(value, dict):
        return {name: timeless(part) for name, part in value.items() if name != "seconds"}
    return [timeless(part) for part in value] if isinstance(value, list) else value


# ---- what is measured ----


def test_every_prompt_has_every_methods_counts(asked, run, tmp_path):
    """In order, prompts of the split only; ids are autoregressive decoding's, whoever drafts."""
    found = run(tmp_path, methods=FIXED, temperatures=(0.0, 1.0), hits=True)
    assert found.settings["methods"] == list(FIXED)
    assert found.settings["target"] == specinfer.loading.DEFAULT_TARGET
    order = [(record["set"], record["id"], record["temperature"]) for record in found.records]
    wanted = [("code", "a"), ("chat", "1"), ("code", "c"), ("chat", "2")]
    assert order == [(*prompt, temperature) for prompt in wanted for temperature in (0.0, 1.0)]
    for record in found.records:
        methods = record["methods"]
        assert list(methods) == list(FIXED)
        assert record["skipped"] == {}
        passes = [methods["autoregressive"][count] for count in ("tokens", "target_passes", "draft_passes")]
        assert passes == [NEW, NEW, 0]
        assert methods["autoregressive"]["tree_sizes"]["nodes_per_step"] == 0
        assert methods["generate"]["target_passes"] == NEW
        assert methods["assisted"]["draft_passes"] > 0
        greedy = record["temperature"] == 0
        for name in FIXED:
            assert methods[name].get("same_as_autoregressive") == (NEW if name in OURS or greedy else None)
            assert "gap" not in methods[name]
        assert [row["draft"] for row in record["hits"]] == ["near", "ngram"]
        assert all(row["positions"] == NEW - 1 for row in record["hits"])
    assert asked == [None, "near", "near"]


@pytest.mark.parametrize(("method", "tree"), [("tree", specinfer.BestFirst(6, 5)), ("sequence", OnePath(5))])
def test_counts_are_the_engines_own(run, models, method, tree):
    """A record agrees with a decoder that runs the same prompt by itself."""
    record = run(methods=(method,), temperatures=(1.0,), depth=5).records[0]
    drafts = [ModelDraft(models["near"], byte_tokenizer(), "near"), "ngram"]
    decoder = SpeculativeDecoder(models[None], byte_tokenizer(), drafts, tree)
    result = decoder.generate("abcabcab", max_new_tokens=NEW, temperature=1.0, top_k=0, top_p=1.0, seed=0)
    own, wanted = record["methods"][method], result.stats.to_dict()
    for field in ("target_passes", "draft_passes", "tree_sizes", "notes"):
        assert own[field] == wanted[field]
    assert [(d["draft"], d["tokens"], d["only"]) for d in own["drafts"]] == [
        (d.draft, d.tokens, d.only) for d in result.stats.drafts
    ]
    assert "hits" not in record


def test_the_sequence_of_one_draft_is_its_chain(run, models):
    """No more draft passes a step than its length; no node beside the path; the tree is no deeper."""
    found = run(drafts="near", methods=("sequence", "tree"), depth=3, nodes=9)
    drafts = [ModelDraft(models["near"], byte_tokenizer(), "near")]
    chain = SpeculativeDecoder(models[None], byte_tokenizer(), drafts, Chain(3))
    result = chain.generate("abcabcab", max_new_tokens=NEW, temperature=0)
    own = found.records[0]["methods"]["sequence"]
    assert [own["target_passes"], own["draft_passes"]] == [result.stats.target_passes, result.stats.draft_passes]
    for record in found.records:
        own = record["methods"]
        assert own["sequence"]["tree_sizes"]["nodes_per_step"] == own["sequence"]["tree_sizes"]["levels_per_step"]
        assert all(row["draft_passes"] <= 3 * row["target_passes"] for row in own.values())
        assert own["tree"]["tree_sizes"]["nodes_per_step"] > own["sequence"]["tree_sizes"]["nodes_per_step"]


def test_the_sequence_of_several_drafts_is_one_of_their_chains():
    """The one on which most tokens are expected, though the other is longer, or begins better."""

    def merged(first, second):
        chains = [([5, 6, 7][: len(q)], q, 0) for q in [first]] + [([8, 9, 6][: len(q)], q, 1) for q in [second]]
        return merge(
            [
                TokenTree.from_nodes(1, tokens, range(len(q)), np.log(q).cumsum(), [[Draw(d, 0)] for _ in q])
                for tokens, q, d in chains
            ]
        )

    for first, second, wanted in [
        ([0.6, 0.1], [0.5, 0.9], [8, 9]),
        ([0.9], [0.3, 0.3, 0.3], [5]),
        ([0.4, 0.5, 0.5], [0.6], [5, 6, 7]),
    ]:
        (tree,) = OnePath(3).fit(Forest.of([merged(first, second)]))
        assert tree.paths() == [wanted]
    bare = TokenTree.root_only(1)
    assert OnePath(3).fit(Forest.of([bare])) == [bare]


def test_one_draft_is_the_first_alone(models):
    """The second draft is not asked."""
    decoder = SpeculativeDecoder(models[None], None, ["ngram", ModelDraft(models["near"])])
    methods, skipped = build_methods(["one-draft", "tree"], decoder, nodes=6, depth=4)
    found = {name: method([[5, 9, 17]], [0], whole_distribution(0, NEW)) for name, method in methods.items()}
    assert skipped == {}
    assert found["one-draft"][0]["draft_passes"] == 0
    assert found["tree"][0]["draft_passes"] > 0


def test_the_adaptive_tree_emits_the_same_ids(run):
    """Its passes depend on time, its ids do not."""
    for record in run(methods=("autoregressive", "auto"), temperatures=(0.0, 1.0), count=1).records:
        assert record["methods"]["auto"]["same_as_autoregressive"] == NEW
        assert 1 <= record["methods"]["auto"]["target_passes"] <= NEW


def test_the_gap_is_the_targets_where_ids_first_differ(run, models, monkeypatch):
    """Of a plain pass over the prompt and what both share; greedy only; the largest is reported."""
    model = models[None]
    real = model.generate

    def other(prompt, **options):
        output = real(prompt, **options)
        output[0, prompt.shape[1] + 4] += 1
        return output

    monkeypatch.setattr(model, "generate", other)
    found = run(methods=("autoregressive", "generate", "tree"), temperatures=(0.0, 1.0))
    gaps = []
    for record in found.records:
        own = record["methods"]["generate"]
        if record["temperature"]:
            assert "gap" not in own
            continue
        assert own["same_as_autoregressive"] == 4
        text = {"a": "abcabcab", "c": "x = 1; x = ", "1": "hello", "2": "why, why?"}[record["id"]]
        ids = byte_tokenizer()(text)["input_ids"]
        logits = model(real(torch.tensor([ids]), max_new_tokens=4)).logits
        first, second = logits[0, -1].sort(descending=True).values[:2].tolist()
        assert own["gap"] == pytest.approx(first - second)
        gaps.append(own["gap"])
        assert "gap" not in record["methods"]["tree"]
    greedy = found.summary()["groups"][0]["methods"]
    assert greedy["generate"]["largest_gap"] == max(gaps)
    assert greedy["generate"]["identical"] == 0
    assert greedy["tree"]["identical"] == 1
    assert "largest_gap" not in greedy["tree"]


# ---- what cannot run ----


def test_without_an_assistant_a_draft_that_is_a_language_model_assists(run, asked):
    """The first one; n-grams and heads cannot."""
    options = {"methods": ("autoregressive", "assisted"), "assistant": None, "count": 1}
    (record, _) = run(drafts=("ngram", "near"), **options).records
    assert record["methods"]["assisted"]["draft_passes"] > 0
    assert asked == [None, "near"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"assistant": None, "drafts": "ngram"}, "no assistant was given"),
        ({"assistant": "other"}, "'more' to the draft"),
    ],
)
def test_assisted_generation_is_left_out_where_it_cannot_run(run, logged, options, reason):
    """With the reason: in a warning, in the records, in the summary, under the table."""
    found = run(methods=("autoregressive", "assisted"), **options)
    assert all(list(record["methods"]) == ["autoregressive"] for record in found.records)
    assert list(found.summary()["skipped"]) == ["assisted"]
    for told in (found.summary()["skipped"]["assisted"], " ".join(found.table().split()), logged.getvalue()):
        assert reason in told


def test_what_transformers_refuses_is_left_out(run, models, monkeypatch):
    """In its own words, at whichever temperature it refuses; our methods go on."""
    real = models[None].generate

    def refuse(*args, **options):
        if "prompt_lookup_num_tokens" in options and options["do_sample"]:
            raise ValueError("this cache\ncannot be cut")
        return real(*args, **options)

    monkeypatch.setattr(models[None], "generate", refuse)
    found = run(methods=("generate", "prompt-lookup", "tree"), temperatures=(0.0, 1.0))
    assert found.summary()["skipped"] == {"prompt-lookup": "transformers refuses: this cache cannot be cut"}
    assert all(list(record["methods"]) == ["generate", "tree"] for record in found.records)
    with pytest.raises(InputError, match=r"none of the methods can run .*cannot be cut"):
        run(methods=("prompt-lookup",), temperatures=(1.0,))


def test_a_model_that_scores_chains_only_has_no_trees(run, models, monkeypatch):
    """The sequence stays, and everything that needs no tree."""
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "vocab_size": 264, "eos_token_id": None}
    config = AutoConfig.for_model("mpt", **sizes, attn_config={"alibi": True})
    monkeypatch.setitem(models, None, AutoModelForCausalLM.from_config(config).eval())
    found = run(methods=FIXED, drafts="ngram", assistant=None, hits=True)
    assert list(found.records[0]["methods"]) == ["autoregressive", "sequence", "generate"]
    skipped = found.summary()["skipped"]
    assert list(skipped) == ["tree", "one-draft", "gate", "assisted", "prompt-lookup"]
    assert skipped["tree"].startswith("MptForCausalLM can score chains only")
    assert skipped["prompt-lookup"].startswith("transformers refuses: ")


# ---- hit rates ----


@pytest.mark.parametrize("prompt", PROMPTS)
def test_hit_rates_equal_a_fresh_pass_at_every_position(models, prompt):
    """The draft's ranking of the whole text, computed at once."""
    target, draft = models[None], models["near"]
    decoder = SpeculativeDecoder(target, None, [ModelDraft(draft), "ngram"])
    found = HitRates(decoder).count(prompt, 0, whole_distribution(0, NEW))[0]
    chosen = plain(target, prompt, NEW)
    with torch.inference_mode():
        logits = draft(torch.tensor([prompt + chosen])).logits[0, len(prompt) - 1 : -2]  # at all but the last
    ranks = logits.argsort(-1, descending=True).argsort(-1)[torch.arange(NEW - 1), chosen[:-1]]
    assert found["positions"] == NEW - 1
    assert found["hits"] == [int((ranks < k).sum()) for k in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_itself_always_hits(temperature):
    """Greedy, and sampling, where a draft ranks by the target's noise (few tokens: it sees that of the likeliest)."""
    small = tiny_llama(0, vocab=40)
    decoder = SpeculativeDecoder(small, None, [ModelDraft(small)])
    (found,) = HitRates(decoder).count([5, 9, 17], 3, whole_distribution(temperature, NEW))
    assert found == {"draft": "draft", "positions": NEW - 1, "hits": [NEW - 1] * 5}


def test_an_end_of_sequence_token_is_a_position(models):
    """The draft was asked what follows the token before it."""
    decoder = SpeculativeDecoder(models[None], None, [ModelDraft(models[None])])
    eos = plain(models[None], PROMPTS[0], NEW)[5]
    end = plain(models[None], PROMPTS[0], NEW).index(eos) + 1
    (found,) = HitRates(decoder).count(PROMPTS[0], 0, whole_distribution(0, NEW) | {"eos_token_id": eos})
    assert found["hits"] == [end] * 5


def test_hits_count_places():
    """First, third, absent; what has no choice is left out."""
    found = count_hits([[7, 1, 2], [3, 4, 7], [1], [9]], [7, 7, 2])
    assert found == {"positions": 3, "hits": [1, 1, 2, 2, 2]}


def test_a_draft_that_reads_the_targets_states_keeps_its_taps_and_target(models):
    """What a probe does not know goes to the draft: `aux_layers`, `attach`, the states of every commit."""
    seen = []

    class Reader(ModelDraft):
        aux_layers = (1,)

        def attach(self, target, tokenizer=None):
            seen.append(target.model)
            return self

        def open(self, context):
            session = super().open(context)
            commit = session.commit
            session.commit = lambda tokens, states, scored: (seen.append(states), commit(tokens, states, scored))
            return session

    HitRates(SpeculativeDecoder(models[None], None, [Reader(models["near"])])).count(
        PROMPTS[0], 0, {"max_new_tokens": 4}
    )
    assert seen[:2] == [models[None]] * 2
    assert [states[0].shape for states in seen[2:5]] == [(1, 1, 32)] * 3


# ---- the folder ----


def test_a_cut_file_is_continued(run, tmp_path, logged):
    """Killed in the middle of a line: that prompt is measured again, and the counts are an uninterrupted run's."""
    options = {"methods": ("autoregressive", "tree"), "temperatures": (0.0, 1.0), "hits": True}
    whole = run(tmp_path, **options)
    path, left = tmp_path / RECORDS, []
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:100])

    again = run(tmp_path, progress=lambda _, done, total, __: left.append((done, total)), **options)
    assert "the last line was cut off" in logged.getvalue()
    assert left == [(done, 8) for done in range(3, 9)]
    assert timeless(again.records) == timeless(whole.records)
    assert path.read_bytes().splitlines(keepends=True)[:3] == lines[:3]
    assert Comparison.read(tmp_path) == again


@pytest.fixture
def on_disk(tmp_path):
    """A target that the real loader finds in a folder, and many prompts."""
    tiny_llama(0).float().save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    rows = [json.dumps({"prompt": f"{i}, {i + 1}, {i}, "}) + "\n" for i in range(PROMPTS_ON_DISK)]
    (tmp_path / "many.jsonl").write_text("".join(rows))
    return tmp_path


@pytest.mark.parametrize("max_rows", [1, 3])
def test_a_killed_run_loses_nothing(on_disk, call, monkeypatch, max_rows):
    """Kill -9 while prompts are being finished; the same command goes on, and all is as if it had never stopped."""
    out, path = on_disk / "out", on_disk / "out" / RECORDS
    options = ["--target", on_disk / "target", "--draft", "ngram", "--count", PROMPTS_ON_DISK, "--max-new-tokens", NEW]
    options += ["--prompts", on_disk / "many.jsonl", "--methods", "autoregressive,sequence,tree", "--dtype", "float32"]
    options += ["--max-rows", max_rows]
    started = monotonic()
    with copied(run_command, "compare", *options, "--out", out) as process:
        while not (path.exists() and path.read_bytes().count(b"\n") >= 2):
            assert process.exitcode is None
            assert monotonic() - started < 120
            sleep(0.001)
    survived = path.read_bytes()
    assert 2 <= survived.count(b"\n") < PROMPTS_ON_DISK
    path.write_bytes(survived + b'{"set": "many", "pla')  # what a kill while writing leaves
    monkeypatch.setattr(logging.root, "handlers", [])  # which would keep warnings from the terminal
    code, text, err = call(*options, "--out", out)
    assert (code, err.count("\n")) == (0, 1)
    assert f"{path}: the last line was cut off" in err
    assert f"many, T = 0, {PROMPTS_ON_DISK} prompts" in text
    assert path.read_bytes().startswith(survived[: survived.rindex(b"\n") + 1])
    call(*options, "--out", on_disk / "whole")
    assert timeless(Comparison.read(out).records) == timeless(Comparison.read(on_disk / "whole").records)


def test_what_is_finished_is_not_measured_again(asked, run, tmp_path):
    """Nor are models loaded."""
    first = run(tmp_path)
    before = (tmp_path / RECORDS).read_bytes()
    asked.clear()
    assert run(tmp_path) == first
    assert asked == []
    assert (tmp_path / RECORDS).read_bytes() == before


def test_each_prompt_is_on_the_disk_when_the_next_begins(run, tmp_path):
    """What a kill leaves behind."""
    seen = []

    def progress(_, done, *__):
        seen.append((done, (tmp_path / RECORDS).read_bytes().count(b"\n")))

    run(tmp_path, temperatures=(0.0, 1.0), progress=progress)
    assert seen == [(done, done) for done in range(9)]


def test_every_method_warms_up_once(run, models, tmp_path):
    """Before the first prompt of a run, resumed or not: one generation more than there are prompts."""
    passes, path = [], tmp_path / RECORDS
    hook = models[None].register_forward_pre_hook(lambda *_: passes.append(1))
    check_model(models[None])  # once for each model, hooks included
    passes.clear()
    run(tmp_path, methods=("generate",))
    extra = len(passes) - 5 * NEW  # the checks of a decoder
    passes.clear()
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    run(tmp_path, methods=("generate",))
    hook.remove()
    assert len(passes) == 3 * NEW + extra


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_new_tokens": 5}, "max_new_tokens was 8, now 5"),
        ({"methods": ("tree",)}, "methods was"),
        ({"drafts": ("near",)}, 'drafts was ["near", "ngram"], now ["near"]'),
        ({"dtype": "bfloat16"}, 'dtype was "float32", now "bfloat16"'),
        ({"count": 1}, "count was 2, now 1"),
        ({"depth": 3}, "depth was 8, now 3"),
    ],
)
def test_other_settings_are_refused(asked, run, tmp_path, change, named):
    """By name, before a model is loaded, and without touching the folder."""
    run(tmp_path)
    before = (tmp_path / RECORDS).read_bytes()
    asked.clear()
    with pytest.raises(InputError) as caught:
        run(tmp_path, **change)
    assert named in str(caught.value)
    assert (asked, (tmp_path / RECORDS).read_bytes()) == ([], before)


def test_other_prompts_are_refused(run, files, tmp_path):
    """Same file names, same counts, other text."""
    run(tmp_path)
    files[1].write_text(files[1].read_text().replace("hello", "hullo"))
    with pytest.raises(InputError, match=r'prompts\.chat was "\w{16}", now "\w{16}"'):
        run(tmp_path)


def test_other_weights_in_the_same_folder_are_refused(models, run, tmp_path):
    """A head that was trained anew, say; a folder that was only moved is the same one."""
    folder, other = tmp_path / "near", tmp_path / "far"
    for place, byte in ((folder, b"a"), (other, b"b")):
        place.mkdir()
        (place / "model.safetensors").write_bytes(bytes(1 << 21) + byte * (1 << 21))  # they begin alike
    models[str(folder)] = models["near"]
    run(tmp_path / "out", drafts=(str(folder),))
    run(tmp_path / "out", drafts=(str(folder),))
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match=rf"weights\.{folder} was \"near \w{{16}}\", now \"near \w{{16}}\""):
        run(tmp_path / "out", drafts=(str(folder),))


def test_a_run_killed_before_its_first_record_begins_anew(run, tmp_path):
    """With its settings written, or without."""
    wanted = run(tmp_path / "out")
    for lost in (RECORDS, SETTINGS):
        for name in {RECORDS, lost}:
            (tmp_path / "out" / name).unlink()
        assert timeless(run(tmp_path / "out").records) == timeless(wanted.records)
    (tmp_path / "out" / RECORDS).write_bytes(b'{"set"')
    assert timeless(run(tmp_path / "out").records) == timeless(wanted.records)


def test_damage_before_the_last_line_is_refused(run, tmp_path):
    """It is no trace of a kill."""
    run(tmp_path)
    lines = (tmp_path / RECORDS).read_text().splitlines(keepends=True)
    (tmp_path / RECORDS).write_text("".join([lines[0], lines[1][:30] + "\n", *lines[2:]]))
    for attempt in (Comparison.read, run):
        with pytest.raises(InputError, match="line 2 is damaged"):
            attempt(tmp_path)


def test_a_whole_last_line_that_is_no_record_is_refused(run, tmp_path):
    """It was not cut off, so it is not dropped."""
    run(tmp_path)
    with (tmp_path / RECORDS).open("a") as file:
        file.write('{"set": "mine"}\n')
    before = (tmp_path / RECORDS).read_bytes()
    for attempt in (Comparison.read, run):
        with pytest.raises(InputError, match=r"line \d+ is damaged"):
            attempt(tmp_path)
    assert (tmp_path / RECORDS).read_bytes() == before


def test_damaged_records_are_one_line(run, tmp_path):
    """Whatever stands in the place of a value that is read."""
    run(tmp_path)
    path = tmp_path / RECORDS
    lines = path.read_text().splitlines()
    record = json.loads(lines[0])
    refused = []
    for name in record:
        for value in (None, "x", [], {}, [[1]], -1, {"tree": {}}, {"tree": None}, {"tree": []}):
            path.write_text("\n".join([json.dumps({**record, name: value}), *lines[1:]]) + "\n")
            try:
                str(Comparison.read(tmp_path))
            except InputError as error:
                refused.append(str(error))
    assert len(refused) > 8
    assert all(str(tmp_path) in line and "\n" not in line for line in refused)


def test_two_runs_do_not_write_to_one_folder(run, tmp_path):
    """The second is refused while the first is at work, and every prompt has one record."""

    def progress(*_):
        with pytest.raises(InputError, match=f"another run writes to {tmp_path}"):
            run(tmp_path)

    found = run(tmp_path, progress=progress)
    places = [(record["set"], record["place"], record["temperature"]) for record in found.records]
    assert len(set(places)) == len(places) == (tmp_path / RECORDS).read_bytes().count(b"\n")


@pytest.mark.parametrize("name", [RECORDS, SETTINGS])
def test_other_peoples_files_are_not_touched(run, tmp_path, name):
    """Not written by a comparison: refused as they are."""
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text('["mine"]\n')
    for attempt in (Comparison.read, run):
        with pytest.raises(InputError, match="out"):
            attempt(out)
    assert {path.name: path.read_text() for path in out.iterdir()} == {name: '["mine"]\n', ".lock": ""}


def test_settings_under_which_nothing_was_measured_are_replaced(run, tmp_path, monkeypatch):
    """A mistake in the first command does not spoil its folder."""

    def load(name, *_, **__):
        raise ModelError(f"no {name}")

    with monkeypatch.context() as patched:
        patched.setattr(specinfer.loading, "load", load)
        with pytest.raises(ModelError, match="no nowhere"):
            run(tmp_path, target="nowhere")
    assert run(tmp_path).records


def test_a_folder_without_what_reports_need_is_no_comparison(tmp_path):
    for settings, records, message in (
        ("{}", "", "holds no records"),
        ('{"target": "x"}', '{"methods": {}}', "holds no records"),  # cut off
        ('{"target": "x"}', '{"methods": {}}\n', "line 1 is damaged"),
    ):
        (tmp_path / SETTINGS).write_text(settings)
        (tmp_path / RECORDS).write_text(records)
        with pytest.raises(InputError, match=message):
            Comparison.read(tmp_path)


def test_a_full_disk_keeps_what_was_finished(run, tmp_path, monkeypatch):
    """One line that says so; the same plan goes on later."""
    calls = []

    def fsync(_):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fsync)
        with pytest.raises(SpecinferError, match="disk is full"):
            run(tmp_path)
    assert len(run(tmp_path).records) == 4


# ---- the result ----


def record(name, place, temperature=0.0, **methods):
    """A made-up record: method -> (tokens, passes, seconds, prefill, bookkeeping)."""
    rows = {}
    for method, (tokens, passes, total, prefill, rest) in methods.items():
        stages = {"total": total, "prefill": prefill, "target": total - prefill - rest, "draft": 0, "bookkeeping": rest}
        row = {"tokens": tokens, "target_passes": passes, "draft_passes": 3 * passes, "seconds": stages}
        choices = {"nodes_per_step": place, "levels_per_step": 1, "plain_steps": 2}
        drafts = [{"draft": "d", "tokens": 5, "only": place, "passes": 7, "seconds": 0.5}]
        same = {"same_as_autoregressive": tokens if place else 3} | ({} if place else {"gap": 0.125})
        rows[method] = {**row, **(same if "autoregressive" in methods else {}), "tree_sizes": choices, "drafts": drafts}
    hit = [{"draft": "d", "positions": 10, "hits": [4 + place, 5, 6, 7, 8]}]
    told = {"set": name, "place": place, "temperature": temperature, "skipped": {}}
    return {**told, "methods": rows, "hits": hit}


MADE_UP = [
    record("cp", 0, autoregressive=(10, 10, 2.0, 0.0, 0.1), tree=(10, 4, 1.0, 0.2, 0.1)),  # twice as fast
    record("cp", 1, autoregressive=(20, 20, 2.0, 0.0, 0.1), tree=(20, 11, 0.5, 0.1, 0.1)),  # four times
    record("own", 2, autoregressive=(10, 10, 1.0, 0.0, 0.1), tree=(10, 10, 2.0, 0.2, 0.1)),  # half
]


def test_a_summary_by_hand():
    """Totals for passes, medians of ratios for speed, the least ratio, shares."""
    figures = summarise({"any": 1}, MADE_UP)
    assert [(group["set"], group["prompts"]) for group in figures["groups"]] == [("all", 3), ("cp", 2), ("own", 1)]
    overall, cp, own = figures["groups"]
    tree = overall["methods"]["tree"]
    assert tree["tokens_per_pass"][0] == 40 / 25
    assert tree["draft_passes_per_target_pass"] == 3
    assert tree["ratio"]["autoregressive"][0] == 2
    assert tree["overhead"][0] == pytest.approx(40 / 25 / 2 - 1)
    assert own["methods"]["tree"]["overhead"] == [1, 1, 1]  # a token a pass, at half the speed
    assert tree["worst_to_autoregressive"] == 0.5
    assert tree["tokens_per_second"] == 10
    assert tree["bookkeeping"] == pytest.approx(0.3 / 3.0)
    assert tree["ms_per_token"]["total"] == pytest.approx(1000 * 3.5 / 40)
    assert tree["identical"] == pytest.approx(2 / 3)
    assert tree["same_as_autoregressive"] == pytest.approx(33 / 3)
    assert tree["largest_gap"] == 0.125
    assert "largest_gap" not in own["methods"]["tree"]
    assert tree["tree_sizes"] == {"nodes_per_step": (11 + 20) / 25, "levels_per_step": 1, "plain_steps": 6}
    assert tree["drafts"] == [{"draft": "d", "tokens": 15, "only": 3, "passes": 21, "seconds": 1.5}]
    assert {"worst_to_autoregressive", "overhead"}.isdisjoint(overall["methods"]["autoregressive"])
    assert "autoregressive" not in overall["methods"]["autoregressive"]["ratio"]
    assert overall["hits"][0]["rates"] == pytest.approx([15 / 30, 0.5, 0.6, 0.7, 0.8])
    assert cp["methods"]["tree"]["tokens_per_pass"][0] == 2
    assert cp["specinfer_table_1"] == list(SPECINFER_TABLE_1[0.0]["cp"])
    assert "specinfer_table_1" not in own


def test_a_method_that_was_left_out_later_has_no_figures():
    """A run that was continued where transformers refuses, say: what all prompts have is compared."""
    rows = [record("a", 0, autoregressive=(9, 9, 1.0, 0.0, 0.1), generate=(9, 9, 2.0, 0.0, 0.1))]
    rows += [record("a", 1, autoregressive=(9, 9, 1.0, 0.0, 0.1)) | {"skipped": {"generate": "no"}}]
    figures = summarise({}, rows)
    assert list(figures["groups"][0]["methods"]) == ["autoregressive"]
    assert figures["skipped"] == {"generate": "no"}


def test_the_table_says_on_which_sets_tree_beats_sequence():
    """With both figures, their ratio's interval and what each spent on drafting; nothing where one did not run."""
    lines = {"tree": (20, 5, 1.0, 0.0, 0.1), "sequence": (20, 8, 1.0, 0.0, 0.1)}
    rows = [record("a", 0, **lines), record("b", 0, tree=lines["sequence"], sequence=lines["tree"])]
    rows += [record("c", 0, tree=lines["tree"], sequence=lines["tree"])]
    rows[0]["methods"]["tree"]["draft_passes"] = 11
    rows[1]["methods"]["tree"]["draft_passes"] = 25
    settings = compare_settings()
    text = Comparison(settings, rows).table()
    verdict = "tree beats sequence in tokens per target pass in 1 of 4 rows, with no more draft passes a step in 3"
    assert verdict in " ".join(text.split())
    for line in (
        "all sets, T = 0: tree 3.33 = sequence 3.33, at 2.8 and 3.0 draft passes; x 1.00 [0.62, 1.60]",
        "a, T = 0: tree 4.00 > sequence 2.50, at 2.2 and 3.0 draft passes; x 1.60",
        "b, T = 0: tree 2.50 < sequence 4.00, at 3.1 and 3.0 draft passes; x 0.62",
    ):
        assert line in text
    assert "beats" not in Comparison(settings, MADE_UP).table()


def wide_records(prompts):
    """Two sets, with every baseline, and names that are long."""
    figures = (10, 4, 1.0, 0.2, 0.1)
    methods = dict.fromkeys(("autoregressive", "generate", "assisted", "prompt_lookup", "sequence", "tree"), figures)
    rows = [record(name, i, **methods) for name in ("instructions", "cp") for i in range(prompts)]
    for number, row in enumerate(rows):
        row["methods"]["prompt-lookup"] = row["methods"].pop("prompt_lookup")
        row["methods"]["tree"] = row["methods"]["tree"] | {"target_passes": 3 + number % 2}
        row["skipped"] = {"assisted-tree": "it needs a draft that is a language model, and there is none; " * 3}
    return rows


def test_tables_fit_a_hundred_columns():
    """Wide ones are continued below, with the methods' names; nothing is cut."""
    settings = compare_settings() | {
        "cpu": "Some Processor with a Long Name at 2.80 GHz",
        "drafts": ["head-1", "x" * 40],
    }
    text = Comparison(settings, wide_records(3)).table()
    assert max(map(len, text.splitlines())) <= 100
    for header in ("tokens/pass", "x autoregressive", "x prompt-lookup", "prefix  gap", "bookkeeping", "its share"):
        assert header in text
    heads = [line for line in text.splitlines() if line.split()[:1] == ["method"]]
    assert len(heads) >= 6  # three sets, two parts at least


def test_one_prompt_has_no_interval():
    """Nothing varies, so there is no figure of how much."""
    text = Comparison(compare_settings(), wide_records(1)[:1]).table()
    assert "instructions, T = 0, 1 prompt\n" in text
    assert "95 %" not in text
    assert not re.search(r"\d \[", text)
    assert re.search(r"\d \[", Comparison(compare_settings(), wide_records(3)).table())


def test_a_notebook_shows_tables():
    """All that the text says, as HTML; what comes from files is text in it."""
    rows = wide_records(3)
    for row in rows:
        row["set"] = row["set"].replace("cp", "<b>cp")
    found = Comparison(compare_settings(), rows)
    shown = found._repr_html_()
    assert shown.count("<table>") == 9  # three of each set
    assert "<b>cp" not in shown
    words = set(re.findall(r"[\w.%]+", re.sub(r"<[^>]*>", " ", unescape(shown.replace("&lt;b&gt;", "")))))
    assert set(re.findall(r"[\w.%]+", found.table().replace("<b>", ""))) <= words


def compare_settings():
    words = "target drafts assistant dtype max_new_tokens nodes depth max_rows device cpu threads torch transformers"
    return dict.fromkeys(words.split(), 1)


def test_a_data_frame_has_a_row_per_set_temperature_and_method(monkeypatch):
    """Figures by name, intervals in three columns; without pandas, what to install."""
    rows = [*MADE_UP, record("cp", 0, 1.0, autoregressive=(10, 10, 2.0, 0.0, 0.1))]
    found = Comparison(compare_settings(), rows)
    assert repr(found) == f"Comparison({len(rows)} records)"
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    frame = found.to_pandas()
    assert [(row["set"], row["temperature"], row["method"]) for row in frame] == [
        *((name, 0.0, method) for name in ("all", "cp", "own") for method in ("autoregressive", "tree")),
        ("cp", 1.0, "autoregressive"),
    ]
    tree = frame[1]
    assert tree["tokens_per_pass"] == 40 / 25
    assert tree["tokens_per_pass_low"] <= tree["tokens_per_pass"] <= tree["tokens_per_pass_high"]
    assert tree["ratio_autoregressive"] == 2
    assert tree["ms_per_token_total"] == pytest.approx(1000 * 3.5 / 40)
    assert all(isinstance(value, str | int | float) for row in frame for value in row.values())
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="pip install pandas"):
        found.to_pandas()


def test_a_comparison_is_its_settings_and_records(run, tmp_path):
    """As a dict, as JSON, from its folder; the text is the table."""
    found = run(tmp_path, methods=("autoregressive", "tree"))
    assert Comparison(**json.loads(json.dumps(found.to_dict()))) == found
    assert Comparison.read(str(tmp_path)) == found
    assert str(found) == found.table()
    assert json.loads(json.dumps(found.summary()))["records"] == 4


def test_bootstrap_intervals():
    """They hold the value, vanish without spread, widen with it, shrink with more prompts, and repeat exactly."""

    def mean(values):
        return values.mean(-1)

    assert bootstrap(np.full(9, 3.0), mean) == [3, 3, 3]
    assert bootstrap(np.array([2.0]), mean) == [2, 2, 2]
    rng = np.random.default_rng(5)
    few, many = rng.normal(size=20), rng.normal(size=2000)
    value, low, high = bootstrap(few, mean)
    assert low < value < high
    assert value == few.mean()
    assert high - low == pytest.approx(2 * 1.96 * few.std() / 20**0.5, rel=0.15)
    assert bootstrap(3 * few, mean) == pytest.approx([3 * value, 3 * low, 3 * high])
    assert np.ptp(bootstrap(many, mean)[1:]) < (high - low) / 5
    assert bootstrap(few, mean) == [value, low, high]


def test_common_prefix():
    """Up to the first difference or the shorter one's end."""
    assert [common_prefix(a, [1, 2, 3]) for a in ([1, 2, 3], [1, 2, 3, 4], [1, 5, 3], [], [2])] == [3, 3, 1, 0, 0]


def test_prompts_are_texts_and_paths(run, files):
    """Texts are a set of their own, all of them; one may stand alone."""
    found = run(prompts=[files[0], "hello", "why?", "third"])
    assert [(row["set"], row["id"]) for row in found.records] == [
        *(("code", "a"), ("texts", "1"), ("code", "c"), ("texts", "2"), ("texts", "3"))
    ]
    assert [row["set"] for row in run(prompts="hello").records] == ["texts"]
    for prompts, message in [([], "prompts"), (" ", "no prompt can be used"), ("a.jsonl", "give it as pathlib")]:
        with pytest.raises(InputError, match=message):
            run(prompts=prompts)


# ---- the commands ----


def test_the_command_measures_and_reports(call, asked, files, tmp_path):
    """JSON of everything; --report says the same again without running anything."""
    out = tmp_path / "out"
    options = ["--draft", "near", "--count", 1, "--max-new-tokens", NEW, "--methods", "autoregressive,sequence,tree"]
    code, printed, err = call("--prompts", files[0], "--prompt", "hello", *options, "--out", out, "--json")
    assert (code, err) == (0, "")
    figures = json.loads(printed)
    assert figures["records"] == 2
    assert figures["groups"][0]["methods"]["autoregressive"]["tokens_per_pass"] == [1, 1, 1]
    asked.clear()
    assert json.loads(call("--out", out, "--report", "--json")[1]) == figures
    assert "all sets, T = 0, 2 prompts" in call("--out", out, "--report")[1]
    assert "texts, T = 0: tree" in call("--out", out, "--report", command="bench")[1]
    assert asked == []


def test_bench_is_compare_with_other_defaults(call, asked, files, tmp_path):
    """All methods but those for GPUs, both temperatures, hit rates; options that are given come first."""
    out = ["--out", tmp_path / "out"]
    options = ["--draft", "near", "--count", 1, "--max-new-tokens", NEW, *out]
    table = call("--prompts", files[0], *options, "--preset", "bench")[1]
    words = ("code, T = 0, 1 prompt", "code, T = 1, 1 prompt", "x generate", "overhead", "verify", "top 5", "near")
    assert [word for word in (*words, *FIXED, "auto") if word not in table] == []
    figures = json.loads(call(*out, "--report", "--json", command="bench")[1])
    assert (figures["settings"]["max_new_tokens"], figures["settings"]["count"]) == (NEW, 1)
    assert figures["settings"]["methods"] == [name for name in METHODS if name != "graphs"]
    assert figures["skipped"] == {"one-draft": "there is one draft only: the method tree is that"}
    assert [group["temperature"] for group in figures["groups"]] == [0, 1]
    assert "hits" in figures["groups"][0]
    assert figures["settings"]["nodes"] == 32


def test_the_presets_name_options_and_bench_is_one(call, monkeypatch):
    """Every name is an option's; the command `bench` shows the same defaults as the preset."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")
    for name, defaults in cli.measure.PRESETS.items():
        assert defaults.keys() <= inspect.signature(cli.flattened(cli.measure.compare)).parameters.keys()
        shown = (call("--preset", name, "--help"), call("--help", command=name))
        listed = [[line for line in out.splitlines() if "[default: " in line] for _, out, _ in shown]
        assert listed[0] == listed[1] != []
    code, _, err = call("--out", "out", "--preset", "none")
    assert (code, "choose bench" in err) == (2, True)


def test_defaults_of_methods_fit_a_terminal(call, monkeypatch):
    """None of them is cut off in the help of either command."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    for command in ("compare", "bench"):
        assert "…" not in call("--help", command=command)[1]


def test_the_command_has_the_functions_defaults():
    """Written twice, since the command line must not wait for torch."""
    command = {name: p.default for name, p in inspect.signature(cli.flattened(cli.measure.compare)).parameters.items()}
    function = {name: p.default for name, p in inspect.signature(compare).parameters.items()}
    assert command["methods"].split(", ") == list(function["methods"])
    assert command["temperature"] == list(function["temperatures"])
    for name in ("nodes", "depth", "max_new_tokens", "count", "split", "max_rows", "dtype", "device", "hits"):
        assert command[name] == function[name]


ERRORS = {
    "no prompts": ([], "give --prompts FILE or --prompt TEXT"),
    "missing file": (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    "empty file": (["--prompts", "empty.jsonl"], "empty.jsonl holds no prompts"),
    "no such split": (["--prompts", "good.jsonl", "--split", "test"], "split 'test'"),
    "not JSON": (["--prompts", "words.jsonl"], "words.jsonl, line 2 is not JSON"),
    "not an object": (["--prompts", "list.jsonl"], "list.jsonl, line 1"),
    "not text": (["--prompts", "bytes.jsonl"], "cannot read bytes.jsonl"),
    "a set called all": (["--prompts", "all.jsonl"], "a set of prompts is called 'all'"),
    "the same set twice": (["--prompts", "good.jsonl", "--prompts", "good.jsonl"], "none twice"),
    "unknown method": (["--prompts", "good.jsonl", "--methods", "tree,magic"], "'magic' is unknown"),
    "method twice": (["--prompts", "good.jsonl", "--methods", "tree,tree"], "none twice"),
    "no count": (["--prompts", "good.jsonl", "--count", "-1"], "--count"),
    "no rows": (["--prompts", "good.jsonl", "--max-rows", "0"], "--max-rows"),
    "no nodes": (["--prompts", "good.jsonl", "--nodes", "0"], "nodes=0"),
    "no depth": (["--prompts", "good.jsonl", "--depth", "0"], "depth=0"),
    "one token": (["--prompts", "good.jsonl", "--max-new-tokens", "1"], "max_new_tokens=1"),
    "cold": (["--prompts", "good.jsonl", "--temperature", "-1"], "temperature=-1.0"),
    "unknown dtype": (["--prompts", "good.jsonl", "--dtype", "fp8"], "'fp8'"),
    "nothing to report": (["--report"], "out holds no records of a comparison"),
    "a file": (["--prompts", "good.jsonl", "--out", "good.jsonl"], "cannot write good.jsonl"),
    "below a file": (["--prompts", "good.jsonl", "--out", "good.jsonl/out"], "cannot write good.jsonl/out"),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_are_one_line_before_a_model_is_loaded(call, asked, tmp_path, monkeypatch, arguments, message):
    """Exit code 2, nothing on standard output."""
    monkeypatch.chdir(tmp_path)
    contents = {
        "empty": "",
        "good": '{"prompt": "hi"}\n\n{"prompt": "ho", "split": "dev"}\n',
        "words": '{"prompt": "hi"}\nwords\n',
        "list": "[1]\n",
    }
    for name, content in contents.items():
        Path(f"{name}.jsonl").write_text(content)
    Path("bytes.jsonl").write_bytes(b"\xff\xfe\n")
    if "good.jsonl" in arguments and "test" in arguments:
        Path("good.jsonl").write_text('{"prompt": "ho", "split": "dev"}\n')
    code, out, err = call("--out", "out", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert asked == []


BAD = {
    "long": "x" * 300,
    "blank": " ",
    "number": 7,
    "half a character": "\ud800",
    "several": ["a", "b"],
    "messages": [{"role": "user", "content": "this tokenizer has no chat template"}],
    "another vocabulary": [1, 999],
}


@pytest.fixture
def mixed(tmp_path):
    """A file of bad prompts among good ones, one of which is token ids, and a line without any."""
    rows = [{"id": name, "prompt": prompt} for name, prompt in BAD.items()]
    rows = [{"prompt": "good"}, *rows, {"text": "none"}, {"prompt": [5, 9, 17]}]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("max_rows", [1, 4])
def test_bad_prompts_are_reported_in_their_place_and_the_others_go_on(run, mixed, tmp_path, logged, max_rows):
    """They are not tried again, and the table names the first of them."""
    out, options = tmp_path / "out", {"prompts": [mixed], "count": 0, "temperatures": (0.0, 1.0)}
    found = run(out, max_rows=max_rows, **options)
    refused = found.summary()["refused"]
    assert [refusal["id"] for refusal in refused] == [*BAD, str(len(BAD) + 2)]
    errors = {refusal["id"]: refusal["error"] for refusal in refused}
    for name, words in {"long": "context of 256", "blank": "is empty", "several": "list of prompts"}.items():
        assert f"prompt {name} of mixed: " in errors[name]
        assert words in errors[name]
        assert f"prompt {name} of mixed is left out" in logged.getvalue()
    assert found.summary()["records"] == 2 * 2
    assert [group["prompts"] for group in found.summary()["groups"]] == [2, 2]
    table = " ".join(found.table().split())
    assert " ".join(errors["long"].split()) in table
    assert "refused: 3 more" in table
    before = (out / RECORDS).read_bytes()
    assert run(out, max_rows=max_rows, **options) == found
    assert (out / RECORDS).read_bytes() == before


def test_if_no_prompt_can_be_used_the_error_says_why(run, call, tmp_path):
    """On the command line, too, in one line; the reasons are kept."""
    with pytest.raises(InputError, match=r"no prompt can be used: prompt 1 of texts: .*context of 256"):
        run(tmp_path / "out", prompts=["x" * 300, " "])
    assert (tmp_path / "out" / RECORDS).read_bytes().count(b"\n") == 2
    options = ["--draft", "near", "--max-new-tokens", NEW, "--methods", "tree", "--out", tmp_path / "other"]
    code, out, err = call("--prompt", " ", *options)
    assert (code, out) == (2, "")
    assert "no prompt can be used: prompt 1 of texts: the prompt is empty" in err


# ---- several prompts at a time ----

ROWS = ("autoregressive", "sequence", "tree")


def counts(found, *names):
    """What does not depend on how many prompts are decoded at a time, by prompt."""
    fields = ("tokens", "target_passes", "same_as_autoregressive")
    return {
        (record["set"], record["place"], record["temperature"]): {
            name: [record["methods"][name][field] for field in fields] for name in names
        }
        for record in found.records
    }


def test_a_prompts_counts_do_not_depend_on_its_companions(run):
    """Chains; ids always, as autoregressive decoding says.  A best-first tree near a text's end may be another."""
    options = {"methods": ROWS, "count": 0, "temperatures": (0.0, 1.0)}
    alone, together = run(**options), run(max_rows=3, **options)
    assert counts(alone, "autoregressive", "sequence") == counts(together, "autoregressive", "sequence")
    for record in together.records:
        assert {own["same_as_autoregressive"] for own in record["methods"].values()} == {NEW}
    assert (alone.settings["max_rows"], together.settings["max_rows"]) == (1, 3)
    assert "prompts at a time: 3\n" in together.table()


def test_rows_share_the_seconds_of_their_block_by_their_tokens(models):
    """So that their sum is what passed, and each has the tokens per second of all."""
    decoder = SpeculativeDecoder(models[None], None, [ModelDraft(models["near"])])
    methods, _ = build_methods(["tree"], decoder, nodes=6, depth=4, max_rows=3)
    eos = plain(models[None], PROMPTS[0], NEW)[3]
    rows = methods["tree"](PROMPTS[:3], [0, 1, 2], whole_distribution(0, NEW) | {"eos_token_id": eos})
    assert len({row["tokens"] for row in rows}) > 1
    for stage in ("total", "prefill", "target", "draft", "bookkeeping"):
        speeds = [row["seconds"][stage] / row["tokens"] for row in rows]
        assert speeds == pytest.approx([speeds[0]] * 3)
    speeds = [row["drafts"][0]["seconds"] / row["tokens"] for row in rows]
    assert speeds == pytest.approx([speeds[0]] * 3)
    assert speeds[0] > 0


def test_methods_of_transformers_take_one_prompt_at_a_time(run):
    found = run(methods=("autoregressive", "generate", "assisted", "prompt-lookup"), max_rows=2)
    assert list(found.records[0]["methods"]) == ["autoregressive"]
    assert list(found.summary()["skipped"]) == ["generate", "assisted", "prompt-lookup"]
    assert "one prompt at a time" in found.table()


def test_no_method_always_begins(run, models, monkeypatch):
    """Blocks count, not prompts."""
    order = []

    def noted(names, *given):
        methods, skipped = build_methods(names, *given)
        return {
            name: lambda *args, name=name, method=method: (order.append(name), method(*args))[1]
            for name, method in methods.items()
        }, skipped

    monkeypatch.setattr("specinfer.evaluation.compare.runner.build_methods", noted)
    run(methods=ROWS[:2], prompts=["a", "b", "c", "d"], max_rows=2)
    assert order == [*ROWS[:2], *ROWS[:2], *ROWS[1::-1]]  # once to warm up, then a block each


def test_a_cut_block_is_decoded_again_as_it_was(run, tmp_path):
    """All of its rows, so that counts are those of a run that never stopped; only what is missing is written."""
    options = {"methods": ROWS, "count": 0, "max_rows": 3, "temperatures": (0.0, 1.0)}
    whole = run(tmp_path, **options)
    path = tmp_path / RECORDS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]))
    counts = []
    again = run(tmp_path, progress=lambda _, done, *__: counts.append(done), **options)
    assert path.read_bytes().splitlines(keepends=True)[:4] == lines[:4]
    assert timeless(again.records) == timeless(whole.records)
    assert counts == [4, 6, 8, 10]
    with pytest.raises(InputError, match="max_rows was 3, now 1"):
        run(tmp_path, **options | {"max_rows": 1})


def test_a_prompt_may_hold_any_line_end(tmp_path):
    """Rows end at newlines and nowhere else."""
    path = tmp_path / "set.jsonl"
    path.write_bytes('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}'.encode())
    assert read_prompt_file(path, "dev") == [("1", "a\u2028b"), ("2", "c")]


def test_rows_without_a_split_are_always_taken(files):
    """A set without splits has only prompts to measure."""
    assert read_prompt_file(files[0], "train") == [("b", "never")]
    assert len(read_prompt_file(files[1], "train")) == 3


@pytest.mark.parametrize("command", ["compare", "bench"])
def test_the_help_names_every_method_and_option(call, monkeypatch, command):
    """The methods, written there again, and the options, which are a promise."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")
    code, out, _ = call("--help", command=command)
    assert code == 0
    assert all(name in out for name in METHODS)
    listed = set(re.findall(r"^\W*(--[a-z][a-z-]*)", re.sub(r"\x1b\[[0-9;]*m", "", out), re.MULTILINE)) - {"--help"}
    promised = (
        "out preset prompts prompt target draft assistant count split max-new-tokens temperature methods nodes depth "
        "max-rows hits dtype device report json"
    )
    assert listed == {f"--{name}" for name in promised.split()}
