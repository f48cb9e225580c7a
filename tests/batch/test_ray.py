"""Ray Data on a local cluster of two workers: texts as without it, and a killed worker loses nothing."""

import os
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from conftest import byte_tokenizer, like, tiny_llama

from specinfer import BestFirst, SpeculativeDecoder
from specinfer.errors import InputError

ray = pytest.importorskip("ray", reason="an extra")
pytest.importorskip("ray.data", reason="an extra")

NEW, BLOCK = 8, 4
PROMPTS = [f"{number}, {number + 1}, " for number in range(24)]


def made():
    """A decoder of tiny models."""
    target = tiny_llama()
    return SpeculativeDecoder(target, byte_tokenizer(), [like(target)], BestFirst(7, 4), compile=False)


def loaded(log, target, drafts, **options):
    """The same, which writes down who generated what: a file for each process, a line for each prompt."""
    decoder, path = made(), Path(log) / f"{os.getpid()}"
    request = decoder._one_of_many

    def noted(common, keep_stop_string, prompt, number, **more):
        with path.open("a") as file:
            file.write(f"{prompt['prompt']}\n" if isinstance(prompt, dict) else "")  # options are tried out first
        return request(common, keep_stop_string, prompt, number, **more)

    path.touch()
    decoder._one_of_many = noted
    return decoder


@pytest.fixture(scope="module")
def cluster():
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    # Workers inherit the variables, so that those that wait for work can be used; a driver that counts usage for Ray
    # keeps a thread for the rest of its process.
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
        ray.shutdown()


def generated(dataset, log, **options):
    from specinfer.integrations.ray import generate

    log.mkdir()
    return generate(dataset, load=partial(loaded, str(log)), block=BLOCK, max_new_tokens=NEW, **options)


def lines(log):
    """What each process generated, in files of processes."""
    return {path.name: path.read_text().splitlines() for path in log.iterdir()}


def items(prompts):
    return ray.data.from_items([{"prompt": prompt, "number": i} for i, prompt in enumerate(prompts)])


def test_texts_are_those_without_it_and_bad_rows_are_reported(cluster, tmp_path):
    options = {"temperature": 1, "seed": 5}
    prompts = [*PROMPTS[:9], " ", *PROMPTS[9:], "x" * 300]
    bad = {9: "empty", len(prompts) - 1: "exceed"}
    found = generated(items(prompts), tmp_path / "log", concurrency=1, **options).take_all()
    assert [row["number"] for row in found] == [*range(len(prompts))]
    assert {number: row["error"] is None for number, row in enumerate(found)} == {
        number: number not in bad for number in range(len(prompts))
    }
    assert all(words in found[number]["error"] for number, words in bad.items())
    good = [row for row in found if row["error"] is None]
    same_as_alone(good, range(len(PROMPTS)), **options)
    assert [row["seed"] for row in good] == [5] * len(PROMPTS)
    assert len(lines(tmp_path / "log")) == 1


def same_as_alone(found, chosen, **options):
    """Check some rows against what a decoder here generates from their prompts."""
    decoder = made()
    for row in (found[number] for number in chosen):
        wanted = decoder.generate(row["prompt"], max_new_tokens=NEW, **options)
        assert row["text"] == wanted.text
        assert list(row["token_ids"]) == wanted.token_ids
        assert row["finish_reason"] == wanted.finish_reason
        assert 1 <= row["target_passes"] <= NEW


def test_a_column_of_seeds_and_one_of_ids(cluster, tmp_path):
    rows = [{"ids": [5, 9, 17], "seed": seed} for seed in (3, 4, 3)]
    found = generated(ray.data.from_items(rows), tmp_path / "log", column="ids", temperature=1).take_all()
    assert [row["seed"] for row in found] == [3, 4, 3]
    texts = [list(row["token_ids"]) for row in found]
    assert texts[0] == texts[2] != texts[1]
    assert texts[1] == made().generate([5, 9, 17], seed=4, temperature=1, max_new_tokens=NEW).token_ids


def test_a_killed_worker_loses_nothing(cluster, tmp_path):
    """Kill -9 in the middle: every row is there, in order, and none outside the lost blocks was generated twice."""
    log, killed, fetched = tmp_path / "log", None, set()
    prompts, found = [f"{number}, {number + 1}, " for number in range(96)], []
    for row in generated(items(prompts), log, concurrency=2, temperature=0).iter_rows():
        found.append(row)
        if killed is None and len(found) > BLOCK:
            fetched = {row["prompt"] for row in found}
            killed = max(lines(log), key=lambda name: len(lines(log)[name]))
            os.kill(int(killed), signal.SIGKILL)
    assert [row["prompt"] for row in found] == prompts
    assert {row["error"] for row in found} == {None}
    assert {row["seed"] for row in found} == {None}
    same_as_alone(found, range(0, len(found), 12), temperature=0)
    generated_by = lines(log)
    assert len(generated_by) == 3  # two workers, and the one that took a dead one's place
    assert 0 < len(generated_by[killed]) < len(found)
    times = Counter(prompt for texts in generated_by.values() for prompt in texts)
    repeated = {prompt for prompt, count in times.items() if count > 1}
    assert repeated.isdisjoint(fetched)
    assert repeated <= {*generated_by[killed]}
    assert len(repeated) <= 2 * BLOCK  # the block under way, and one that was finished and not fetched yet


def test_bad_input_is_refused_before_anything_runs(cluster, tmp_path):
    from specinfer.integrations.ray import generate

    dataset = items(PROMPTS)
    for arguments, options, words in (
        ((PROMPTS,), {}, "not of Ray Data"),
        ((dataset, "text"), {}, "no column 'text', but prompt, number"),
        ((dataset,), {"concurrency": 0}, "concurrency=0"),
        ((dataset,), {"block": 0}, "block=0"),
        ((dataset.add_column("text", len),), {}, "column 'text' already"),
        ((dataset,), {"seed": "x"}, "seed"),
    ):
        with pytest.raises(InputError, match=words):
            generate(*arguments, **options)
    with pytest.raises(ray.exceptions.RayTaskError, match="max_tokens"):
        generated(dataset, tmp_path / "log", max_tokens=3).take_all()


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)
    from specinfer.integrations.ray import generate

    with pytest.raises(InputError, match="pip install"):
        generate(None)
