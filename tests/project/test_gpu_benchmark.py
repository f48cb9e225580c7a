"""The benchmark for GPUs: that every step runs on tiny models, and that its answers agree with each other."""

import importlib.util
import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from time import time

import pytest
import torch

from specinfer import BestFirst, Chain, SpeculativeDecoder
from specinfer.attention.compiler import making
from specinfer.errors import InputError, ModelError

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
TESTS = """
import pytest
@pytest.mark.cuda
def test_right(): pass
@pytest.mark.cuda
def test_wrong(): assert 1 == 2, "odd"
@pytest.mark.cuda
def test_elsewhere(): pytest.skip()
@pytest.mark.cuda
@pytest.mark.parametrize("compiled", [True])
def test_compiles(compiled): pass
def test_for_all(): pass
"""
BROKEN = """
import os, time
from report import Case

def small(tiny):
    yield Case("one", "small", lambda: time.sleep(600))

def ids(tiny):
    yield Case("one", "ids", lambda: [{"answer": 1}])
    yield Case("two", "ids", lambda: os._exit(3))

def large(tiny):
    yield Case("one", "large", lambda: [{"answer": 1}])
"""


@pytest.fixture(scope="module")
def written(script, tmp_path_factory):
    """The lines of a tiny run, by step."""
    gpu, folder = script("gpu"), tmp_path_factory.mktemp("gpu")
    command = [sys.executable, str(SCRIPTS / "gpu.py"), "--tiny", "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = gpu.Plan(folder, True, 0.0).said()
    assert done.stdout.splitlines() == (folder / "gpu.jsonl").read_text().splitlines()
    assert [line for line in lines if "left_out" in line] == []
    assert done.returncode == 0, done.stderr
    return lines


def rows(lines, step):
    return [line for line in lines if line["step"] == step and not any(name.startswith("begins") for name in line)]


def test_every_step_begins_in_its_turn(script, written):
    gpu = script("gpu")
    begun = [line["step"] for line in written if gpu.BEGINS in line]
    assert begun == [*gpu.PLAN]
    assert sum(gpu.PLAN.values()) == 9.5 * 60
    assert all(rows(written, step) for step in ("facts", "tests", "ids", "passes", "steps", "texts", "attention"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_needs_a_gpu_is_null_with_a_reason(written):
    null = [line for line in written if "null" in line]
    assert {line["step"] for line in null} == {line["step"] for line in written} - {"small", "large"}
    assert all("no CUDA device" in line["null"] for line in null)
    counted = [line for step in ("steps", "passes") for line in rows(written, step) if "null" not in line]
    assert {(line["kernels"], line["kernel_ms"]) for line in counted} == {(None, None)}
    assert {line["peak_gb"] for line in rows(written, "texts") if "null" not in line} == {None}


def test_ids_do_not_depend_on_speculation(written):
    compared = [line for line in rows(written, "ids") if "null" not in line]
    exact = [line for line in compared if line["dtype"] == "float32"]
    ways = {(line["distribution"], line["method"], line["against"]) for line in exact}
    assert ways >= {("greedy", method, "generate") for method in ("plain", "tree", "chain")}
    assert ways >= {(mode, method, "plain") for mode in ("greedy", "T=1") for method in ("tree", "chain")}
    assert all(line["equal"] == line["prompts"] == 2 for line in exact)
    assert len(compared) == 2 * len(exact)
    assert any(line["tokens_per_target_pass"] > 1.5 for line in exact)


def test_texts_are_those_that_must_follow(written):
    known = [line for line in rows(written, "texts") if "null" not in line]
    methods = {"plain", "auto", "generate", "generate, static"}
    assert {(line["method"], line["rows"]) for line in known} >= {(method, n) for method in methods for n in (1, 2)}
    assert all(line["right"] == line["rows"] for line in known)


def test_the_parts_of_a_step_are_the_step(written):
    timed = [line for line in rows(written, "steps") if "null" not in line]
    for line in timed:
        parts = [line[f"{part}_ms"] for part in ("propose", "score", "choose", "commit", "rest")]
        assert min(parts) > 0
        assert math.isclose(sum(parts), line["ms"], rel_tol=0.01)
        assert line["drafted"] == 16
    heads = [line for line in timed if line["draft"] == "head"]
    assert [line["tokens_per_step"] for line in heads] == [9, 9]  # all levels, and the target's own


def test_a_pass_has_a_row_for_every_size(written):
    timed = [line for line in rows(written, "passes") if "null" not in line and line["way"] == "as they are"]
    assert [(line["target"], line["nodes"]) for line in timed] == [(t, n) for t in ("tiny 2", "tiny 3") for n in (1, 8)]
    assert all(0 < line["launch_ms"] <= line["ms"] for line in timed)


def test_the_tables_are_markdown(script, written):
    gpu = script("gpu")
    tables = gpu.tables([*written, {"step": "ids", "case": "one", "left_out": "no time left", "failure": False}])
    lines = [line for line in tables.splitlines() if line.startswith("| ")]
    answers = [line for line in written if gpu.BEGINS not in line]
    steps = {line["step"] for line in answers}
    assert len(lines) == len(answers) + 1 + 2 * (len(steps) + 1)
    assert all(line.endswith("|") for line in lines)
    assert "**left out**" in tables


# ---- models and drafts ----


@pytest.mark.parametrize("acceptance", [0.4, 0.8])
@pytest.mark.parametrize("tied", [False, True])
def test_the_draft_agrees_as_often_as_asked(script, acceptance, tied):
    """Of 4 rows x 120 tokens: a share whose standard deviation is below 0.03."""
    targets = script("targets")
    config = targets.LlamaConfig(**targets._llama(128, 32, 48, 1, 4, 2, tied))
    subject = targets.shape("tiny", config, "float32", acceptance)
    decoder = SpeculativeDecoder(subject.model, None, subject.drafts, Chain(3))
    prompts = subject.prompts(4, 20)
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
    results = decoder.generate(subject.prompts(4, 20), max_new_tokens=120, seed=[1, 2, 3, 4])
    steps = [step for result in results for step in result.steps[:-3]]
    expected = sum(math.fsum(math.exp(score) for score in step.tree.scores[1:]) for step in steps)
    assert math.isclose(sum(len(step.path) for step in steps) / expected, 1, abs_tol=0.15)


# ---- clocks ----


def test_a_function_that_another_one_calls_counts_as_that_ones(script):
    steps = script("steps")

    class Work:
        def outer(self):
            return self.inner()

        def inner(self):
            return 7

    with steps.clocked({"a": [(Work, "outer")], "b": [(Work, "inner")]}) as spent:
        assert Work().outer() == 7
        assert [*spent] == ["a"]
        assert Work().inner() == 7
        assert [*spent] == ["a", "b"]
    earlier = dict(spent)
    Work().outer()
    assert dict(spent) == earlier


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
    assert where.startswith("project/test_gpu_benchmark.py:")
    assert count == 2
    assert modes == ["warn", "default"]


# ---- what goes wrong ----


@pytest.fixture
def broken(tmp_path):
    """The command beside steps that hang and crash."""
    for name in ("gpu.py", "report.py", "device.py"):
        shutil.copy(SCRIPTS / name, tmp_path)
    (tmp_path / "answers.py").write_text(BROKEN)
    spec = importlib.util.spec_from_file_location("broken_gpu", tmp_path / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_step_that_hangs_or_crashes_does_not_stop_the_next(broken, tmp_path, monkeypatch):
    monkeypatch.setattr(broken, "PLAN", {"small": 6.0, "ids": 60.0, "large": 60.0})
    monkeypatch.setattr(broken, "GRACE", 0.0)
    (tmp_path / "gpu.jsonl").write_text("")
    plan = broken.Plan(tmp_path, True, time())
    path = os.pathsep.join([str(SCRIPTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    plan.run([*broken.PLAN], PYTHONPATH=path)
    lines = [{k: v for k, v in line.items() if k != "at"} for line in plan.said() if broken.BEGINS not in line]
    assert lines == [
        {"step": "small", "case": "the rest", "left_out": "its seconds are over", "failure": False},
        {"step": "ids", "answer": 1},
        {"step": "ids", "case": "the rest", "left_out": "its process ended with 3", "failure": True},
        {"step": "large", "answer": 1},
    ]


def test_a_case_that_fails_or_does_not_fit_is_named(script, tmp_path, monkeypatch):
    gpu, answers = script("gpu"), script("answers")
    (tmp_path / "gpu.jsonl").write_text("")

    def failing(error):
        def measure():
            raise error

        return measure

    errors = [torch.OutOfMemoryError(), InputError("no assistant"), ValueError("odd")]
    made = script("report").Case
    cases = [made(str(n), "ids", failing(error)) for n, error in enumerate(errors)]
    monkeypatch.setattr(answers, "ids", lambda tiny: [*cases, made("fits", "ids", lambda: [{"x": 1.23456}])])
    gpu.answer(gpu.Plan(tmp_path, True, time()), ["ids"])
    gpu.answer(gpu.Plan(tmp_path, True, 0.0), ["ids"])
    lines = gpu.Plan(tmp_path, True, 0.0).said()[1:]
    assert [(line["left_out"], line["failure"]) for line in lines if "left_out" in line] == [
        ("does not fit in memory", False),
        ("no assistant", False),
        ("ValueError: odd", True),
        *[("no time left", False)] * 4,
    ]
    assert [line["x"] for line in lines if "x" in line] == [1.235]


def test_tests_are_counted_and_named(script, tmp_path):
    gpu = script("gpu")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(TESTS)
    ((plain),) = gpu.test_rows(tmp_path, gpu.TESTS["tests"], 60.0)
    counts = {"passed": 1, "failed": 1, "error": 0, "skipped": 1, "finished": True, "end": ""}
    assert plain == {**counts, "names": ["tests/test_x.py::test_wrong - AssertionError: odd"]}
    (compiled,) = gpu.test_rows(tmp_path, gpu.TESTS["compiled tests"], 60.0)
    assert (compiled["passed"], compiled["failed"]) == (1, 0)
    (cut,) = gpu.test_rows(tmp_path, gpu.TESTS["tests"], 0.0)
    assert (cut["passed"], cut["finished"]) == (0, False)


def test_linking_finds_the_library_of_the_driver(script, tmp_path, monkeypatch):
    gpu, nvcc = script("gpu"), tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch(0o755)
    monkeypatch.setenv("PATH", str(nvcc.parent))
    monkeypatch.setenv("LIBRARY_PATH", "/mine")
    home = tmp_path / "cuda"
    found = {"CUDA_HOME": str(home), "LIBRARY_PATH": f"{home}/lib64/stubs:/usr/local/nvidia/lib64:/mine"}
    assert gpu.toolchain() == found


def test_what_stands_in_the_way_of_compiling_is_an_answer(script, monkeypatch):
    answers = script("answers")

    def failing(graph, path):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(making.exported, "export_pass", lambda *given: (None, ()))
    monkeypatch.setattr(making, "compile_package", failing)
    monkeypatch.setitem(answers.WAYS, "compiled", {"compile": True})
    with pytest.raises(ModelError, match="cannot be compiled: RuntimeError: no such kernel"):
        answers.pass_cases("tiny", "compiled", True)


@pytest.mark.slow
def test_compiled_passes_are_measured(script, monkeypatch):
    answers = script("answers")
    monkeypatch.setitem(answers.WAYS, "compiled", {"compile": True})
    rows = answers.pass_cases("tiny", "compiled", True)
    assert [line["nodes"] for line in rows] == [1, 8]
    assert all(line["seconds to compile"] > 1 for line in rows)
