"""Adaptive trees while others use the machine: `machine` makes up texts, seconds and load."""

import numpy as np
import pytest
from machine import Machine, quiet, threads

from specinfer import Auto

SEEDS = range(6)


def back(seed, noise=0.03):
    """Return after how many steps trees are scored in six of eight, when a load ends that was there for 40 steps."""
    machine = Machine(Auto(), seed, threads, noise).text(40)
    machine.load, machine.noise = quiet, 0.03
    trees = np.array(machine.text_on(72).nodes[40:]) > 0
    return next((step for step in range(64) if trees[step : step + 8].sum() >= 6), 99)


@pytest.mark.parametrize("noise", [0.03, 0.2])
def test_trees_are_back_within_40_steps_of_a_load(noise):
    assert max(back(seed, noise) for seed in SEEDS) <= 40


@pytest.mark.parametrize(("ease", "least"), [("usual", 0.9), ("hard", 0.9), ("wrong", 0.9)])
def test_under_lasting_load_plain_decoding_is_hardly_faster(ease, least):
    """Trees cost twice as much there; the first steps, in which that is learnt, count."""
    speeds = [Machine(Auto(), seed, threads).text(160, ease).speed() for seed in SEEDS]
    assert np.mean(speeds) >= least


def test_without_load_trees_are_worth_it():
    """The best fixed trees make 1.7."""
    machines = [Machine(Auto(), seed) for seed in SEEDS]
    assert np.mean([machine.text(100).speed() for machine in machines]) > 1.7


def test_a_change_of_the_machines_speed_changes_no_choice_for_long():
    """Everything is three times slower, plain steps and trees alike."""
    for seed in SEEDS:
        machine = Machine(Auto(), seed).text(60)
        machine.load = lambda tokens: 3.0
        assert np.count_nonzero(machine.text_on(40).nodes[-30:]) >= 22
