"""The command line, called in this process on a tiny model: options, JSON, trees, and one line for every error."""

import gc
import inspect
import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer, like, plain, tiny_llama, word_pieces

import specinfer.loading
from specinfer import Result, SpeculativeDecoder, cli
from specinfer.attention import TreeSession
from specinfer.cli.terminal import show
from specinfer.common import progress
from specinfer.common.records import holds_results
from specinfer.errors import ModelError
from specinfer.evaluation import certification
from specinfer.loading import Loaded

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"
PROMPT = "abcabcab"
NEW = ["--max-new-tokens", "12"]


@pytest.fixture(scope="module")
def models():
    target = tiny_llama(0)
    return {None: target, "target": target, "draft": like(target), "other": tiny_llama(5)}


@pytest.fixture
def run(models, monkeypatch, capsys):
    """Run a command; return exit code, standard output and standard error."""
    asked = []

    def load(name=None, dtype="auto", device="auto", *_, **__):
        asked.append((name, dtype, device))
        if name not in models:
            raise ModelError(f"cannot load {name}: no such folder")
        tokenizer = word_pieces() if name == "other" else byte_tokenizer(chat_template=TEMPLATE)
        return Loaded(models[name], tokenizer, str(name))

    monkeypatch.setattr(specinfer.loading, "load", load)

    def call(*arguments, stdin=""):
        monkeypatch.setattr("sys.argv", ["specinfer", *map(str, arguments)])
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    call.asked = asked
    return call


def text_of(models, prompt=PROMPT, new=12):
    return byte_tokenizer().decode(plain(models[None], byte_tokenizer()(prompt)["input_ids"], new))


# ---- generate ----


@pytest.mark.parametrize("tree", ["auto", "best-first", "expansion", "chain", "sampled", "none"])
def test_generate_prints_the_targets_greedy_text(run, models, tree):
    """Text to standard output, the summary to standard error, whatever the tree."""
    code, out, err = run("generate", PROMPT, "--raw", "--draft", "draft", "--tree", tree, *NEW)
    assert code == 0
    assert out == text_of(models) + "\n"
    assert "12 tokens in" in err
    assert "target passes" in err


def test_generate_json_is_one_object(run, models):
    """The schema that scripts rely on."""
    code, out, err = run("generate", PROMPT, "--raw", "--json", "--draft", "ngram", "--draft", "draft", *NEW)
    record = json.loads(out)
    assert (code, err) == (0, "")
    assert record["text"] == text_of(models)
    assert record["token_ids"] == plain(models[None], byte_tokenizer()(PROMPT)["input_ids"], 12)
    stats = record["stats"]
    assert stats["new_tokens"] == 12
    assert 1 <= stats["target_passes"] <= 12
    assert stats["draft_passes"] > 0
    assert stats["tokens_per_target_pass"] == 12 / stats["target_passes"]
    assert stats["seconds"]["total"] > 0


def test_log_probabilities_are_printed_or_saved(run, tmp_path):
    """One per new token, in JSON and in the saved result; without the option there are none."""
    command = ["generate", PROMPT, "--raw", "--draft", "draft", *NEW]
    found = json.loads(run(*command, "--json", "--logprobs")[1])
    assert len(found["logprobs"]) == 12
    assert max(found["logprobs"]) <= 0
    assert run(*command, "--logprobs", "--save", tmp_path / "result")[0] == 0
    assert Result.load(tmp_path / "result").logprobs == pytest.approx(found["logprobs"])
    assert json.loads(run(*command, "--json")[1])["logprobs"] is None
    (tmp_path / "p.jsonl").write_text('{"prompt": "hi"}')
    for options, words in (
        ([PROMPT], "add --json"),
        (["--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "out", "--json"], "need one prompt's result"),
    ):
        code, out, err = run("generate", *options, "--logprobs")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_the_text_may_have_a_form(run, models, monkeypatch, tmp_path):
    """Of a schema or a grammar in a file, a regex, or a list."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(models[None].generation_config, "eos_token_id", 256)
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"const": [true]}')
    grammar.write_text('start: word\nword: "wo" | "rd"\n')
    forms = {
        r"\[\s*true\s*\]": ["--json-schema", schema],
        "wo|rd": ["--grammar", grammar],
        "[xy]{3}": ["--regex", "[xy]{3}"],
        "one|two": ["--choice", "one", "--choice", "two"],
    }
    for legal, options in forms.items():
        code, out, err = run("generate", PROMPT, "--raw", "--json", *options, "--max-new-tokens", "60")
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert re.fullmatch(legal, found["text"])
        assert found["finish_reason"] == "eos"


def test_every_draft_reports_what_it_contributed(run):
    """One line a draft, to standard error."""
    err = run("generate", PROMPT, "--raw", "--draft", "ngram", "--draft", "draft", *NEW)[2]
    lines = [line for line in err.splitlines() if "fewer without it" in line]
    assert [line.split(":")[0] for line in lines] == ["ngram", "draft"]
    assert "note: auto: " in err
    assert "\ndraft: " in run("generate", PROMPT, "--raw", "--draft", "draft", *NEW)[2]


def test_the_confidence_gate_reaches_the_engine(run, models):
    """A gate that never opens after the first step; a gate that is none."""
    closed = ["--draft", "draft", "--tree", "chain", "--confidence-gate", "1", "--json"]
    record = json.loads(run("generate", PROMPT, "--raw", *closed, *NEW)[1])
    assert record["stats"]["tree_sizes"]["plain_steps"] == record["stats"]["target_passes"] - 1
    code, out, err = run("generate", PROMPT, "--confidence-gate", "1.5", *NEW)
    assert (code, out) == (2, "")
    assert "confidence_gate=1.5 is not a probability" in err


def test_a_profile_is_written_then_used(run, tmp_path):
    """Trees repeat; it goes with auto only; a damaged one is refused in one line."""
    path = tmp_path / "profile.json"
    options = ["generate", PROMPT, "--raw", "--draft", "draft", "--max-new-tokens", "60", "--profile", path]
    assert f"profile: wrote {path}" in run(*options)[2]
    first, second = (json.loads(run(*options, "--json")[1])["stats"] for _ in range(2))
    assert (first["tree_sizes"], first["draft_passes"]) == (second["tree_sizes"], second["draft_passes"])
    code, _, err = run(*options, "--tree", "chain")
    assert (code, "--profile" in err, err.count("\n")) == (2, True, 1)
    path.write_text("{}")
    code, _, err = run(*options)
    assert (code, f"the profile {path} cannot be used" in err, err.count("\n")) == (2, True, 1)


def test_a_text_too_short_for_a_profile_is_written_all_the_same(run, tmp_path):
    saved = tmp_path / "result"
    options = ["--raw", "--profile", tmp_path / "profile.json", "--save", saved, "--json", *NEW]
    code, out, err = run("generate", PROMPT, *options)
    assert (code, json.loads(out)["text"]) == (2, Result.load(saved).text)
    assert err == "specinfer: no profile to save yet: costs are not known; decode some 20 tokens more with drafts\n"


def test_without_speculation(run):
    """--tree none: a pass a token, no draft loaded passes."""
    stats = json.loads(run("generate", PROMPT, "--tree", "none", "--json", *NEW)[1])["stats"]
    assert (stats["target_passes"], stats["draft_passes"], stats["tokens_per_target_pass"]) == (12, 0, 1.0)


def test_the_prompt_comes_from_standard_input(run, models):
    """- reads it, newlines and all but the last, which is the terminal's."""
    assert run("generate", "-", "--raw", *NEW, stdin=PROMPT)[1] == text_of(models) + "\n"
    assert run("generate", "-", "--raw", *NEW, stdin=PROMPT + "\n")[1] == text_of(models) + "\n"


def test_prompts_are_messages_unless_raw(run, models):
    """The chat template is applied by default."""
    chat = run("generate", "hi", *NEW)[1]
    assert chat == text_of(models, "<user>hi<a>") + "\n"
    assert run("generate", "hi", "--raw", *NEW)[1] == text_of(models, "hi") + "\n"


def test_sampling_options_reach_the_engine(run, models):
    """Temperature, nucleus, top-k and seed; the same text for a seed with another tree."""
    decoder = SpeculativeDecoder(models[None], byte_tokenizer(), tree=None)
    options = ["--raw", "--temperature", "0.8", "--top-p", "0.9", "--top-k", "7", "--json", *NEW]
    for seed in (0, 5):
        wanted = decoder.generate(PROMPT, temperature=0.8, top_p=0.9, top_k=7, seed=seed, max_new_tokens=12)
        for tree in ("best-first", "none"):
            record = json.loads(run("generate", PROMPT, "--seed", seed, "--tree", tree, *options)[1])
            assert record["token_ids"] == wanted.token_ids
            assert record["seed"] == seed


def test_model_options_reach_the_loader(run):
    """--target, --draft, --dtype and --device, for every model."""
    options = ["--dtype", "float32", "--device", "cpu", *NEW]
    run("generate", "hi", "--target", "target", "--draft", "draft", "--draft", "ngram", *options)
    assert run.asked == [("target", "float32", "cpu"), ("draft", "float32", "cpu")]
    run.asked.clear()
    run("generate", "hi", *NEW)
    assert run.asked == [(None, "auto", "auto")]


def test_tree_options_shape_the_trees(run):
    """--nodes, --depth and --expansion bound the trees that the tree command draws."""
    common = ["--draft", "draft", "--raw", "--json"]

    def tree(*options):
        return json.loads(run("tree", PROMPT, *common, *options)[1])["tree"]

    assert 2 <= len(tree("--nodes", 5, "--depth", 2)["tokens"]) <= 6
    assert len(tree("--nodes", 1)["tokens"]) == 2
    assert len(tree("--tree", "expansion", "--expansion", "2,3")["tokens"]) == 1 + 2 + 6
    assert len(tree("--tree", "chain", "--depth", 5)["tokens"]) == 6


def test_show_tree_draws_one_tree(run):
    """The drawing follows the text and marks what was accepted."""
    code, out, _ = run("generate", PROMPT, "--raw", "--draft", "draft", "--show-tree", *NEW)
    assert code == 0
    assert re.search(r"step \d+: \d+ of \d+ drafted tokens accepted", out)
    assert "└─" in out
    assert "+" in out


# ---- tree, check-model ----


def test_tree_draws_the_tree_of_one_step(run):
    """A drawing, or JSON of the step: tree, path, tokens."""
    code, out, err = run("tree", PROMPT, "--raw", "--draft", "draft", "--nodes", 6)
    assert (code, err) == (0, "")
    assert re.match(r"step \d+: \d+ of [1-6] drafted tokens accepted", out)
    assert "%" in out
    step = json.loads(run("tree", PROMPT, "--raw", "--draft", "draft", "--json")[1])
    assert {"step", "tree", "path", "tokens", "drafted_by"} <= set(step)


def test_tree_without_speculation_draws_a_bare_root(run):
    """Nothing was drafted, and nothing breaks."""
    code, out, _ = run("tree", PROMPT, "--raw", "--tree", "none", *NEW)
    assert code == 0
    assert "0 of 0 drafted tokens" in out


def test_tree_draws_the_step_that_was_asked_for(run, tmp_path):
    """By number, or the best of all; the page has all steps, the picture has this one."""
    common = ["tree", PROMPT, "--raw", "--draft", "draft", "--json", *NEW]
    every = json.loads(run("generate", *common[1:], "--tree", "best-first", "--steps")[1])["steps"]
    files = ["--html", tmp_path / "page.html", "--svg", tmp_path / "tree.svg"]
    for number, wanted in enumerate(every, 1):
        found = json.loads(run(*common, "--step", number, *files)[1])
        assert (found["step"], found["tree"], found["path"]) == (number, wanted["tree"], wanted["path"])
        title = f"{len(wanted['tree']['tokens']) - 1} drafted nodes, {len(wanted['path'])} accepted"
        assert title in (tmp_path / "tree.svg").read_text()
        assert "<html" in (tmp_path / "page.html").read_text()
    assert json.loads(run(*common)[1])["step"] in range(1, len(every) + 1)
    code, out, err = run(*common, "--step", len(every) + 1)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"the text has {len(every)} steps" in err


def test_check_model_says_what_a_model_can_do(run):
    """A table, or a JSON list of one."""
    code, out, err = run("check-model", "target", "--dtype", "float32")
    assert (code, err) == (0, "")
    assert "LlamaForCausalLM" in out
    assert "exact" in out
    (row,) = json.loads(run("check-model", "target", "--json")[1])
    assert row["support"] == "exact"
    assert {"model", "dtype", "attention", "support", "reason", "error"} == set(row)


# ---- errors ----

TINY = ["--max-new-tokens", "2"]
ERRORS = {
    "empty prompt": (["generate", ""], "empty"),
    "blank prompt": (["tree", " \n "], "empty"),
    "empty stdin": (["generate", "-"], "empty"),
    "no such target": (["generate", "hi", "--target", "/no/such"], "/no/such"),
    "no such draft file": (["check-draft", "--draft", "x.gguf"], "cannot load x.gguf: there is no such file or folder"),
    "no such draft": (["generate", "hi", "--draft", "nope"], "nope"),
    "a name that no folder can have": (["generate", "hi", "--draft", "x" * 300], "xxx"),
    "nobody's home": (["generate", "hi", "--draft", "~nobody-has-this-name/x"], "nobody"),
    "no text": (["generate", "\udcff"], "the prompt is not text in UTF-8"),
    "no such model": (["check-model", "nope"], "nope"),
    "nearly a word": (["generate", "hi", "--draft", "sufix"], "did you mean suffix?"),
    "another word": (["generate", "hi", "--draft", "shipped"], "words for drafts are auto, bundled"),
    "nothing bundled": (["generate", "hi", "--draft", "bundled"], "no heads for this target come with the package"),
    "nothing to compare": (["compare", "--out", "x"], "give --prompts FILE or --prompt TEXT"),
    "another tokenizer": (["generate", "hi", "--draft", "other"], "cannot be translated"),
    "no nodes": (["generate", "hi", "--nodes", "0"], "--nodes 0"),
    "negative nodes": (["generate", "hi", "--nodes", "-4"], "--nodes -4"),
    "no number": (["tree", "hi", "--step", "first"], "step 'first'"),
    "step zero": (["tree", "hi", "--step", "0"], "step '0'"),
    "no depth": (["tree", "hi", "--depth", "0"], "--depth 0"),
    "width zero": (["generate", "hi", "--tree", "expansion", "--expansion", "2,0"], "--expansion"),
    "widths of words": (["generate", "hi", "--expansion", "a,b"], "--expansion"),
    "no widths": (["generate", "hi", "--tree", "expansion", "--expansion", ""], "--expansion"),
    "unknown tree": (["generate", "hi", "--tree", "oak"], "oak"),
    "no new tokens": (["generate", "hi", "--max-new-tokens", "0"], "max_new_tokens=0"),
    "negative new tokens": (["generate", "hi", "--max-new-tokens", "-1"], "max_new_tokens=-1"),
    "beyond the context": (["generate", "hi", "--max-new-tokens", "1000"], "context of 256"),
    "negative temperature": (["generate", "hi", "--temperature", "-1"], "temperature"),
    "top_p zero": (["generate", "hi", "--temperature", "1", "--top-p", "0"], "top_p=0"),
    "top_p large": (["generate", "hi", "--temperature", "1", "--top-p", "1.5"], "top_p=1.5"),
    "top_p large when greedy": (["generate", "hi", "--top-p", "1.5"], "top_p=1.5"),
    "negative top_k": (["generate", "hi", "--temperature", "1", "--top-k", "-2"], "top_k=-2"),
    "not a number": (["generate", "hi", "--nodes", "many"], "--nodes"),
    "unknown option": (["generate", "hi", "--beams", "2"], "--beams"),
    "unknown command": (["generat", "hi"], "generat"),
    "no prompt": (["generate"], "give either a prompt"),
    "two sources": (["generate", "hi", "--prompts", "f", "--out", "x"], "give either"),
    "nowhere to write": (["generate", "--prompts", "f"], "go together"),
    "nothing to read": (["generate", "hi", "--out", "x"], "go together"),
    "a tree of many": (["generate", "--prompts", "f", "--out", "x", "--show-tree"], "one prompt"),
    "many in processes": (["generate", "--prompts", "f", "--out", "x", "--tensor-parallel", "2"], "one process"),
    "no such file": (["generate", "--prompts", "nope.jsonl", "--out", "x"], "nope.jsonl"),
    "no such schema": (["generate", "hi", "--json-schema", "nope.json"], "--json-schema nope.json"),
    "no schema": (["generate", "hi", "--json-schema", __file__], "is not JSON"),
    "no grammar": (["generate", "hi", "--grammar", "nope.lark"], "--grammar nope.lark"),
    "two forms": (["generate", "hi", "--regex", "a", "--choice", "b"], "give one of them"),
    "a folder for a page": (["generate", "hi", "--html", "/"], "--html"),
    "a folder for a picture": (["tree", "hi", "--svg", "/"], "--svg"),
    "a folder for a result": (["generate", "hi", "--save", "/"], "--save"),
    "a folder for a plot": (["check-draft", "--plot", "/"], "--plot"),
    "no time to write": (["serve", "--write-timeout", "-1"], "--write-timeout"),
    "nothing that learns": (["generate", "hi", "--draft", "draft", "--online"], "can learn (draft)"),
    "nothing learnt to save": (["generate", "hi", "--save-drafts", "x"], "add --online"),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_are_one_line_and_exit_code_two(run, arguments, message):
    """Nothing on standard output, one line on standard error that names what is wrong."""
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("specinfer: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("command", ["generate", "tree"])
def test_text_of_another_encoding_is_one_line(run, monkeypatch, command, errors):
    """Standard input that is no UTF-8, however Python was told to read it."""
    given = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(io, "StringIO", lambda _: given)
    code, out, err = run(command, "-")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "standard input is not text in UTF-8" in err
    assert run.asked == []


@pytest.mark.parametrize(("name", "usual"), [("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64"), ("GOMP_SPINCOUNT", "2000")])
@pytest.mark.parametrize("given", [None, "7"])
def test_libraries_are_told_what_suits_unless_the_environment_says_otherwise(name, usual, given):
    """By the import alone, and before torch is loaded, which reads it then."""
    environment = {key: value for key, value in os.environ.items() if key != name} | ({name: given} if given else {})
    script = f"import os, sys, specinfer; print(os.environ[{name!r}], 'torch' in sys.modules)"
    command = [sys.executable, "-P", "-c", script]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert told == f"{given or usual} False\n"


@pytest.mark.parametrize("option", ["--dtype", "--device"])
def test_words_that_the_loader_does_not_know(monkeypatch, capsys, option):
    """The real loader refuses them by name before it looks for a model."""
    monkeypatch.setattr("sys.argv", ["specinfer", "generate", "hi", option, "fp8"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert "'fp8'" in err


def test_nan_weights_are_one_line(run, models):
    """They are seen before anything is decoded."""
    broken = tiny_llama(0)
    with torch.no_grad():
        broken.lm_head.weight[3] = torch.nan
    models["broken"] = broken
    code, _, err = run("generate", "hi", "--target", "broken", *TINY)
    assert code == 2
    assert "not numbers" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "memory ran out"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "memory ran out"),
        (OSError(28, "No space left on device"), "cannot read or write what was asked for: No space left on device"),
    ],
)
def test_what_the_machine_refuses_is_one_line(run, monkeypatch, error, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(specinfer.loading, "load", fail)
    code, out, err = run("generate", PROMPT)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_other_errors_are_bugs_and_stay_visible(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(specinfer.loading, "load", fail)
    monkeypatch.setattr("sys.argv", ["specinfer", "generate", PROMPT])
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main()


# ---- tables ----


def test_the_table_of_certificates_has_a_line_for_each(run, monkeypatch):
    """Every pair that there is, with words below; a mistake that is not seen has not passed."""
    pairs = certification.lossless_pairs() + certification.broken_pairs()
    made = [
        certification.Certificate(pair.tree, pair.rule, len(pair.behaviours), 4, 3, 0.0, pair.expected_lossless)
        for pair in pairs
    ]
    monkeypatch.setattr(certification, "certify", lambda progress: made)
    code, out, err = run("certify")
    assert code == 1
    assert max(map(len, err.splitlines())) <= 100
    head, *rows = out.splitlines()
    assert head.split() == ["tree", "verifier", "drafts", "distance", "expected", "as", "expected"]
    assert sum(row.endswith("yes") for row in rows) == len(certification.lossless_pairs())
    assert sum(row.endswith("no") for row in rows) == len(certification.broken_pairs())
    assert "distance: total variation" in err
    assert [row["tree"] for row in json.loads(run("certify", "--json")[1])] == [pair.tree for pair in pairs]


@pytest.mark.parametrize("terminal", [True, False])
def test_tables_are_folded_to_a_terminal_and_whole_elsewhere(monkeypatch, terminal):
    """Nothing is lost; what is no terminal gets a line per row, and no codes, whatever its environment says."""
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", Terminal() if terminal else io.StringIO())
    words = " ".join(["[bold]one"] * 40)
    show([{"a": "1", "b": words, "c": 2.0}, {"a": "", "b": "", "c": False}])
    drawn = sys.stdout.getvalue()
    assert ("\x1b[" in drawn) == terminal
    lines = re.sub(r"\x1b\[[0-9;]*m", "", drawn).splitlines()
    assert "".join(lines).count("[bold]one") == 40
    if terminal:
        assert max(map(len, lines)) <= 70
    else:
        assert lines == [f"a  b{' ' * len(words)} c", f"1  {words}  2", f"{' ' * (len(words) + 5)}no"]


# ---- Ctrl-C, and what a terminal shows ----


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self):
        """Say that it is one."""
        return True


def plain_text(drawn):
    """What is drawn, without a terminal's codes."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn)


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_an_interrupt_is_not_a_traceback(run, monkeypatch):
    """Ctrl-C ends with the shell's code for it, on a line of its own."""
    monkeypatch.setattr(specinfer.loading, "load", interrupt)
    assert run("generate", "hi") == (130, "", "\n")
    assert run("check-model", "hi") == (130, "", "\n")


def test_an_interrupted_text_is_kept(run, models, monkeypatch, tmp_path):
    """It ends after whole steps, is summarised, and is written to every file that was asked for."""
    run("generate", PROMPT, "--raw", "--tree", "none", *NEW)  # the model was checked
    scored, score = [], TreeSession.score

    def interrupted(session, trees):
        scored.append(session)
        return interrupt() if len(scored) == 4 else score(session, trees)

    monkeypatch.setattr(TreeSession, "score", interrupted)
    files = ["--save", tmp_path / "result", "--html", tmp_path / "page.html", "--svg", tmp_path / "tree.svg"]
    code, out, err = run("generate", PROMPT, "--raw", "--tree", "none", *files, *NEW)
    assert (code, out) == (130, text_of(models, new=3) + "\n")
    assert "3 tokens in 3 target passes" in err
    kept = Result.load(tmp_path / "result")
    assert (kept.text + "\n", kept.finish_reason, len(kept.steps)) == (out, "unfinished", 3)
    assert kept.text in (tmp_path / "page.html").read_text()
    assert "<svg" in (tmp_path / "tree.svg").read_text()


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--prompts", "{tmp}/p.jsonl", "--out", "{tmp}/out"],
        ["compare", "--prompt", "hi", "--methods", "tree", "--out", "{tmp}/out", "--draft", "draft"],
        ["record", "--prompt", "hi", "--out", "{tmp}/out", "--draft", "draft"],
        ["paper-tables", "--prompts", "{tmp}/p.jsonl", "--out", "{tmp}/out", "--draft", "draft"],
        ["distill", "--prompts", "{tmp}/p.jsonl", "--out", "{tmp}/out", "--new-tokens", "9"],
    ],
    ids=lambda command: command[0],
)
def test_runs_that_can_go_on_say_what_is_kept(run, monkeypatch, tmp_path, command):
    (tmp_path / "p.jsonl").write_text('{"prompt": "hi"}\n{"prompt": "ho"}\n')
    monkeypatch.setattr(TreeSession, "score", interrupt)
    code, out, err = run(*(part.format(tmp=tmp_path) for part in command))
    assert (code, out) == (130, "")
    assert err == "\nspecinfer: interrupted; nothing was finished, and nothing is kept\n"


def test_a_run_that_finished_something_says_that_it_is_kept(run, monkeypatch, tmp_path):
    """The first prompt of two; the same command goes on with the second."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "hi"}\n{"prompt": "ho"}\n')
    command = ["generate", "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "out", "--max-rows", "1"]
    command += ["--tree", "none", "--max-new-tokens", "4"]
    score = TreeSession.score

    def interrupted(session, trees):
        return interrupt() if (tmp_path / "out" / "records.jsonl").stat().st_size else score(session, trees)

    with monkeypatch.context() as patch:
        patch.setattr(TreeSession, "score", interrupted)
        kept = f"{tmp_path / 'out'} keeps what was finished: run again to continue"
        assert run(*command) == (130, "", f"\nspecinfer: interrupted; {kept}\n")
    assert "2 prompts; 1 now" in run(*command)[1]
    assert "2 prompts; all were finished before" in run(*command)[1]


def test_a_misspelt_tree_is_told_the_nearest(run):
    assert run("generate", PROMPT, "--tree", "bst-first")[2].endswith(
        "'bst-first' is unknown: did you mean best-first?\n"
    )
    assert "is unknown: choose auto, best-first" in run("generate", PROMPT, "--tree", "oak")[2]


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("records.jsonl", True),
        ("set/greedy/records.jsonl", True),
        ("text/00000.safetensors", True),
        ("1.checkpoint.safetensors", True),
        ("settings.json", False),
        (".0123456789abcdef.new", False),
    ],
)
def test_what_counts_as_finished(tmp_path, file, found):
    """Records, texts and checkpoints do; settings, empty files and half-written ones do not."""
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    assert not holds_results(tmp_path)
    (tmp_path / file).write_text("something")
    assert holds_results(tmp_path) is found


@pytest.mark.parametrize("command", [["generate", "hi"], ["tree", "hi", "--draft", "draft"], ["check-model", "target"]])
def test_a_terminal_shows_what_is_under_way_and_since_when(run, monkeypatch, command):
    """Before models are loaded; the line is gone when there is a text or an error."""
    load, seen = specinfer.loading.load, []

    def loaded(*arguments, **options):
        seen.append(sys.stderr.getvalue())
        return load(*arguments, **options)

    monkeypatch.setattr(specinfer.loading, "load", loaded)
    monkeypatch.setattr("sys.stderr", Terminal())
    assert run(*command)[0] == 0
    assert re.search(r"loading (the models|target) \.\.\. 0:00:0\d", plain_text(seen[0]))
    drawn = sys.stderr.getvalue()[len(seen[0]) :]
    assert "\x1b[2K" in drawn  # the line is erased
    assert gc.isenabled()


def test_bars_of_a_download_take_the_place_of_the_line(monkeypatch):
    """And what is printed meanwhile is on a line of its own, above."""
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with progress.busy("loading"):
        print("compiling", file=sys.stderr)
        with specinfer.loading._quietly(bars=True):
            assert sys.stderr is terminal
            print("10%", file=sys.stderr)
    *_, line, last = plain_text(terminal.getvalue()).replace("\r", "\n").splitlines()
    assert (line.strip(), last) == ("", "10%")
    assert re.search(r"^compiling$", plain_text(terminal.getvalue()).replace("\r", "\n"), re.MULTILINE)


def test_on_a_terminal_bars_move_with_the_tokens(run, monkeypatch):
    """And what comes after the texts is said."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.stderr", Terminal())
    bars = progress.Bars()
    bars("texts", 0, 2, {"tokens": 0})
    bars("texts", 1, 2, {"tokens": 7, "rate": [[0.5, 0.25]]})
    bars("texts", 2, 2, {"tokens": 9})
    drawn = plain_text(sys.stderr.getvalue())
    assert re.search(r"texts .*2/2 .*rate=0.50/0.25, 9 tokens, [\d.]+ tokens/s", drawn)
    assert run("check-draft", "--draft", "draft", "--max-new-tokens", "8")[0] == 0
    assert "timing passes and proposals" in sys.stderr.getvalue()


def test_without_a_terminal_a_line_says_what_takes_long(capsys, monkeypatch):
    """Once, and not after more was shown."""
    monkeypatch.setattr(progress, "FIRST", 0)
    with progress.busy("loading"):
        said = ""
        while not said.endswith("\n"):
            said += capsys.readouterr().err
    assert said == "loading ...\n"
    monkeypatch.setattr(progress, "FIRST", 600)
    with progress.busy("loading"):
        (waiting,) = (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
        progress.Bars()("texts", 0, 2, {})
        assert waiting.finished.is_set()
    assert capsys.readouterr().err == ""


def test_without_a_terminal_lines_are_rare(capsys, monkeypatch):
    """After 10 seconds, then every 30; of several processes, the first prints them."""
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        bars = progress.Bars()
        for second in range(75):
            monkeypatch.setattr(progress, "perf_counter", lambda second=second: second)
            bars("texts", 0, 9, {})
    times = "0:00:10", "0:00:40", "0:01:10"
    assert capsys.readouterr().err.splitlines() == [f"texts: 0 of 9 after {time}" for time in times]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["compare", "--out", "{tmp}/out", "--methods", "tree,generate"], r"texts: 1 of 2 after"),
        (["record", "--out", "{tmp}/out", "--count", "0", "--batch", "1"], r"texts: 1 of 2 after"),
        (["generate", "--out", "{tmp}/out", "--max-rows", "1"], r"prompts: 1 of 2 after"),
    ],
    ids=lambda part: part[0] if isinstance(part, list) else "",
)
def test_long_work_without_a_terminal_prints_lines(run, monkeypatch, tmp_path, command, line):
    """What is done of what, and tokens; here as if every second were a long time."""
    monkeypatch.setattr(progress, "FIRST", 0)
    monkeypatch.setattr(progress, "EVERY", 0)
    (tmp_path / "p.jsonl").write_text('{"prompt": "hi"}\n{"prompt": "ho"}\n')
    files = ["--prompts", tmp_path / "p.jsonl", "--draft", "draft", "--max-new-tokens", "8"]
    code, _, err = run(*(part.format(tmp=tmp_path) for part in command), *files)
    assert code == 0
    assert re.search(rf"^{line} 0:00:\d\d, \d+ tokens, [\d.]+ tokens/s$", err, re.MULTILINE)
    assert "\r" not in err


def test_a_bar_ends_with_its_command(run, monkeypatch, tmp_path):
    """An error stands on a line of its own, and nothing is drawn after it."""
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setattr(TreeSession, "score", lambda *_: (_ for _ in ()).throw(ModelError("it broke")))
    assert run("record", "--prompt", "hi", "--draft", "draft", "--out", tmp_path / "out")[0] == 2
    assert re.search(r"0/1 [^\n]*\n[^\n\r]*specinfer: it broke\n$", plain_text(sys.stderr.getvalue()))


def test_a_text_is_not_lost_to_an_encoding(run, models, monkeypatch):
    """What cannot be written is spelt."""
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert run("generate", PROMPT, "--raw", *NEW)[0] == 0
    sys.stdout.flush()
    text = text_of(models)
    assert not text.isascii()
    assert raw.getvalue().decode() == text.encode("ascii", "backslashreplace").decode() + "\n"


def test_what_is_no_terminal_shows_nothing_of_it(run):
    assert "loading" not in run("generate", PROMPT)[2]


WRONG_PATHS = [
    ["generate", PROMPT, "--target", "none.gguf"],
    ["generate", PROMPT, "--draft", "~/no/such/draft"],
    ["check-model", "./no/such"],
    ["check-draft", "--draft", "no/such.gguf"],
    ["distill", "--prompts", "x", "--out", "y", "--target", "/no/such"],
]


def test_generating_imports_nothing_that_it_does_not_use(tmp_path):
    """No other command's modules, nothing that draws; help and a wrong path import no torch."""
    tiny_llama().float().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    command = [sys.executable, "-X", "importtime", "-m", "specinfer"]
    options = ["--target", str(tmp_path), "--dtype", "float32", "--device", "cpu", "--max-new-tokens", "4"]
    for arguments, of_us, others in (
        (
            ["generate", PROMPT, *options],
            {"batch", "evaluation", "integrations", "training", "viz"},
            {"matplotlib", "pandas"},
        ),
        (["generate", "--help"], {"attention", "decoder", "engine", "tree"}, {"torch", "transformers", "tqdm"}),
        *((wrong, {"attention", "decoder"}, {"torch", "transformers"}) for wrong in WRONG_PATHS),
    ):
        ended = subprocess.run([*command, *arguments], capture_output=True, text=True)
        names = re.findall(r"^import time:.*\| +(\S+)$", ended.stderr, re.MULTILINE)
        assert (ended.returncode, bool(ended.stdout)) == ((2, False) if arguments in WRONG_PATHS else (0, True))
        assert "specinfer.cli" in names
        assert {name.split(".")[0] for name in names} & others == set()
        assert {name.split(".")[1] for name in names if name.startswith("specinfer.")} & of_us == set()


def test_a_shell_completes_commands_and_options():
    """As the shell asks for it."""
    program = Path(sys.executable).with_name("specinfer")
    for words, number, expected in (
        ("specinfer gene", 1, "generate"),
        ("specinfer tree --max-n", 2, "--max-new-tokens"),
    ):
        asked = {"_SPECINFER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(number)}
        found = subprocess.run([program], env={**os.environ, **asked}, capture_output=True, text=True, check=True)
        assert found.stdout.split() == [expected]


# ---- memory ----


def test_generate_writes_a_memory_and_reads_it(run, models, tmp_path):
    """The file is made, and read by the next run, which needs fewer passes for the same text."""
    file, passes = tmp_path / "memory", []
    for _ in range(2):
        command = ["generate", PROMPT, "--raw", "--json", "--tree", "best-first", "--memory", file, *NEW]
        code, out, err = run(*command, "--draft", "suffix")
        assert (code, json.loads(out)["text"]) == (0, text_of(models))
        passes.append(json.loads(out)["stats"]["target_passes"])
    assert passes[1] < passes[0]
    file.write_bytes(file.read_bytes()[:-9])
    for path, draft, message in ((file, "suffix", "incomplete"), (tmp_path / "new", "ngram", "suffix")):
        code, out, err = run("generate", PROMPT, "--draft", draft, "--memory", path)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1


def test_a_home_after_an_equals_sign_is_found(run, tmp_path, monkeypatch):
    """No shell expands it there.  A file that is there is read, and a folder is one folder, by its name or by ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "..")
    passes = []
    for _ in range(2):
        command = ["generate", PROMPT, "--raw", "--json", "--tree", "best-first", "--memory=~/memory", *NEW]
        code, out, err = run(*command, "--draft", "suffix")
        assert code == 0, err
        passes.append(json.loads(out)["stats"]["target_passes"])
    assert passes[1] < passes[0]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT}))
    for _ in range(2):
        code, out, err = run("generate", "--prompts=~/prompts.jsonl", "--out=~/texts", *NEW)
        assert code == 0, err
    assert {path.name for path in tmp_path.iterdir()} >= {"memory", "prompts.jsonl", "texts"}
    assert {"records.jsonl", "settings.json"} <= {path.name for path in (tmp_path / "texts").iterdir()}
    assert not (tmp_path / ".." / "~").exists()


# ---- names ----

PLACEMENT = {"--device-map", "--max-memory", "--offload-folder"}
GENERATE = {
    *("--target", "--draft", "--tree", "--nodes", "--depth", "--expansion", "--max-new-tokens", "--temperature"),
    *("--top-p", "--top-k", "--seed", "--dtype", "--device", "--raw", "--show-tree", "--confidence-gate", "--json"),
    *("--profile", "--memory", "--online", "--save-drafts", "--penalty-alpha", "--tensor-parallel"),
    *("--prompts", "--out", "--max-rows", "--quantize", "--save", "--html", "--svg", "--steps", "--logprobs"),
    *("--activations", "--json-schema", "--grammar", "--regex", "--choice"),
    *PLACEMENT,
}
NOT_OF_TREE = (
    "--prompts",
    "--out",
    "--max-rows",
    "--show-tree",
    "--confidence-gate",
    "--profile",
    "--memory",
    "--online",
    "--save-drafts",
    "--penalty-alpha",
    "--json-schema",
    "--grammar",
    "--regex",
    "--choice",
    "--save",
    "--steps",
    "--logprobs",
)
NOT_OF_CHAT = (*NOT_OF_TREE, "--html", "--svg", "--json", "--raw", "--tensor-parallel")


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("generate", GENERATE),
        ("tree", GENERATE - {*NOT_OF_TREE} | {"--step"}),
        ("chat", GENERATE - {*NOT_OF_CHAT} | {"--system"}),
        ("check-model", {"--dtype", "--device", "--json", *PLACEMENT}),
        ("certify", {"--json"}),
    ],
)
def test_commands_have_exactly_these_options(run, monkeypatch, command, options):
    """The names are a promise: no more, no fewer, and help says what each does."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    code, out, _ = run(command, "--help")
    out = plain_text(out)
    assert code == 0
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", out)) - {"--help"} >= options
    listed = set(re.findall(r"^\W*(--[a-z][a-z-]*)", out, re.MULTILINE)) - {"--help"}
    assert listed == options


def test_help_without_arguments(run):
    """The bare command lists its commands."""
    code, out, err = run()
    assert code in (0, 2)
    for command in ("generate", "tree", "check-model", "certify"):
        assert command in out + err
    assert "Error" not in err


def test_every_command_has_help():
    """One line of help a command, from its docstring."""
    for command in cli.app.registered_commands:
        assert inspect.getdoc(command.callback)
