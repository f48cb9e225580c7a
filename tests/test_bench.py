"""The benchmark on tiny models: counts, continuing after a kill, hit rates, intervals; never times."""

import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PROMPTS, byte_tokenizer, like, plain, tiny_llama

import specinfer.models
from specinfer import ModelDraft, SpeculativeDecoder, cli
from specinfer.bench import Plan, bench, common_prefix
from specinfer.bench.files import read_prompts, read_results
from specinfer.bench.methods import METHODS, HitRates, build_methods, generation_options, hits
from specinfer.bench.report import SPECINFER_TABLE_1, bootstrap, summarise, tables
from specinfer.errors import InputError, TokenizerMismatch
from specinfer.models import Loaded

NEW = 12
FIXED = ("plain", "best-first", "one-draft", "gate", "generate", "assisted", "prompt-lookup")


@pytest.fixture(scope="module")
def models():
    target = tiny_llama(0)
    return {None: target, "near": like(target), "other": tiny_llama(5)}


@pytest.fixture
def asked(models, monkeypatch):
    """Names that the loader was asked for."""
    names = []

    def load(name=None, dtype="auto", device="auto"):
        names.append(name)
        tokenizer = byte_tokenizer()
        if name == "other":
            tokenizer.add_tokens(["more"])
        return Loaded(models[name], tokenizer, str(name))

    monkeypatch.setattr(specinfer.models, "load", load)
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
def plan(files):
    def make(**options):
        given = {"drafts": ("near", "ngram"), "assistant": "near", "max_new_tokens": NEW, "nodes": 6, "count": 2}
        return Plan(files, **{**given, "methods": FIXED, "dtype": "float32", "device": "cpu", **options})

    return make


def counts(path):
    """Everything in a file but seconds."""

    def timeless(value):
        if isinstance(value, dict):
            return {name: timeless(part) for name, part in value.items() if name != "seconds"}
        return [timeless(part) for part in value] if isinstance(value, list) else value

    settings, records = read_results(path)
    return settings, timeless(records)


# ---- what is measured ----


def test_every_prompt_has_every_methods_counts(asked, plan, models, tmp_path):
    """In order, prompts of the split only; ids are plain decoding's, whoever drafts."""
    bench(plan(), tmp_path / "out")
    settings, records = counts(tmp_path / "out")
    assert settings["methods"] == list(FIXED)
    assert settings["target"] == specinfer.models.DEFAULT_TARGET
    order = [(record["set"], record["id"], record["temperature"]) for record in records]
    wanted = [("code", "a"), ("chat", "1"), ("code", "c"), ("chat", "2")]
    assert order == [(*prompt, temperature) for prompt in wanted for temperature in (0.0, 1.0)]
    for record in records:
        methods = record["methods"]
        assert list(methods) == list(FIXED)
        assert [methods["plain"][count] for count in ("tokens", "target_passes", "draft_passes")] == [NEW, NEW, 0]
        assert methods["plain"]["choices"]["nodes_per_step"] == 0
        assert {methods[name]["same_as_plain"] for name in FIXED[:4]} == {NEW}
        assert methods["generate"]["target_passes"] == NEW
        assert methods["assisted"]["draft_passes"] > 0
        greedy = record["temperature"] == 0
        assert [methods[name].get("same_as_plain") for name in FIXED[4:]] == [NEW if greedy else None] * 3
        assert [row["draft"] for row in record["hits"]] == ["near", "ngram"]
        assert all(row["positions"] == NEW - 1 for row in record["hits"])
    assert asked == [None, "near", "near"]


def test_counts_are_the_engines_own(asked, plan, models, tmp_path):
    """A record agrees with a decoder that runs the same prompt by itself."""
    bench(plan(methods=("best-first",), hits=False, temperatures=(1.0,)), tmp_path / "out")
    record = counts(tmp_path / "out")[1][0]
    drafts = [ModelDraft(models["near"], byte_tokenizer(), "near"), "ngram"]
    decoder = SpeculativeDecoder(models[None], byte_tokenizer(), drafts, specinfer.BestFirst(6, 8))
    result = decoder.generate("abcabcab", max_new_tokens=NEW, temperature=1.0, top_k=0, top_p=1.0, seed=0)
    own, wanted = record["methods"]["best-first"], result.stats.to_dict()
    for field in ("target_passes", "draft_passes", "choices", "notes"):
        assert own[field] == wanted[field]
    assert [(d["draft"], d["tokens"], d["only"]) for d in own["drafts"]] == [
        (d.draft, d.tokens, d.only) for d in result.stats.drafts
    ]
    assert "hits" not in record


def test_one_draft_is_the_first_alone(models):
    """The second draft is not asked."""
    decoder = SpeculativeDecoder(models[None], None, ["ngram", ModelDraft(models["near"])])
    methods = build_methods(["one-draft", "best-first"], decoder, nodes=6)
    run = {name: method([5, 9, 17], 0, generation_options(0, NEW)) for name, method in methods.items()}
    assert run["one-draft"]["draft_passes"] == 0
    assert run["best-first"]["draft_passes"] > 0


def test_the_adaptive_tree_emits_the_same_ids(asked, plan, tmp_path):
    """Its passes depend on time, its ids do not."""
    bench(plan(methods=("plain", "auto"), hits=False), tmp_path / "out")
    for record in read_results(tmp_path / "out")[1]:
        assert record["methods"]["auto"]["same_as_plain"] == NEW
        assert 1 <= record["methods"]["auto"]["target_passes"] <= NEW


def test_without_an_assistant_that_method_is_left_out(asked, plan, tmp_path, caplog):
    """And it is said why."""
    with caplog.at_level(logging.WARNING):
        bench(plan(assistant=None, methods=("plain", "assisted"), temperatures=(0.0,), count=1), tmp_path / "out")
    assert list(read_results(tmp_path / "out")[1][0]["methods"]) == ["plain"]
    assert "no assistant was given" in caplog.text


# ---- hit rates ----


@pytest.mark.parametrize("prompt", PROMPTS)
def test_hit_rates_equal_a_fresh_pass_at_every_position(models, prompt):
    """The draft's ranking of the whole text, computed at once."""
    target, draft = models[None], models["near"]
    decoder = SpeculativeDecoder(target, None, [ModelDraft(draft), "ngram"])
    found = HitRates(decoder).count(prompt, 0, generation_options(0, NEW))[0]
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
    (found,) = HitRates(decoder).count([5, 9, 17], 3, generation_options(temperature, NEW))
    assert found == {"draft": "draft", "positions": NEW - 1, "hits": [NEW - 1] * 5}


def test_an_end_of_sequence_token_is_a_position(models):
    """The draft was asked what follows the token before it."""
    decoder = SpeculativeDecoder(models[None], None, [ModelDraft(models[None])])
    eos = plain(models[None], PROMPTS[0], NEW)[5]
    end = plain(models[None], PROMPTS[0], NEW).index(eos) + 1
    (found,) = HitRates(decoder).count(PROMPTS[0], 0, generation_options(0, NEW) | {"eos_token_id": eos})
    assert found["hits"] == [end] * 5


def test_hits_count_places():
    """First, third, absent; what has no choice is left out."""
    found = hits([[7, 1, 2], [3, 4, 7], [1], [9]], [7, 7, 2])
    assert found == {"positions": 3, "hits": [1, 1, 2, 2, 2]}


def test_a_draft_that_reads_the_targets_states_keeps_its_taps_and_target(models):
    """What a probe does not know goes to the draft: `taps`, `attach`, the states of every commit."""
    seen = []

    class Reader(ModelDraft):
        taps = (1,)

        def attach(self, target, tokenizer=None):
            seen.append(target.model)

        def open(self, opening):
            session = super().open(opening)
            commit = session.commit
            session.commit = lambda tokens, states: (seen.append(states), commit(tokens, states))
            return session

    HitRates(SpeculativeDecoder(models[None], None, [Reader(models["near"])])).count(
        PROMPTS[0], 0, {"max_new_tokens": 4}
    )
    assert seen[:2] == [models[None]] * 2
    assert [states[0].shape for states in seen[2:5]] == [(1, 1, 32)] * 3


# ---- the file ----


def test_a_cut_file_is_continued(asked, plan, tmp_path, caplog):
    """Killed in the middle of a line: that prompt is measured again, and the counts are an uninterrupted run's."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    bench(plan(), whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    left = []
    cut.write_bytes(b"".join(lines[:4]) + lines[4][:100])

    def progress(jobs, done):
        left.append((len(jobs), done))
        return iter(jobs)

    with caplog.at_level(logging.WARNING):
        bench(plan(), cut, progress)
    assert "was cut off" in caplog.text
    assert left == [(5, 3)]
    assert counts(cut) == counts(whole)


def test_what_is_finished_is_not_measured_again(asked, plan, tmp_path):
    """Nor are models loaded."""
    bench(plan(temperatures=(0.0,)), tmp_path / "out")
    before = (tmp_path / "out").read_bytes()
    asked.clear()
    bench(plan(temperatures=(0.0,)), tmp_path / "out")
    assert asked == []
    assert (tmp_path / "out").read_bytes() == before


def test_each_prompt_is_in_the_file_when_the_next_begins(asked, plan, tmp_path):
    """What a kill leaves behind."""
    seen = []

    def progress(jobs, done):
        for job in jobs:
            seen.append(len(read_results(tmp_path / "out")[1]))
            yield job

    bench(plan(hits=False, methods=("plain",)), tmp_path / "out", progress)
    assert seen == list(range(8))


def test_every_method_warms_up_once(plan, models, asked, tmp_path):
    """Before the first prompt of a run, resumed or not: one generation more than there are prompts."""
    out, passes = tmp_path / "out", []
    hook = models[None].register_forward_pre_hook(lambda *_: passes.append(1))
    options = {"methods": ("generate",), "hits": False, "temperatures": (0.0,)}
    bench(plan(**options), out)
    extra = len(passes) - 5 * NEW  # the checks of a decoder
    passes.clear()
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:3]))
    bench(plan(**options), out)
    hook.remove()
    assert len(passes) == 3 * NEW + extra


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_new_tokens": 5}, "max_new_tokens was 12, is 5"),
        ({"methods": ("plain",)}, "methods was"),
        ({"drafts": ("near",)}, "drafts was ['near', 'ngram'], is ['near']"),
        ({"dtype": "bfloat16"}, "dtype was float32, is bfloat16"),
        ({"count": 1}, "count was 2, is 1"),
    ],
)
def test_other_settings_are_refused(asked, plan, tmp_path, change, named):
    """By name, before a model is loaded, and without touching the file."""
    out = tmp_path / "out"
    bench(plan(hits=False, methods=("plain", "generate")), out)
    before = out.read_bytes()
    asked.clear()
    with pytest.raises(InputError) as caught:
        bench(plan(**{"hits": False, "methods": ("plain", "generate"), **change}), out)
    assert named in str(caught.value)
    assert (asked, out.read_bytes()) == ([], before)


def test_other_prompts_are_refused(asked, plan, files, tmp_path):
    """Same file names, same counts, other text."""
    bench(plan(hits=False, methods=("plain",)), tmp_path / "out")
    files[1].write_text(files[1].read_text().replace("hello", "hullo"))
    with pytest.raises(InputError, match="prompts was"):
        bench(plan(hits=False, methods=("plain",)), tmp_path / "out")


def test_a_file_cut_in_its_first_line_begins_anew(asked, plan, tmp_path):
    """Nothing was measured yet."""
    out = tmp_path / "out"
    bench(plan(hits=False, methods=("plain",)), out)
    wanted = counts(out)
    for length in (0, 5, 60):
        out.write_bytes(out.read_bytes()[:length])
        bench(plan(hits=False, methods=("plain",)), out)
        assert counts(out) == wanted


def test_damage_before_the_last_line_is_refused(asked, plan, tmp_path):
    """It is no trace of a kill."""
    out = tmp_path / "out"
    bench(plan(hits=False, methods=("plain",)), out)
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join([*lines[:2], lines[2][:30] + "\n", *lines[3:]]))
    with pytest.raises(InputError, match="line 3 is damaged"):
        read_results(out)


@pytest.mark.parametrize("content", ["", "notes", "notes\n", '{"prompt": "hi"}\n', '{"prompt": "hi"}'])
def test_other_peoples_files_are_not_touched(plan, tmp_path, content):
    """Not written by the benchmark: refused as it is.  (An empty one may be filled.)"""
    out = tmp_path / "out"
    out.write_text(content)
    with pytest.raises(InputError, match="not written by specinfer bench"):
        read_results(out)
    if content:
        with pytest.raises(InputError, match="not written by specinfer bench"):
            bench(plan(), out)
    assert out.read_text() == content


def test_a_full_disk_keeps_what_was_finished(asked, plan, tmp_path, monkeypatch):
    """One line that says so; the same plan goes on later."""
    out, calls = tmp_path / "out", []

    def fsync(_):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fsync)
        with pytest.raises(InputError, match="No space left"):
            bench(plan(hits=False, methods=("plain",)), out)
    bench(plan(hits=False, methods=("plain",)), out)
    assert len(read_results(out)[1]) == 8


# ---- the report ----


def record(name, place, temperature=0.0, **methods):
    """A made-up record: method -> (tokens, passes, seconds, prefill, bookkeeping)."""
    rows = {}
    for method, (tokens, passes, total, prefill, rest) in methods.items():
        stages = {"total": total, "prefill": prefill, "target": total - prefill - rest, "draft": 0, "bookkeeping": rest}
        row = {"tokens": tokens, "target_passes": passes, "draft_passes": 0, "seconds": stages}
        choices = {"nodes_per_step": place, "levels_per_step": 1, "plain_steps": 2}
        drafts = [{"draft": "d", "tokens": 5, "only": place, "passes": 7, "seconds": 0.5}]
        rows[method] = {**row, "same_as_plain": tokens if place else 3, "choices": choices, "drafts": drafts}
    hit = [{"draft": "d", "positions": 10, "hits": [4 + place, 5, 6, 7, 8]}]
    return {"set": name, "place": place, "temperature": temperature, "methods": rows, "hits": hit}


def test_a_report_by_hand():
    """Totals for passes, medians of ratios for speed, the least ratio, shares."""
    rows = [
        record("cp", 0, plain=(10, 10, 2.0, 0.0, 0.1), trees=(10, 4, 1.0, 0.2, 0.1)),  # twice as fast
        record("cp", 1, plain=(20, 20, 2.0, 0.0, 0.1), trees=(20, 11, 0.5, 0.1, 0.1)),  # four times
        record("own", 2, plain=(10, 10, 1.0, 0.0, 0.1), trees=(10, 10, 2.0, 0.2, 0.1)),  # half
    ]
    figures = summarise({"any": 1}, rows)
    assert [(group["set"], group["prompts"]) for group in figures["groups"]] == [("all", 3), ("cp", 2), ("own", 1)]
    overall, cp, own = figures["groups"]
    trees = overall["methods"]["trees"]
    assert trees["tokens_per_pass"][0] == 40 / 25
    assert trees["ratio"]["plain"][0] == 2
    assert trees["worst_to_plain"] == 0.5
    assert trees["tokens_per_second"] == 10
    assert trees["bookkeeping"] == pytest.approx(0.3 / 3.0)
    assert trees["ms_per_token"]["total"] == pytest.approx(1000 * 3.5 / 40)
    assert trees["identical"] == pytest.approx(2 / 3)
    assert trees["same_as_plain"] == pytest.approx(33 / 3)
    assert trees["choices"] == {"nodes_per_step": (11 + 20) / 25, "levels_per_step": 1, "plain_steps": 6}
    assert trees["drafts"] == [{"draft": "d", "tokens": 15, "only": 3, "passes": 21, "seconds": 1.5}]
    assert "plain" not in overall["methods"]["plain"]["ratio"]
    assert overall["hits"][0]["rates"] == pytest.approx([15 / 30, 0.5, 0.6, 0.7, 0.8])
    assert cp["methods"]["trees"]["tokens_per_pass"][0] == 2
    assert cp["specinfer_table_1"] == list(SPECINFER_TABLE_1[0.0]["cp"])
    assert "specinfer_table_1" not in own


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


def test_tables_of_a_real_run(asked, plan, tmp_path):
    """All methods by name, all sets, both temperatures, hit rates."""
    bench(plan(), tmp_path / "out")
    text = tables(summarise(*read_results(tmp_path / "out")))
    for words in ("all sets, T = 0, 4 prompts", "chat, T = 1, 2 prompts", *FIXED, "x generate", "top 5", "near"):
        assert words in text


# ---- the command ----


@pytest.fixture
def run(asked, monkeypatch, capsys):
    """Run the command; return exit code, standard output and standard error."""

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["specinfer", "bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return call


def test_the_command_measures_and_reports(run, asked, files, tmp_path):
    """JSON of everything; --report says the same again without running anything."""
    out = tmp_path / "out"
    options = ["--draft", "near", "--count", 1, "--max-new-tokens", NEW, "--methods", "plain,best-first", "--nodes", 4]
    code, printed, err = run("--prompts", files[0], "--prompts", files[1], *options, "--out", out, "--json")
    assert (code, err) == (0, "")
    figures = json.loads(printed)
    assert figures["records"] == 4
    assert figures["groups"][0]["methods"]["plain"]["tokens_per_pass"] == [1, 1, 1]
    asked.clear()
    assert json.loads(run("--out", out, "--report", "--json")[1]) == figures
    assert "all sets, T = 0, 2 prompts" in run("--out", out, "--report")[1]
    assert asked == []


ERRORS = {
    "no prompts": ([], "prompts []"),
    "missing file": (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    "empty file": (["--prompts", "empty.jsonl"], "empty.jsonl holds no prompts"),
    "no such split": (["--prompts", "good.jsonl", "--split", "test"], "split 'test'"),
    "not JSON": (["--prompts", "words.jsonl"], "words.jsonl, line 2 is not JSON"),
    "no prompt": (["--prompts", "bare.jsonl"], "bare.jsonl, line 1"),
    "blank prompt": (["--prompts", "blank.jsonl"], "blank.jsonl, line 2"),
    "not an object": (["--prompts", "list.jsonl"], "list.jsonl, line 1"),
    "not text": (["--prompts", "bytes.jsonl"], "cannot read prompts from bytes.jsonl"),
    "the same set twice": (["--prompts", "good.jsonl", "--prompts", "good.jsonl"], "none twice"),
    "unknown method": (["--prompts", "good.jsonl", "--methods", "plain,magic"], "'magic' is unknown"),
    "method twice": (["--prompts", "good.jsonl", "--methods", "plain,plain"], "none twice"),
    "only assisted": (["--prompts", "good.jsonl", "--methods", "assisted"], "no assistant"),
    "no count": (["--prompts", "good.jsonl", "--count", "0"], "count=0"),
    "no nodes": (["--prompts", "good.jsonl", "--nodes", "0"], "nodes=0"),
    "one token": (["--prompts", "good.jsonl", "--max-new-tokens", "1"], "max_new_tokens=1"),
    "cold": (["--prompts", "good.jsonl", "--temperature", "-1"], "temperatures [-1.0]"),
    "unknown dtype": (["--prompts", "good.jsonl", "--dtype", "fp8"], "'fp8'"),
    "nothing to report": (["--report"], "cannot read out"),
    "a folder that is not there": (["--prompts", "good.jsonl", "--out", "none/out"], "cannot write none/out"),
    "a foreign file": (["--prompts", "good.jsonl", "--out", "good.jsonl"], "not written by specinfer bench"),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_are_one_line_before_a_model_is_loaded(run, asked, tmp_path, monkeypatch, arguments, message):
    """Exit code 2, nothing on standard output."""
    monkeypatch.chdir(tmp_path)
    contents = {
        "empty": "",
        "good": '{"prompt": "hi"}\n\n{"prompt": "ho", "split": "dev"}\n',
        "words": '{"prompt": "hi"}\nwords\n',
        "bare": '{"text": "hi"}\n',
        "blank": '{"prompt": "hi"}\n{"prompt": " "}\n',
        "list": "[1]\n",
    }
    for name, content in contents.items():
        Path(f"{name}.jsonl").write_text(content)
    Path("bytes.jsonl").write_bytes(b"\xff\xfe\n")
    if "good.jsonl" in arguments and "test" in arguments:
        Path("good.jsonl").write_text('{"prompt": "ho", "split": "dev"}\n')
    code, out, err = run("--out", "out", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert asked == []


def test_a_prompt_beyond_the_context_is_named(asked, plan, files, tmp_path):
    """Before anything is measured."""
    files[1].write_text(json.dumps({"id": "long", "prompt": "x" * 300}) + "\n")
    with pytest.raises(InputError, match=r"prompt long of chat: .*context of 256"):
        bench(plan(), tmp_path / "out")
    assert read_results(tmp_path / "out")[1] == []


def test_an_assistant_with_other_tokens_is_refused(asked, plan, tmp_path):
    """As a draft would be."""
    with pytest.raises(TokenizerMismatch):
        bench(plan(assistant="other"), tmp_path / "out")


def test_a_prompt_may_hold_any_line_end(tmp_path):
    """Rows end at newlines and nowhere else."""
    path = tmp_path / "set.jsonl"
    path.write_bytes('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}'.encode())
    assert read_prompts(path, "dev") == [("1", "a\u2028b"), ("2", "c")]


def test_rows_without_a_split_are_always_taken(files):
    """A set without splits has only prompts to measure."""
    assert read_prompts(files[0], "train") == [("b", "never")]
    assert len(read_prompts(files[1], "train")) == 3


def test_the_help_names_every_method_and_option(run, monkeypatch):
    """The methods, written there again, and the options, which are a promise."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")
    code, out, _ = run("--help")
    assert code == 0
    assert all(name in out for name in METHODS)
    listed = set(re.findall(r"^\W*(--[a-z][a-z-]*)", re.sub(r"\x1b\[[0-9;]*m", "", out), re.MULTILINE)) - {"--help"}
    promised = (
        "out prompts target draft assistant count split max-new-tokens temperature methods nodes hits dtype device"
    )
    assert listed == {f"--{name}" for name in (*promised.split(), "report", "json")}
