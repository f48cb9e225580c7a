"""Files of prompts into a folder: what a kill leaves, what a second run adds, and what is refused where."""

import json
from time import monotonic, sleep

import pytest
from conftest import byte_tokenizer, copied, like, run_command, tiny_llama
from typer.testing import CliRunner

from specinfer import BestFirst, SpeculativeDecoder
from specinfer.batch import generate_files, read_prompts
from specinfer.cli import app
from specinfer.common.records import RECORDS, SETTINGS
from specinfer.errors import InputError, NumericalError, SamplingError

PROMPTS = ["ab", "hello", {"prompt": "x", "id": "third"}, {"prompt": "hello hello", "options": {"max_new_tokens": 3}}]
NEW = 9


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


@pytest.fixture
def made(target):
    return SpeculativeDecoder(target, byte_tokenizer(), [like(target)], BestFirst(7, 4), compile=False)


def written(path, prompts):
    """A file of prompts."""
    rows = [prompt if isinstance(prompt, dict) else {"prompt": prompt} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def lines(tmp_path):
    return read_prompts([written(tmp_path / "prompts.jsonl", PROMPTS)])


def records(folder):
    """What a folder holds, in the order of the prompts."""
    return sorted(map(json.loads, (folder / RECORDS).read_text().splitlines()), key=lambda record: record["number"])


@pytest.mark.parametrize("temperature", [0, 1])
def test_texts_are_those_of_generate(made, lines, tmp_path, temperature):
    calls = []
    options = {"max_new_tokens": NEW, "temperature": temperature}
    summary = generate_files(
        made, lines, tmp_path / "out", max_rows=2, seed=5, progress=lambda *call: calls.append(call), **options
    )
    found = records(tmp_path / "out")
    for number, (record, prompt) in enumerate(zip(found, PROMPTS, strict=True)):
        given = prompt if isinstance(prompt, dict) else {"prompt": prompt}
        alone = made.generate(given["prompt"], seed=5 + number, **{**options, **given.get("options", {})})
        assert (record["token_ids"], record["text"]) == (alone.token_ids, alone.text)
        assert record["seed"] == (5 + number if temperature else None)
        assert (record["file"], record["line"], record.get("id")) == ("prompts.jsonl", number + 1, given.get("id"))
        assert (record["prompt_tokens"], record["finish_reason"]) == (len(alone.prompt_ids), alone.finish_reason)
        assert record["new_tokens"] == len(record["token_ids"])
        assert 1 <= record["target_passes"] <= record["new_tokens"]
    assert [call[1:3] for call in calls] == [(done, len(PROMPTS)) for done in range(len(PROMPTS) + 1)]
    assert (summary.prompts, summary.new_prompts, summary.refused) == (4, 4, 0)
    assert summary.new_tokens == sum(record["new_tokens"] for record in found)
    assert f"{summary.new_tokens} tokens" in str(summary)
    assert json.loads(json.dumps(summary.to_dict()))["tokens_per_second"] > 0


def test_what_is_there_is_not_made_again(made, lines, tmp_path, logged):
    """Nor does a model run for it.  A line that was cut off is made again; the other lines stay as they are."""
    out, options = tmp_path / "out", {"max_new_tokens": NEW, "temperature": 0}
    passes = []
    hook = made.target.model.register_forward_hook(lambda *_: passes.append(1))
    try:
        generate_files(made, lines, out, **options)
        path, whole = out / RECORDS, records(out)
        before = path.read_bytes()
        passes.clear()
        assert generate_files(made, lines, out, max_rows=1, **options).new_prompts == 0
        assert (passes, path.read_bytes()) == ([], before)
        path.write_bytes(before[:-20])
        summary = generate_files(made, lines, out, max_rows=1, **options)
    finally:
        hook.remove()
    assert (summary.new_prompts, summary.prompts) == (1, 4)
    assert len(passes) <= NEW + 1
    assert records(out) == whole
    assert path.read_bytes().startswith(before[:-20].rpartition(b"\n")[0])
    assert "cut off" in logged.getvalue()


def test_bad_prompts_are_reported_in_their_place(made, tmp_path):
    bad = {
        0: {"prompt": "x" * 300},
        2: {"prompt": 7},
        3: {"text": "no prompt"},
        4: {"prompt": " "},
        5: {"prompt": "\ud800"},
        6: {"prompt": "x", "options": {"temperatur": 1}},
        7: {"prompt": "x", "options": {"temperature": -1}},
        8: {"prompt": [{"role": "user", "content": "x"}]},
    }
    prompts = [bad.get(number, {"prompt": "good"}) for number in range(10)]
    lines, out = read_prompts([written(tmp_path / "prompts.jsonl", prompts)]), tmp_path / "out"
    options = {"max_new_tokens": 4, "temperature": 0, "max_rows": 2}
    assert generate_files(made, lines, out, **options).refused == len(bad)
    found = records(out)
    assert {record["number"] for record in found if "error" in record} == set(bad)
    assert all(("text" in record) != ("error" in record) for record in found)
    for number, words in {0: "exceed", 4: "empty", 6: "temperatur", 7: "temperature=-1", 8: "chat template"}.items():
        assert words in found[number]["error"]
    assert generate_files(made, lines, out, **options).refused == len(bad)  # they are not tried again
    assert records(out) == found


@pytest.mark.parametrize(
    ("text", "words"),
    {
        "no JSON": ('{"prompt": "a"}\n\n{"prompt": \n', "line 3 is not JSON"),
        "no object": ('{"prompt": "a"}\n["b"]\n', "line 2 is no object"),
        "several": ('{"prompt": "a"}\n' + "no\n" * 7, r"line 2 is not JSON .*, line 6 is not JSON \(.*\), and 2 more:"),
        "options": ('{"prompt": "a", "options": 3}\n', 'line 1: "options"'),
        "a prompt among options": ('{"prompt": "a", "options": {"prompt": "b"}}\n', 'line 1: "options"'),
        "nothing": ("\n", "no prompts"),
    }.values(),
)
def test_files_that_are_none_are_refused_whole(tmp_path, text, words):
    (tmp_path / "file.jsonl").write_text(text)
    with pytest.raises(InputError, match=words):
        read_prompts([tmp_path / "file.jsonl"])


def test_a_folder_of_other_settings_is_refused_with_the_difference(made, lines, target, tmp_path):
    out, options = tmp_path / "out", {"max_new_tokens": 4, "temperature": 0}
    generate_files(made, lines, out, **options)
    before = (out / RECORDS).read_bytes()
    other = SpeculativeDecoder(tiny_llama(7), byte_tokenizer(), ["ngram"], BestFirst(7, 4), compile=False)
    for decoder, prompts, changes, words in (
        (made, lines, {"max_new_tokens": 5}, "options.max_new_tokens was 4, now 5"),
        (made, lines, {"seed": 3}, "options.seed was 0, now 3"),
        (made, lines[:2], {}, "prompts.lines was 4, now 2"),
        (other, lines, {}, r'target\.weights was "\w{32}", now "\w{32}".*drafts\.0\.name was "draft", now "ngram"'),
    ):
        with pytest.raises(InputError, match=f"other settings.*{words}"):
            generate_files(decoder, prompts, out, **{**options, **changes})
    assert (out / RECORDS).read_bytes() == before
    settings = json.loads((out / SETTINGS).read_text())
    assert settings.keys() >= {"target", "drafts", "dtype", "tree", "prompts", "options", "cpu", "specinfer", "torch"}


def test_what_is_wrong_with_all_prompts_is_said_before_anything_is_written(made, lines, tmp_path):
    for options, error in (
        ({"max_tokens": 3}, SamplingError),
        ({"seed": "x"}, InputError),
        ({"max_rows": 0}, InputError),
        ({"logits_processor": [print]}, InputError),
    ):
        with pytest.raises(error):
            generate_files(made, lines, tmp_path / "out", **options)
        assert not (tmp_path / "out" / RECORDS).exists() or not records(tmp_path / "out")


def test_numbers_that_are_none_keep_what_was_done(made, lines, tmp_path):
    broken = False

    def fail(module, given, output):
        if broken:
            output.logits.fill_(float("nan"))

    def breaks(what, done, total, figures):
        nonlocal broken
        broken = done > 0

    hook = made.target.model.register_forward_hook(fail)
    try:
        with pytest.raises(NumericalError):
            generate_files(made, lines, tmp_path / "out", max_rows=1, max_new_tokens=NEW, progress=breaks)
    finally:
        hook.remove()
    assert len(records(tmp_path / "out")) == 1


def test_a_killed_command_loses_nothing_and_makes_nothing_twice(target, tmp_path):
    """Kill -9 in the middle; the same command goes on, and the results are those of a run that never stopped."""
    tiny_llama(0).float().save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    path = written(tmp_path / "many.jsonl", [f"{i}, {i + 1}, {i}, " for i in range(60)])
    out = tmp_path / "out"

    def asked(folder):
        options = ["--prompts", path, "--target", tmp_path / "target", "--draft", "ngram", "--max-new-tokens", "24"]
        options += ["--temperature", "1", "--seed", "3", "--dtype", "float32", "--max-rows", "4", "--out", folder]
        return ["generate", *map(str, options)]

    started = monotonic()
    with copied(run_command, *asked(out)) as process:
        while not ((out / RECORDS).exists() and (out / RECORDS).read_bytes().count(b"\n") >= 5):
            assert process.exitcode is None
            assert monotonic() - started < 120
            sleep(0.001)
    survived = (out / RECORDS).read_bytes()
    survived = survived[: survived.rindex(b"\n") + 1]
    kept = survived.count(b"\n")
    assert 5 <= kept < 60
    done = CliRunner().invoke(app, asked(out))
    assert done.exit_code == 0, done.output
    assert "60 prompts" in done.stdout
    assert f"{60 - kept} now" in done.stdout
    assert (out / RECORDS).read_bytes().startswith(survived)
    assert [record["number"] for record in records(out)] == [*range(60)]
    whole = CliRunner().invoke(app, asked(tmp_path / "whole"))
    assert whole.exit_code == 0, whole.output
    passes = {"target_passes": None}  # `auto` goes by the clock; texts do not
    assert [record | passes for record in records(out)] == [record | passes for record in records(tmp_path / "whole")]
