"""The benchmark for GPUs: that every phase runs on tiny models, and that its counts agree with each other."""

import json
import math
import sys
import warnings
from pathlib import Path

import pytest
import torch

from specinfer import BestFirst, Chain, SpeculativeDecoder
from specinfer.errors import InputError

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest
@pytest.mark.cuda
def test_right(): pass
@pytest.mark.cuda
def test_wrong(): assert False
@pytest.mark.cuda
def test_elsewhere(): pytest.skip()
def test_for_all(): pass
"""


@pytest.fixture(scope="module")
def written(script, tmp_path_factory):
    """What a tiny run writes."""
    gpu, folder = script("gpu"), tmp_path_factory.mktemp("gpu")
    (folder / "tests").mkdir()
    (folder / "tests" / "test_x.py").write_text(TESTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "ROOT", folder)
        patch.setattr(sys, "argv", ["gpu.py", "--tiny", "--out", str(folder), "--minutes", "60"])
        with pytest.raises(SystemExit) as end:
            gpu.main()
    data = json.loads((folder / "gpu.json").read_text())
    assert end.value.code == 0, data["left_out"]
    return data


def test_every_phase_writes_its_rows(written):
    assert set(written["seconds"]) == {"tests", "identity", "pair", "tiny"}
    assert written["left_out"] == []
    counts = {"passed": 1, "failed": 1, "error": 0, "skipped": 1, "finished": True}
    (tests,) = written["tests"]
    assert counts.items() <= tests.items()
    assert [name.rpartition("::")[2] for name in tests["names"]] == ["test_wrong"]
    methods = {(row["target"], row["method"]) for row in written["speed"]}
    ours = {"plain", "chain 8", "tree 8"}
    assert methods == {("tiny", name) for name in ours | {"generate"}} | {
        ("stand-in", name) for name in ours | {"auto", "generate", "lookup", "assisted"}
    }
    assert all(set(row["ms"]) == {"1", "8"} for row in written["passes"])


def test_what_needs_a_gpu_is_null_with_a_reason(written):
    if torch.cuda.is_available():
        assert written["null"] is None
    else:
        assert "no CUDA device" in written["null"]
        decoded = [row for row in written["speed"] if "ms_per_step" in row]
        names = "host_waits_per_step", "kernel_ms_per_step", "no_kernel_share", "peak_bytes"
        assert decoded
        assert all(row[name] is None for row in decoded for name in names)


def test_texts_do_not_depend_on_speculation(written):
    exact = [row for row in written["identity"] if row["dtype"] == "float32"]
    assert len(exact) == len(written["identity"]) / 2 == 12
    assert all(row["equal"] == row["prompts"] == 2 for row in exact)
    assert any(row["tokens_per_target_pass"] > 1.5 for row in exact)
    known = [row for row in written["speed"] if row["target"] == "tiny"]
    assert all(row["right"] for row in known)


def test_the_table_is_markdown(script, written):
    tables = script("gpu").tables(written)
    assert "| tiny | chain 8 | 1 | 32 | False |" in tables
    lines = [line for line in tables.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in lines)


@pytest.mark.parametrize("acceptance", [0.4, 0.8])
@pytest.mark.parametrize("tied", [False, True])
def test_the_draft_agrees_as_often_as_asked(script, acceptance, tied):
    """Of 4 rows x 120 tokens: a share whose standard deviation is below 0.03."""
    targets = script("targets")
    config = targets.LlamaConfig(**targets._llama(128, 32, 48, 1, 4, 2, tied))
    subject = targets.shape("tiny", config, "float32", acceptance)
    decoder = SpeculativeDecoder(subject.model, None, subject.drafts, Chain(3))
    prompts = subject.prompts(4, 20)
    with subject.prepared():
        results = decoder.generate(prompts, max_new_tokens=120, seed=[1, 2, 3, 4])
    assert [result.token_ids for result in results] == [subject.text(prompt, 120) for prompt in prompts]
    tries = [len(step.path) + (len(step.path) < step.tree.depth) for result in results for step in result.steps]
    accepted = sum(len(step.path) for result in results for step in result.steps)
    assert math.isclose(accepted / sum(tries), acceptance, abs_tol=0.1)


def test_a_best_first_tree_holds_what_the_draft_says_it_does(script):
    """The tree's expected number of accepted tokens, by its own scores, is what is accepted."""
    targets = script("targets")
    subject = targets.shape("tiny", targets.TINY["tiny"], "float32", 0.6)
    decoder = SpeculativeDecoder(subject.model, None, subject.drafts, BestFirst(12, 6))
    with subject.prepared():
        results = decoder.generate(subject.prompts(4, 20), max_new_tokens=120, seed=[1, 2, 3, 4])
    steps = [step for result in results for step in result.steps[:-3]]
    expected = sum(math.fsum(math.exp(score) for score in step.tree.scores[1:]) for step in steps)
    assert math.isclose(sum(len(step.path) for step in steps) / expected, 1, abs_tol=0.15)


def test_contexts_that_are_not_read_cost_no_pass_over_them(script, target):
    targets = script("targets")
    decoder = SpeculativeDecoder(target, tree=None)
    seen = []
    hook = target.register_forward_pre_hook(
        lambda _, given, named: seen.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    decoder.generate([5, 6], max_new_tokens=1)  # the hook was noticed
    seen.clear()
    with targets.unread():
        next(iter(decoder.open([5] * 200, max_new_tokens=4)))
    hook.remove()
    assert seen == [1, 1]


# ---- what does not fit ----


def test_what_does_not_fit_is_named(script, tmp_path):
    gpu = script("gpu")

    def failing(error):
        def measure():
            raise error

        return measure

    cases = [
        gpu.Case("fits", "speed", lambda: [{"x": 1}]),
        gpu.Case("large", "speed", failing(torch.OutOfMemoryError())),
        gpu.Case("not for this pair", "speed", failing(InputError("no assistant"))),
        gpu.Case("broken", "speed", failing(ValueError("odd"))),
    ]
    report = gpu.Report(tmp_path / "gpu.json", 60.0, gpu.TABLES)
    report.phase("first", 1.0, iter(cases))
    report.seconds = 0.0
    report.phase("second", 0.0, iter(cases[:1]))
    data = json.loads((tmp_path / "gpu.json").read_text())
    assert data["speed"] == [{"x": 1}]
    assert data["failures"] == 1
    assert [(left["phase"], left["case"], left["reason"]) for left in data["left_out"]] == [
        ("first", "large", "does not fit in memory"),
        ("first", "not for this pair", "no assistant"),
        ("first", "broken", "failed: ValueError: odd"),
        ("second", "fits", "no time left"),
    ]


def test_host_waits_are_counted_by_line(script, monkeypatch):
    """A GPU's warnings, made up."""
    steps = script("steps")
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def advance():
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    ((where, count),) = steps.host_waits(advance).items()
    assert where.startswith("tests/test_gpu_benchmark.py:")
    assert count == 2
    assert modes == ["warn", "default"]
