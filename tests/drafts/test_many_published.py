"""Rows that join a running batch, with published heads and a target's own layer: ids and trees are those alone.

Every format keeps something of each row (states, caches, roots), and all of it must join: greedily or sampled, in turn.
"""

from itertools import cycle

import pytest
import test_mtp
import test_published_dflash as dflash
import test_published_eagle as eagle
import test_published_medusa as medusa
from conftest import tiny_llama
from test_many import decoder, trees_alike

from specinfer.drafts.published.formats import load_published
from specinfer.drafts.published.mtp import MtpDraft

released = pytest.fixture(test_mtp.small_models_have_such_layers.__wrapped__)
exact = pytest.fixture(scope="module")(test_mtp.folder.__wrapped__)


@pytest.fixture(scope="module")
def deep():
    """A target whose layers the heads read."""
    return tiny_llama(num_hidden_layers=eagle.LAYERS)


@pytest.mark.parametrize(("kind", "temperature"), [*zip(eagle.FORMATS, cycle([0, 1]))])
def test_eagle(deep, kind, temperature, tmp_path):
    path = eagle.write(tmp_path / "head", *eagle.random_head(kind, 3))
    rule = load_published(path).network.conventions(eagle.LAYERS)[0]
    assert trees_alike(decoder(deep, [load_published(path, rule)]), temperature) > 10


@pytest.mark.parametrize(("kind", "temperature"), [*zip(dflash.KINDS, cycle([0, 1]))])
def test_block_heads(kind, temperature, tmp_path):
    draft = dflash.load(dflash.random_head(tmp_path / "head", kind, 0)[0])
    assert trees_alike(decoder(dflash.target.__wrapped__(), [draft]), temperature) > 10


@pytest.mark.parametrize("temperature", [0, 1])
def test_medusa(temperature, tmp_path):
    head = medusa.draft_of(medusa.write(tmp_path / "head", medusa.random_weights(heads=4)))
    assert trees_alike(decoder(tiny_llama(), [head]), temperature) > 10


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_targets_own_layer(exact, released, temperature):
    assert trees_alike(decoder(test_mtp.read(exact), [MtpDraft(test_mtp.NORMED)]), temperature) > 10
