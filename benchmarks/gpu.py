"""What a GPU does with this code, in one command of nine and a half minutes: most important answers first.

    python benchmarks/gpu.py --out DIR            on a machine with one GPU; nothing is installed or downloaded
    python benchmarks/gpu.py --report DIR         prints the answers as tables in Markdown
    python benchmarks/gpu.py --out DIR --tiny     every step on tiny models, on any machine

An answer is a line of JSON, printed and appended to DIR/gpu.jsonl as it comes, so a run that is cut keeps what it has.

    facts           card, versions, compilers; a copy's GB/s; a launch, a tiny copy, a wait, a replay, in microseconds
    tests           the tests marked cuda, those that compile excepted
    ids             equality with plain decoding and with generate; where ids differ, the gap of the two best logits
    small, large    costs of the shapes of Llama-3.2-1B and of Llama-3.1-8B, the fastest ways first:
        passes      milliseconds until launched and until done, kernels, the share that reading the weights takes
        steps       where the milliseconds of a step go: propose, score (launched), choose (done), commit; waits by line
        texts       tokens a second, ours and transformers', memory
    compiled tests  the tests marked cuda that compile
    attention       milliseconds of attention with a new length and with a known one

Each step may take its seconds, and those that earlier ones left.  Then no case of it begins; one that goes on is
killed, and a new process takes over the steps that follow, as after a crash.  What was left out is said, with the
reason.  The exit code is 1 if something failed.

Knows: the plan, processes, lines of answers.  Does not know: torch, what is measured.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from signal import SIGKILL
from time import sleep, time
from typing import Any

ROOT = Path(__file__).parent.parent
Line = dict[str, Any]


PLAN = {  # seconds of each step
    "facts": 15.0,
    "tests": 45.0,
    "ids": 60.0,
    "small": 130.0,
    "large": 220.0,
    "compiled tests": 80.0,
    "attention": 20.0,
}
HOMES = {"facts": "device", "attention": "device"}  # modules with a function (tiny) -> cases of the step's name ...
HOME = "answers"  # ... and of all others
TESTS = {"tests": "not True", "compiled tests": "True"}  # names of tests, as pytest's -k takes them
GRACE = 5.0  # seconds after which a case that goes on is killed
BEGINS = "begins, seconds left"  # of a line


# ---- the plan ----


class Plan:
    """The steps, run in processes.

    Args:
        out: gets ``gpu.jsonl``.
        tiny: whether models are tiny.
        began: when the first step did, in seconds since the epoch.
    """

    def __init__(self, out: Path, tiny: bool, began: float) -> None:
        self.out, self.tiny, self.began = out, tiny, began

    def end(self, step: str) -> float:
        """Return when a step has to end: after its seconds and those of all steps before."""
        names = [*PLAN]
        return self.began + sum(PLAN[name] for name in names[: names.index(step) + 1])

    def say(self, step: str, **answer: Any) -> None:
        """Print an answer, and keep it."""
        line = json.dumps(short({"step": step, "at": time() - self.began, **answer}))
        print(line, flush=True)
        with (self.out / "gpu.jsonl").open("ab", buffering=0) as file:  # a line is whole, or is not there
            file.write(f"{line}\n".encode())

    def leave_out(self, step: str, case: str, reason: str, failure: bool = False) -> None:
        """Say that a case has no answer."""
        self.say(step, case=case, left_out=reason, failure=failure)

    def said(self, step: str = "") -> list[Line]:
        """Return the answers of a step, or of all."""
        lines = [json.loads(line) for line in (self.out / "gpu.jsonl").read_text().splitlines()]
        return [line for line in lines if step in ("", line["step"])]

    def run(self, names: Sequence[str], **environment: str) -> None:
        """Run steps one after the other, in as few processes as it takes."""
        while names:
            names = names[self._process(names, environment) :]

    def _process(self, names: Sequence[str], environment: dict[str, str]) -> int:
        """Run steps in one process until it ends, or has to; return how many of them began."""
        earlier = len(self.said())

        def began() -> list[str]:
            return [line["step"] for line in self.said()[earlier:] if BEGINS in line] or [names[0]]

        command = [sys.executable, __file__, "--out", str(self.out), "--began", str(self.began)]
        command += ["--tiny"] * self.tiny + ["--steps", *names]
        with subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True) as process:
            try:
                while (over := process.poll()) is None and time() <= self.end(began()[-1]) + GRACE:
                    sleep(0.05)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, SIGKILL)  # and what it started
        if over is None:
            self.leave_out(began()[-1], "the rest", "its seconds are over")
        elif over:
            self.leave_out(began()[-1], "the rest", f"its process ended with {over}", failure=True)
        return len(began())


def short(value: Any) -> Any:
    """Return a value with its numbers rounded to four digits."""
    if isinstance(value, dict):
        return {key: short(part) for key, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def measure_all(out: Path, tiny: bool) -> None:
    """Run the plan."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.jsonl").write_text("")
    plan = Plan(out, tiny, time())
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]  # for a checkout that is not installed
    environment = {"PYTHONPATH": os.pathsep.join(paths), **toolchain()}
    with tempfile.TemporaryDirectory() as folder:  # of compiled passes
        plan.run([*PLAN], **environment, SPECINFER_CACHE=folder)


def toolchain() -> dict[str, str]:
    """Return the variables that linking against CUDA needs, where there is a compiler for it."""
    nvcc = shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
    if nvcc is None:
        return {}
    home = Path(nvcc).resolve().parent.parent
    paths = [str(home / "lib64" / "stubs"), "/usr/local/nvidia/lib64", *filter(None, [os.environ.get("LIBRARY_PATH")])]
    return {"CUDA_HOME": str(home), "LIBRARY_PATH": ":".join(paths)}


# ---- a process ----


def answer(plan: Plan, names: Sequence[str]) -> None:
    """Answer the questions of steps.  An error of the device itself ends the process: nothing works after it."""
    from device import wait
    from report import attempt, free

    for name in names:
        left = plan.end(name) - time()
        plan.say(name, **{BEGINS: left})
        module = HOMES.get(name, HOME)
        cases = [_tests(name, left)] if name in TESTS else getattr(import_module(module), name)(plan.tiny)
        for case in cases:
            if time() > plan.end(name):
                plan.leave_out(name, f"{case.table}, {case.label}", "no time left")
                continue
            rows, reason, failed = attempt(case.measure)
            for row in rows:
                plan.say(case.table, **row)
            if reason:
                plan.leave_out(name, f"{case.table}, {case.label}", reason, failed)
                wait()
                free()
        free()


# ---- tests ----


def _tests(name: str, seconds: float) -> Any:
    """Return a step's tests as a case."""
    from device import CUDA, NULL
    from report import Case

    return Case(name, name, partial(test_rows, ROOT, TESTS[name], seconds) if CUDA else lambda: [{"null": NULL}])


def test_rows(root: Path, selected: str, seconds: float) -> list[Line]:
    """Run the tests marked cuda whose names fit, those of policies first, those of graphs last.

    If the time ends before they do, those that are over count.
    """
    files = [path for path in (root / "tests").rglob("test_*.py") if "mark.cuda" in path.read_text()]
    files.sort(key=lambda path: ("graphs" in path.name, "policies" not in path.name, path.name))
    command = [sys.executable, "-u", "-P", "-m", "pytest", "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-m", "cuda", "-k", selected, *map(str, files)]
    with tempfile.TemporaryFile("w+") as log:  # a pipe would be open as long as compilers that a test has started
        try:
            subprocess.run(command, cwd=root, stdout=log, stderr=subprocess.STDOUT, timeout=seconds, check=False)
            finished = True
        except subprocess.TimeoutExpired:
            finished = False
        log.seek(0)
        printed = log.read()
    outcomes = re.findall(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", printed, re.MULTILINE)
    counts = Counter(outcome.lower() for _, outcome in outcomes)
    counted = {name: counts[name] for name in ("passed", "failed", "error", "skipped")}
    names = [name for name, outcome in outcomes if outcome in ("FAILED", "ERROR")]
    reasons = re.findall(r"^(?:FAILED|ERROR) (\S+::.*? - .*)$", printed, re.MULTILINE)  # of runs that finished
    return [{**counted, "finished": finished, "names": reasons or names, "end": printed[-500:] * (not outcomes)}]


# ---- tables ----


def tables(lines: Sequence[Line]) -> str:
    """Return answers as tables in Markdown, one for each step, and what was left out."""
    from report import table

    rows: dict[str, list[Line]] = {}
    for line in lines:
        if BEGINS not in line:
            name = "left out" if "left_out" in line else line["step"]
            rows.setdefault(name, []).append({key: value for key, value in line.items() if key != "at"})
    columns = {name: dict.fromkeys(key for row in found for key in row) for name, found in rows.items()}
    return "\n\n".join(table(name, found, [*columns[name]]) for name, found in rows.items())


def main() -> None:
    """Measure, or print the tables of a folder."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, help="a folder")
    p.add_argument("--tiny", action="store_true", help="tiny models")
    p.add_argument("--report", type=Path, help="a folder that was written before")
    p.add_argument("--steps", nargs="+", help=argparse.SUPPRESS)  # of a process of the plan
    p.add_argument("--began", type=float, help=argparse.SUPPRESS)
    args = p.parse_args()
    if not (args.out or args.report):
        p.error("give a folder, --out, or one to read, --report")
    if args.report:
        print(tables(Plan(args.report, False, 0.0).said()))
    elif args.steps:
        answer(Plan(args.out, args.tiny, args.began), args.steps)
    else:
        measure_all(args.out, args.tiny)
        sys.exit(int(any(line.get("failure") for line in Plan(args.out, args.tiny, 0.0).said())))


if __name__ == "__main__":
    main()
