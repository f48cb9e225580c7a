"""Counter-based noise: golden values, the reference generator, its distribution, and independence.

The statistical tests have fixed keys; each would raise a false alarm for 1 in 10,000 choices of them.
"""

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare, gumbel_r, kstest

from specinfer.engine.gumbel import AHEAD, COIN, COUPLING, DRAFT, Coupling, _mixed, _mixed_on_host, gumbel, key, uniform

FALSE_ALARM = 1e-4
MASK = 2**64 - 1
GOLDEN_KEYS = [4964578127960768432, 937349279089814987, -2786449784172733320]
GOLDEN_UNIFORM = [0.9035539754366726, 0.26468556615248884, 0.139244905994788]
GOLDEN_GUMBEL = [-0.794894, 1.215499, 1.90092, 1.063711]


def splitmix64(state, index):
    """The `index`-th output (from 0) of SplitMix64 started at `state`, as published (Vigna's splitmix64.c)."""
    for _ in range(index + 1):
        state = (state + 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def draws(own_key, count=20_000):
    return gumbel(int(own_key), count).numpy()


# ---- settings: a seed keeps its text from release to release ----


def test_golden_keys():
    """Keys of known seeds, streams and counters."""
    assert key(0, COUPLING, 0) == GOLDEN_KEYS[0]
    assert key(1, COIN, 7) == GOLDEN_KEYS[1]
    assert key(2**64 - 1, DRAFT, 3) == GOLDEN_KEYS[2]
    assert key(-1, DRAFT, 3) == GOLDEN_KEYS[2]  # seeds count modulo 2**64
    assert (COUPLING, COIN, DRAFT) == (1, 2, 3)


def test_golden_numbers():
    """Uniform and Gumbel numbers of known keys."""
    assert [uniform(key(5, COIN, 1), i) for i in range(3)] == GOLDEN_UNIFORM
    assert draws(key(5, COUPLING, 1), 4).tolist() == pytest.approx(GOLDEN_GUMBEL, abs=2e-6)


# ---- the reference ----


def test_the_published_sequence():
    """Vigna's test vector: SplitMix64 started at 1234567."""
    assert [splitmix64(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("start", [0, 1, 1234567, -5, 2**63 - 1, -(2**63), key(3, COIN)])
def test_scalars_are_the_reference(start):
    """uniform(key, n) is the n-th output of SplitMix64 started at the key, its top 53 bits."""
    for index in (0, 1, 2, 100):
        assert uniform(start, index) == (splitmix64(start & MASK, index) >> 11) / 2**53


@pytest.mark.parametrize("start", [0, 1, 1234567, -5, 2**63 - 1, -(2**63), key(3, COUPLING)])
def test_tensors_are_the_reference(start):
    """gumbel(key, n) is -log(-log(1 - w)) with w the same 53 bits: the tensor arithmetic wraps as it should."""
    bits = np.array([splitmix64(start & MASK, i) >> 11 for i in range(200)], dtype=np.float64)
    wanted = -np.log(-np.log1p(-(bits + 0.5) / 2**53))
    assert draws(start, 200) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_hosts_and_devices_mix_alike():
    state = torch.randint(-(2**63), 2**63 - 1, (1000,))
    assert torch.equal(_mixed(state.clone()), _mixed_on_host(state.clone()))


def test_every_count_has_the_same_numbers():
    """More of them are the same ones first, up to a large vocabulary."""
    noise = gumbel(3, 151_936)
    assert noise.dtype == torch.float32
    for count in (1, 7, 49_152):
        assert torch.equal(gumbel(3, count), noise[:count])


def test_noise_is_made_once_a_position():
    """What a draft looked at is what the target chooses by; what was passed is not kept, and made again it is equal."""
    coupling, cpu = Coupling(5), torch.device("cpu")
    made = [coupling.at(position, 9, cpu) for position in (3, 4, 5)]
    assert coupling.at(4, 9, cpu) is made[1]
    assert len(coupling._made) == AHEAD  # those of the next positions, too
    coupling.forget(5)
    assert min(position for position, *_ in coupling._made) == 5
    for position in (3, 4, 5, 6):
        assert torch.equal(coupling.at(position, 9, cpu), gumbel(key(5, COUPLING, position), 9))


def test_gumbel_numbers_are_finite():
    """Neither end of the uniform numbers becomes an infinity, over a million counters."""
    noise = gumbel(9, 1_000_000)
    assert torch.isfinite(noise).all()
    assert noise.min() < -2.4
    assert noise.max() > 12


# ---- distributions ----


def test_uniform_numbers_are_uniform_in_zero_one():
    """In [0, 1), spread evenly."""
    numbers = np.array([uniform(key(1, COIN), i) for i in range(20_000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert kstest(numbers, "uniform").pvalue > FALSE_ALARM
    assert chisquare(np.histogram(numbers, 64, (0, 1))[0]).pvalue > FALSE_ALARM


def test_gumbel_numbers_follow_the_standard_gumbel_law():
    """Moments within five standard errors, and the Kolmogorov-Smirnov test."""
    noise = draws(key(2, COUPLING, 5), 200_000).astype(np.float64)
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=5 * np.sqrt(np.pi**2 / 6 / len(noise)))
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=5 * np.sqrt(4.4 * (np.pi**2 / 6) ** 2 / len(noise)))
    assert kstest(noise, gumbel_r.cdf).pvalue > FALSE_ALARM


def test_the_winner_of_the_race_follows_the_law():
    """argmax(log p + g) over consecutive positions is distributed as p, rare tokens too."""
    p = np.array([0.5, 0.25, 0.15, 0.08, 0.015, 0.005])
    keys = torch.tensor([key(4, COUPLING, position) for position in range(20_000)])
    winners = (torch.tensor(p).log() + torch.stack([gumbel(int(own), 6) for own in keys])).argmax(1)
    assert chisquare(np.bincount(winners, minlength=6), p * 20_000).pvalue > FALSE_ALARM


# ---- independence ----

NEIGHBOURS = {
    "positions": lambda i: (key(0, COUPLING, i), key(0, COUPLING, i + 1)),
    "seeds": lambda i: (key(i, COUPLING, 9), key(i + 1, COUPLING, 9)),
    "streams": lambda i: (key(0, COUPLING, i), key(0, COIN, i)),
    "seed and position": lambda i: (key(1, COUPLING, i), key(2, COUPLING, i - 1)),
}


@pytest.mark.parametrize("pair", NEIGHBOURS.values(), ids=NEIGHBOURS.keys())
@pytest.mark.parametrize("counters", [(0, 0), (0, 1), (5, 4)], ids=str)
def test_neighbouring_keys_are_independent(pair, counters):
    """A 6 by 6 table of the numbers of neighbouring keys shows no association."""
    pairs = [pair(i) for i in range(1, 8001)]
    a, b = (np.array([draws(own[side], 6)[counters[side]] for own in pairs]) for side in (0, 1))
    cuts = gumbel_r.ppf(np.arange(1, 6) / 6)
    table = np.histogram2d(np.digitize(a, cuts), np.digitize(b, cuts), bins=6)[0]
    assert chi2_contingency(table).pvalue > FALSE_ALARM
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(len(a))


def test_neighbouring_tokens_are_independent():
    """Numbers of one key at lags 1 to 4 are uncorrelated."""
    noise = draws(key(7, COUPLING, 3), 50_000)
    for lag in range(1, 5):
        assert abs(np.corrcoef(noise[:-lag], noise[lag:])[0, 1]) < 4 / np.sqrt(len(noise))


def test_keys_of_seeds_and_streams_differ():
    """No two of many keys collide, whatever the seed, the stream and the counter."""
    keys = {key(s, t, p) for s in range(30) for t in (COUPLING, COIN, DRAFT) for p in range(30)}
    assert len(keys) == 30 * 3 * 30


def test_the_order_of_counters_matters():
    """Keys are signed 64-bit integers that depend on every counter and its place."""
    keys = [key(1, COIN, p) for p in range(100)]
    assert key(1, COIN, 2, 3) != key(1, COIN, 3, 2)
    assert key(1, COIN, 0) != key(1, COIN)
    assert all(-(2**63) <= k < 2**63 for k in keys)


def test_coins_and_gumbels_of_one_row_share_nothing():
    """The streams of one seed and position are uncorrelated, so coins do not know the choices."""
    coins = np.array([uniform(key(3, COIN, i), 1) for i in range(8000)])
    noise = np.array([draws(key(3, COUPLING, i), 2)[1] for i in range(8000)])
    assert abs(np.corrcoef(coins, noise)[0, 1]) < 4 / np.sqrt(8000)
