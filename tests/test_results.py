"""Results that last: saved, loaded, pickled, as a data frame, and on the command line."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from conftest import PROMPTS, Scripted, byte_tokenizer, following, like, tiny_llama
from typer.testing import CliRunner

from specinfer import BestFirst, Chain, Result, SpeculativeDecoder, __version__, cli
from specinfer.cli import app
from specinfer.errors import InputError
from specinfer.results import Seconds, State, Step, counts_by_depth, paid
from specinfer.tree import Draw, TokenTree

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "top_k": 0, "seed": 3}


@pytest.fixture(scope="module", params=[True, False], ids=["tokenizer", "ids"])
def result(request: pytest.FixtureRequest) -> Result:
    model = tiny_llama()
    tokenizer = byte_tokenizer() if request.param else None
    decoder = SpeculativeDecoder(model, tokenizer, [like(model), "ngram"], BestFirst(8, 3))
    return decoder.generate(PROMPTS[0] if request.param else [5, 6, 7, 5, 6], **OPTIONS)


@pytest.fixture(params=["file", "pickle"])
def kept(request: pytest.FixtureRequest, result: Result, tmp_path: Path) -> Result:
    if request.param == "pickle":
        return pickle.loads(pickle.dumps(result))
    result.save(tmp_path / "result.json")
    return Result.load(tmp_path / "result.json")


def test_a_kept_result_is_the_result(result: Result, kept: Result) -> None:
    assert kept == result
    assert any(len(step.tree) > 1 for step in kept.steps)
    assert [step.states for step in kept.steps] == [step.states for step in result.steps]
    assert kept.stats == result.stats
    assert str(kept.stats) == str(result.stats)


def test_a_kept_result_shows_the_same_pages(result: Result, kept: Result) -> None:
    """It has the texts of its own tokens, and no tokenizer."""
    assert kept.to_html() == result.to_html()
    assert kept.to_svg() == result.to_svg()


def test_pickles_do_not_carry_the_tokenizer(result: Result) -> None:
    kind = type(result.tokenizer).__name__.encode()
    assert result.tokenizer is None or kind in pickle.dumps(result.tokenizer)
    assert result.tokenizer is None or kind not in pickle.dumps(result)


@pytest.mark.parametrize("text", ["", "no json", "[]", "{}", '{"specinfer result": 1}', '{"specinfer result": 99}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(InputError, match=r"holds no saved result|is of format 99"):
        Result.load(tmp_path / "file")
    with pytest.raises(InputError, match="cannot be read"):
        Result.load(tmp_path / "missing")


def test_damaged_trees_are_refused(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path / "file")
    data = json.loads((tmp_path / "file").read_text())
    data["steps"][0]["tree"]["parents"] = [7, 7]
    (tmp_path / "file").write_text(json.dumps(data))
    with pytest.raises(InputError, match="holds no saved result"):
        Result.load(tmp_path / "file")


def test_a_data_frame_has_a_row_for_each_token(result: Result) -> None:
    pytest.importorskip("pandas")
    frame = result.to_pandas()
    assert frame["token_id"].tolist() == result.token_ids
    assert frame["position"].tolist() == [*range(len(result.token_ids))]
    assert frame.groupby("step").size().tolist() == result.accept_lengths
    assert (frame["drafted_by"] == "").sum() == sum(not names for step in result.steps for names in step.drafted_by)
    assert frame["depth"].isna().sum() == sum(step.bonus is not None for step in result.steps)


def saved_models(folder: Path) -> str:
    tiny_llama().float().save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    return str(folder / "model")


def test_the_command_line_keeps_results(tmp_path: Path) -> None:
    command = ["generate", "abc abc", "--raw", "--target", saved_models(tmp_path), "--max-new-tokens", "8"]
    files = ["--save", str(tmp_path / "result.json"), "--html", str(tmp_path / "result.html")]
    done = CliRunner().invoke(app, [*command, *files, "--json", "--steps"])
    assert done.exit_code == 0, done.output
    printed, kept = json.loads(done.stdout), Result.load(tmp_path / "result.json")
    assert printed["token_ids"] == kept.token_ids
    assert [len(step["tree"]["tokens"]) for step in printed["steps"]] == [len(step.tree) for step in kept.steps]
    assert "<html" in (tmp_path / "result.html").read_text()
    refused = CliRunner().invoke(app, [*command, "--steps"])
    assert isinstance(refused.exception, InputError)


def test_the_command_line_says_its_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["specinfer", "--version"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"specinfer {__version__}"


def test_what_speculation_cost_and_gained_is_said_in_words():
    """A step with a tree in plain ones of the same text; without either kind, how often it was on."""

    def step(nodes, tokens, seconds, draft=0.0):
        draws = [[Draw(0, rank)] for rank in range(nodes)]
        tree = TokenTree.from_nodes(1, [*range(nodes)], [0] * nodes, [-1.0] * nodes, draws)
        return Step(tree, (), (7,) * tokens, ((),) * tokens, Seconds(total=seconds + 3.0, prefill=3.0, draft=draft))

    drafted, plain = [step(3, 2, 0.21), step(1, 1, 0.2), step(2, 3, 0.4)], [step(0, 1, 0.1)] * 5
    cost = "a step with a tree took 2.1 plain ones and wrote 2.0 tokens"
    assert paid([*drafted, *plain]) == f"speculation off in 5 of 8 steps: {cost}"
    assert paid([*drafted, *plain[:3]]) == f"speculation on in 3 of 6 steps: {cost}"
    asked = [step(0, 1, 0.15, draft=0.05)] * 3  # in vain
    assert paid([*drafted, *asked]) == f"speculation on in 3 of 6 steps: {cost}"
    assert paid(plain) == "speculation off in 5 of 5 steps"
    assert paid(drafted) == "speculation on in 3 of 3 steps"


@pytest.mark.parametrize(
    ("end", "counts"),
    [("e", [(2, 2), (1, 1), (1, 1)]), ("ef", [(2, 2), (2, 2), (1, 1)]), ("efg", [(2, 2)] * 3)],
)
def test_counts_by_depth_stop_where_the_text_does(end: str, counts: list[tuple[int, int]]) -> None:
    """Chains of three that are always right, and a text that ends in the second: what follows counts in no figure."""
    tokenizer = byte_tokenizer()
    start, *script = tokenizer("xabcdefghijk")["input_ids"]
    decoder = SpeculativeDecoder(tiny_llama(), tokenizer, Scripted(lambda row: script[len(row) - 1 :]), Chain(3))
    result = decoder.generate([start], max_new_tokens=9, logits_processor=[following(script, 1)], stop_strings=end)
    assert [len(step.path) for step in result.steps] == [3, 3]
    assert result.text == f"abcd{end}"
    assert counts_by_depth(result.steps) == counts
    drafted = sum(bool(names) for step in result.steps for names in step.drafted_by)
    states = [state for step in result.steps for state in step.states]
    assert sum(accepted for accepted, _ in counts) == drafted == states.count(State.ACCEPTED)
    assert result.stats.drafts[0].tokens == drafted
