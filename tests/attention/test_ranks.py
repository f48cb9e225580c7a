"""Targets in several processes: the same ids as in one, decisions that agree, and errors in the place of endless waits.

The processes are copies of this one, which has imported everything; `JOBS` is what they do.
"""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
from conftest import PROMPTS, byte_tokenizer, launched, like, run_command, tiny_llama
from safetensors.torch import load_file
from test_heads import draft_for
from transformers import AutoModelForCausalLM, LlamaConfig

import specinfer
from specinfer import BestFirst, Sampled, SpeculativeDecoder, cli, loading
from specinfer.common import ranks
from specinfer.common.ranks import ALONE, PATIENCE, Ranks
from specinfer.errors import InputError, RankError, UnsupportedModel

LIMIT = 80.0  # seconds after which processes that hang are killed
TEXT, NEW = "abcabcab", 10
SPEEDS = 20  # runs in which one process is slower than the other


def whole_target():
    return tiny_llama(0)


def ids_of(results):
    return [result.token_ids for result in (results if isinstance(results, list) else [results])]


def decoded(model, drafts, tree, prompt=PROMPTS, online=False, **options):
    """Return the ids of all rows; drafts make a list from the whole target."""
    decoder = SpeculativeDecoder(model, byte_tokenizer(), drafts(whole_target()), tree, online=online)
    return ids_of(decoder.generate(prompt, **{"max_new_tokens": NEW, "raw": True, **options}))


def streamed(model):
    decoder = SpeculativeDecoder(model, byte_tokenizer(), ["suffix"], BestFirst(6, 3))
    return list(decoder.stream(TEXT, raw=True, max_new_tokens=NEW))


def learnt(model):
    """Texts of three calls, between which a head learns."""
    decoder = SpeculativeDecoder(model, None, [draft_for(whole_target())], BestFirst(8, 3), online=1.0)
    return [ids_of(decoder.generate(PROMPTS, max_new_tokens=NEW)) for _ in range(3)]


def scored(model):
    decoder = SpeculativeDecoder(model, byte_tokenizer(), ())
    return [round(number, 6) for number in decoder.score(TEXT, "abc", raw=True).log_probabilities]


def inside_transformers(model):
    ids = torch.tensor([PROMPTS[0]])
    options = {"do_sample": False, "max_new_tokens": NEW, "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, custom_generate=specinfer.custom_generate, **options).tolist()


SAMPLING = {"temperature": 1.0, "seed": 7}
CASES = {  # what a model gives, whole or not
    "plain": partial(decoded, drafts=lambda target: (), tree=None),
    "free drafts": partial(decoded, drafts=lambda target: "auto", tree="auto"),
    "look-ups": partial(decoded, drafts=lambda target: ["suffix", "ngram", "recycling"], tree=BestFirst(8, 4)),
    "lookahead": partial(decoded, drafts=lambda target: ["lookahead"], tree="auto"),
    "model": partial(decoded, drafts=lambda target: [like(target)], tree=BestFirst(8, 4)),
    "coupled": partial(decoded, drafts=lambda target: [like(target)], tree=BestFirst(8, 4), **SAMPLING),
    "sampled trees": partial(decoded, drafts=lambda target: [like(target)], tree=Sampled((2, 1)), **SAMPLING),
    "stop strings": partial(decoded, drafts=lambda target: [like(target)], tree=BestFirst(8, 4), stop_strings=["a"]),
    "streaming": streamed,
    "scores": scored,
    "inside transformers": inside_transformers,
}
READING = {  # those that need the target's hidden states, or weights
    "head": partial(decoded, drafts=lambda target: [draft_for(target)], tree=BestFirst(8, 4)),
    "heads and others": partial(decoded, drafts=lambda target: [draft_for(target), "suffix"], tree="auto", **SAMPLING),
    "contrastive": partial(decoded, drafts=lambda target: ["suffix"], tree="auto", penalty_alpha=0.6, top_k=4),
    "learning": learnt,
}


# ---- what the processes do ----


def slow_runs(model, number):
    """Return ids and sizes of trees of runs in which the draft's speed differs between the processes."""
    draft, runs, seconds = like(whole_target()), [], 0.0
    draft.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    decoder = SpeculativeDecoder(model, None, [draft])
    for run in range(SPEEDS):
        seconds = 0.004 if run % 3 == number else 0.0
        result = decoder.generate(PROMPTS[run % len(PROMPTS)], max_new_tokens=8)
        runs.append([result.token_ids, [len(step.tree) for step in result.steps]])
    return runs


def clocks_apart(model, number):
    """Return what happens if each process goes by its own clock: in one of them the draft is very slow."""
    target_hook = model.register_forward_pre_hook(lambda *_: time.sleep(0.01))
    draft = like(whole_target(), 0.0)
    draft.register_forward_pre_hook(lambda *_: time.sleep(0.05 * number))
    decoder, agreed = SpeculativeDecoder(model, None, [draft]), Ranks.largest

    def own(self, values):
        return list(values) if isinstance(values[0], float) else agreed(self, values)

    Ranks.largest = own
    try:
        return failure(decoder.generate, PROMPTS[0], max_new_tokens=120)
    finally:
        Ranks.largest = agreed
        target_hook.remove()


def failure(call, *arguments, **options):
    """Return the kind and the text of the error that a call raises."""
    try:
        return ["nothing", str(call(*arguments, **options))]
    except specinfer.SpecinferError as error:
        return [type(error).__name__, str(error)]


def busy(decoder):
    """Return what happens to passes in another thread, of another decoder, while passes run."""
    found = []
    other = SpeculativeDecoder(decoder.target.model, None, ())

    def run():
        found.append(failure(other.generate, PROMPTS[0], max_new_tokens=2))

    with decoder.target.ranks.together("a pass"):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    return found[0]


def left(decoder, number):
    """Return what happens to all if one of them leaves a stream and goes on with something else."""
    stream = decoder.stream(TEXT, raw=True, max_new_tokens=200)
    next(stream)
    if number:
        stream.close()
        return failure(decoder.generate, PROMPTS[0], max_new_tokens=2)
    return failure(list, stream)


def differing(model, number):
    """Return what comes of whatever differs between processes."""
    decoder = SpeculativeDecoder(model, byte_tokenizer(), ["suffix"], BestFirst(6, 3))
    torch.manual_seed(number)  # of seeds that are not given
    generate = partial(decoder.generate, max_new_tokens=NEW)
    yield "own seeds", ids_of(generate(PROMPTS, temperature=1.0))
    yield "own wish", ids_of(generate(PROMPTS[0], stopping_criteria=[lambda ids, _: number == 1 and ids.shape[1] > 8]))
    started = time.monotonic()
    yield "own time", ids_of(generate(PROMPTS, max_new_tokens=200, max_time=0.05 if number else 60.0))
    yield "in time", time.monotonic() - started < 30
    yield "own prompt", failure(generate, PROMPTS[number])
    yield "own options", failure(generate, PROMPTS[0], temperature=1.0, seed=number)
    yield "left stream", left(decoder, number)
    yield "after that", ids_of(generate(PROMPTS[0]))
    yield "two threads", busy(decoder)
    yield "speeds", slow_runs(model, number)
    yield "clocks apart", clocks_apart(model, number)


def spread(folder, **sizes):
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(**sizes)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, distributed_config=config).eval()


def main(folder):
    """Do all that processes do, and write it to files."""
    number, found = ranks.rank(), {}
    ranks.join(2, torch.device("cpu"))
    split, staged = spread(folder, tp_size=2), spread(folder, pp_size=2)
    for name, case in CASES.items():
        found[name], found[f"{name}, staged"] = case(split), case(staged)
    found |= {name: case(split) for name, case in READING.items()}
    decoder = SpeculativeDecoder(split, None, [draft_for(whole_target())])
    found["passes"] = [decoder.passes, str(specinfer.check_model(split).support)]
    refused = {
        "staged head": (SpeculativeDecoder, staged, None, [draft_for(whole_target())]),
        "mtp": (SpeculativeDecoder, split, None, ["mtp"]),
        "fsdp": (SpeculativeDecoder, spread(folder, fsdp_size=2)),
    }
    found |= {name: failure(*call) for name, call in refused.items()}
    found |= dict(differing(split, number))
    Path(folder, f"{number}.json").write_text(json.dumps(found))


def lose(folder, how, leave):
    """Generate, and be lost in the middle of it if this is the second process; write the error of the first one."""
    loaded = loading.load(folder, "float32", "cpu", tensor_parallel=2)
    decoder = SpeculativeDecoder(loaded.model, None, ["suffix"])

    def streamer_put(tokens):
        if ranks.rank() == 1 and len(tokens.flatten()) < 5:  # a step's, not the prompt's
            leave()

    streamer = type("Streamer", (), {"put": staticmethod(streamer_put), "end": staticmethod(lambda: None)})()
    found = failure(decoder.generate, PROMPTS[0], max_new_tokens=NEW, streamer=streamer)
    Path(folder, f"{how}.json").write_text(json.dumps(found))


LOST = {  # how the second process leaves -> how, and seconds for which the first one waits
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), 600),
    "stuck": (lambda: time.sleep(LIMIT), 12),
}
JOBS = {"main": (main, 600)}  # what two processes do, and their patience
JOBS |= {how: (partial(lose, how=how, leave=leave), patience) for how, (leave, patience) in LOST.items()}


# ---- how they are started ----


def start(folder, job, patience):
    """Start two processes that do a job, with the variables of a launcher that ends none of them if the other ends."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), PATIENCE: str(patience)}

    def run(number):
        torch.set_num_threads(1)  # those of the pool are not copied
        os.environ.update(variables, RANK=str(number))
        job(folder)

    processes = multiprocessing.get_context("fork")
    started = [processes.Process(target=run, args=(number,), daemon=True) for number in range(2)]
    for process in started:
        process.start()
    return started


def start_all(folder):
    """Do all jobs at once, in copies of this process, and kill those who are left by the second process in the end."""
    started = {name: start(folder, *job) for name, job in JOBS.items()}
    lasting = [*started["main"], *(started[how][0] for how in LOST)]
    try:
        for process in lasting:
            process.join(LIMIT)
            assert process.exitcode == 0
    finally:
        for process in chain(*started.values()):
            process.kill()
            process.join()


def torchrun(*program):
    """Run a program in two processes by the command; return exit code, output and errors of all of them."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    started = subprocess.Popen([*launcher, *map(str, program)], env=environment, **pipes)
    try:
        out, err = started.communicate(timeout=LIMIT)
        return started.returncode, out, err
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in float32."""
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(0).float().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder):
    """What both processes found."""
    start_all(folder)
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(2)]


@pytest.fixture(scope="module")
def whole(folder):
    """The same weights in one process."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


# ---- the same ids ----


@pytest.mark.parametrize("name", [*CASES, *READING])
def test_ids_are_those_of_one_process(name, outcomes, whole):
    wanted = {**CASES, **READING}[name](whole)
    assert wanted
    found = [outcome[key] for outcome in outcomes for key in (name, f"{name}, staged") if key in outcome]
    assert len(found) == (4 if name in CASES else 2)
    assert all(each == wanted for each in found)


def test_a_split_target_branches_and_runs_plain(outcomes):
    assert outcomes[0]["passes"] == outcomes[1]["passes"]
    passes, support = outcomes[0]["passes"]
    assert support == "exact"
    assert "target plain (its weights are spread over 2 processes)" in passes


@pytest.mark.parametrize(
    ("name", "words"),
    [("staged head", "hidden states"), ("mtp", "draft mtp shares modules"), ("fsdp", "FSDP")],
)
def test_what_is_not_supported_is_refused_by_name(name, words, outcomes):
    for outcome in outcomes:
        kind, text = outcome[name]
        assert kind == "UnsupportedModel"
        assert words in text


# ---- decisions agree ----


@pytest.mark.parametrize("name", ["own seeds", "own wish", "own time", "after that", "speeds"])
def test_processes_agree_on_what_differs_between_them(name, outcomes, whole):
    assert outcomes[0][name] == outcomes[1][name]
    if name == "own wish":  # the text ends where one of them wants it
        assert [len(PROMPTS[0]) + len(ids) for ids in outcomes[0][name]] == [9]
    if name == "own time":
        assert all(outcome["in time"] for outcome in outcomes)
        assert max(map(len, outcomes[0][name])) < 200
    if name == "speeds":
        sizes = [size for _, sizes in outcomes[0][name] for size in sizes]
        assert len(outcomes[0][name]) == SPEEDS
        assert len(set(sizes)) > 1  # something was decided
        wanted = SpeculativeDecoder(whole, None, tree=None)
        for run, (ids, _) in enumerate(outcomes[0][name]):
            assert ids == wanted.generate(PROMPTS[run % len(PROMPTS)], max_new_tokens=8).token_ids


@pytest.mark.parametrize("name", ["own prompt", "own options", "left stream", "clocks apart"])
def test_what_must_not_differ_is_an_error_in_all_processes(name, outcomes):
    for outcome in outcomes:
        kind, text = outcome[name]
        assert kind == "RankError"
        assert "disagree" in text


def test_passes_of_two_threads_are_refused(outcomes):
    assert all("two threads" in outcome["two threads"][1] for outcome in outcomes)


def test_one_process_agrees_with_itself():
    """It passes everything on, and nothing is compared."""
    assert ALONE.largest([1.5, 2]) == [1.5, 2]
    assert ALONE.first([2**63]) == [2**63]
    done = []
    threads = [threading.Thread(target=lambda: done.append(ALONE.check(object()))) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    with ALONE.together(1), ALONE.together(2):
        assert done == [None, None]
    assert Ranks.of(whole_target()) is ALONE


# ---- processes that are lost ----


@pytest.mark.parametrize("how", LOST)
def test_a_lost_process_is_an_error_of_the_others(how, outcomes, folder):
    kind, text = json.loads((folder / f"{how}.json").read_text())
    assert kind == "RankError"
    assert text.startswith("another of the processes that share the model ended, or did not answer in time")


def test_a_process_that_never_starts_is_an_error(folder, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(PATIENCE, "1")
    assert run(monkeypatch, capsys, "generate", TEXT, "--target", folder, "--tensor-parallel", 2) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("specinfer: ")]  # torchao, if there, adds its words
    assert line.startswith("specinfer: the 2 processes do not find each other (Timed out after ")
    assert err.endswith(f"{line}\n")
    assert (err.count("Traceback"), line.count("1/2 clients joined")) == (0, 1)


# ---- the command line ----

GENERATE = ["generate", TEXT, "--raw", "--device", "cpu", "--dtype", "float32"]


def test_the_first_process_alone_prints_and_writes(folder, tmp_path, monkeypatch, capsys):
    command = [*GENERATE, "--target", folder, "--max-new-tokens", NEW, "--draft", "suffix", "--memory"]
    split = torchrun("-m", "specinfer", *command, tmp_path / "split", "--tensor-parallel", 2)
    assert run(monkeypatch, capsys, *command, tmp_path / "whole") == 0
    out, err = capsys.readouterr()
    assert split[:2] == (0, out), split[2][-4000:]
    assert split[2].count(" target passes") == err.count(" target passes") == 1
    assert "spread over 2 processes" in split[2]
    assert load_file(tmp_path / "split")["ids"].tolist() == load_file(tmp_path / "whole")["ids"].tolist()


def test_an_error_of_all_processes_is_printed_once(folder, capfd):
    command = [*GENERATE, "--target", folder, "--tensor-parallel", 2]
    assert launched(run_command, *command, "--max-new-tokens", 10**6) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("specinfer: ") == 1
    assert "exceed the target's context" in err
    assert err.count("exitcode  : 2") >= 1


def run(monkeypatch, capsys, *arguments):
    """Run a command in this process; return its exit code."""
    monkeypatch.setattr("sys.argv", ["specinfer", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize(
    ("prompt", "world", "words"),
    [
        (TEXT, "", "and this is the only one: run `torchrun --nproc-per-node 3 -m specinfer generate abcabcab "),
        (TEXT, "2", "and there are 2: run `torchrun --nproc-per-node 3 -m specinfer generate abcabcab "),
        ("-", "", "--tensor-parallel 3 starts 3 processes, and one standard input: give the prompt"),
    ],
)
def test_the_wrong_number_of_processes_is_one_line(prompt, world, words, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", world)
    assert run(monkeypatch, capsys, "generate", prompt, "--tensor-parallel", 3) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


@pytest.mark.parametrize(
    ("count", "config", "words"),
    [
        (3, {}, "4 attention heads and 2 key-value heads cannot be split over 3 processes"),
        (4, {}, "choose a number that divides both"),
    ],
)
def test_heads_that_cannot_be_split_are_refused_before_weights_are_read(count, config, words, tmp_path, monkeypatch):
    LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **config).save_pretrained(tmp_path)  # and no weights
    monkeypatch.setattr(ranks, "join", lambda *_: None)
    with pytest.raises(UnsupportedModel, match=words):
        loading.load(tmp_path, "float32", "cpu", tensor_parallel=count)


def test_bad_numbers_are_refused(folder, monkeypatch):
    for count in (0, 1.5, True):
        with pytest.raises(InputError, match="tensor_parallel"):
            loading.load(folder, tensor_parallel=count)
    monkeypatch.setenv(PATIENCE, "soon")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RankError, match="SPECINFER_RANKS_TIMEOUT='soon' is not a number of seconds"):
        loading.load(folder, "float32", "cpu", tensor_parallel=2)
