"""Profiles: what adaptive trees learnt, saved and given back; runs that repeat themselves, whatever the clock says."""

import copy
import json
import pickle

import pytest
from conftest import like, tiny_llama
from machine import Machine, quiet, threads

from specinfer import Auto, SpeculativeDecoder
from specinfer.errors import InputError, PolicyError

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1]


@pytest.fixture(scope="module")
def profile():
    return Machine(Auto(), 1).text(60).policy.to_json()


def test_a_profile_survives_json(profile, tmp_path):
    path = tmp_path / "profile.json"
    Auto(profile=profile).save(path)
    again = Auto(profile=path).to_json()
    assert json.loads(json.dumps(profile)) == again


def test_choices_do_not_depend_on_seconds(profile):
    """The same text on machines that differ; every text starts from the profile alone."""
    policy = Auto(profile=profile)
    runs = [
        Machine(policy, 3, load, noise).text(60).nodes for load, noise in [(quiet, 0), (threads, 1.0), (quiet, 2.0)]
    ]
    assert runs[0] == runs[1] == runs[2]
    assert sum(runs[0][:8]) > 0
    without = [Machine(Auto(), 3, load, 0.0).text(60).nodes for load in (quiet, threads)]
    assert without[0] != without[1]


def test_a_profile_starts_warm(profile):
    """The first steps explore nothing; the text is as quick as one that comes later."""
    assert Machine(Auto(profile=profile), 3).text(60).speed() > 1.3


def test_runs_repeat_themselves_under_delays(monkeypatch, profile):
    """Ids and trees of 20 runs, by a clock that jumps."""
    import specinfer.engine.sessions as module

    target = tiny_llama(0)
    decoder = SpeculativeDecoder(target, drafts=[like(target), "ngram"], tree=Auto(profile=profile))
    jumps = __import__("random").Random(0)
    now = [0.0]

    def clock():
        now[0] += jumps.choice([0.0, 0.001, 0.2])
        return now[0]

    monkeypatch.setattr(module, "perf_counter", clock)
    runs = [decoder.generate(PROMPT, max_new_tokens=12) for _ in range(20)]
    trees = {json.dumps([step.tree.to_dict() for step in run.steps]) for run in runs}
    assert len(trees) == len({tuple(run.token_ids) for run in runs}) == 1
    assert any(len(step.tree) > 1 for step in runs[0].steps)


def test_a_profile_of_other_drafts_is_refused(profile):
    target = tiny_llama(0)
    decoder = SpeculativeDecoder(target, drafts=["ngram"], tree=Auto(profile=profile))
    with pytest.raises(PolicyError, match="for 2 drafts, not 1"):
        decoder.generate(PROMPT, max_new_tokens=4)


def test_nothing_learnt_is_not_saved(tmp_path):
    with pytest.raises(InputError, match="costs are not known"):
        Auto().save(tmp_path / "profile.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, "{}", '{"kind": 1, "version": []}', "\xff"])
def test_files_that_are_no_profiles_are_refused_in_one_line(text, tmp_path):
    path = tmp_path / "profile.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match="profile") as caught:
        Auto(profile=path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("worse", [None, "a", float("nan"), float("inf"), -1, True, 1e300, [], {}, [[1]], [[[]]]])
def test_damaged_fields_are_refused_by_name(profile, worse):
    """Every field in turn, and the first entry of every list."""
    for name, value in profile.items():
        with pytest.raises(InputError, match="profile"):
            Auto(profile={**profile, name: worse if worse != [] or name not in ("levels", "accepted") else 0})
        if isinstance(value, list):
            with pytest.raises(InputError, match=rf"\b{name}\b"):
                Auto(profile={**profile, name: [worse, *value[1:]]})


@pytest.mark.parametrize("again", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_policies_are_copied_with_what_they_learnt(again):
    """And learn on apart."""
    policy = Machine(Auto(), 1).text(30).policy
    other = again(policy)
    assert other.to_json() == policy.to_json()
    Machine(other, 2).text(30)
    assert other.to_json() != policy.to_json()
