"""Passes at fixed shapes: that a recorded pass, run again over other inputs, is the pass itself.

A CUDA graph bakes in whatever a pass does not read from its tensors: numbers of Python, views, addresses.  On a CPU a
list of its operators does the same, run again over the same memory with the numbers as they were, so it stands in.
"""

import copy

import pytest
import torch
from conftest import PROMPTS, plain
from test_heads import draft_for
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specinfer import BestFirst, Expansion, SpeculativeDecoder
from specinfer.attention import TreeModel
from specinfer.attention.passes import graphs
from specinfer.attention.passes.graphs import SEEN, Graphs
from specinfer.common.tensors import size_bucket
from specinfer.errors import InputError

NEW = 48  # tokens: every shape comes several times
TREES = {"best-first": BestFirst(7, 3), "expansion": Expansion((2, 2))}


class Tape(TorchDispatchMode):
    """Operators with what they were given and what they returned, in order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}, func(*args, **(kwargs or {}))))
        return self.calls[-1][-1]


def memory(tensor):
    return tensor.untyped_storage().data_ptr()


def recorded(run, places):
    """Capture as a CUDA graph does, but on a tape; what replays it."""
    with Tape() as tape:
        outputs = run(places)

    def replay():
        for func, args, kwargs, result in tape.calls:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and memory(old) != memory(new):  # else it is a view
                    old.copy_(new)
        return outputs

    return replay


# ---- sizes ----


def test_rungs():
    """Four sizes in every octave; never smaller than what was asked, nor larger by more than a quarter."""
    sizes = sorted({size_bucket(size) for size in range(1, 1025)})
    assert sizes[:16] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32]
    assert len(sizes) == 8 + 4 * 7
    for size in range(1, 1025):
        assert size <= size_bucket(size) <= 1.25 * size
        assert size_bucket(size_bucket(size)) == size_bucket(size)


# ---- what is captured ----


def test_a_shape_is_captured_when_it_comes_again(monkeypatch):
    replays = []

    def capture(run, places):
        def replay():
            replays.append(1)
            return run(places)

        return replay

    def double(tensors):
        return (2 * tensors["x"],)

    monkeypatch.setattr(graphs, "CudaCapture", lambda: capture)
    passes = Graphs()
    for turn in range(SEEN + 3):
        (result,) = passes(double, {"x": torch.full((2,), float(turn))}, memory=1)
        assert result.tolist() == [2.0 * turn] * 2
    assert len(replays) == 3
    passes(double, {"x": torch.ones(3)}, memory=1)
    assert len(replays) == 3
    for _ in range(SEEN + 1):  # the memory has moved: captured anew
        passes(double, {"x": torch.ones(2)}, memory=2)
    assert len(replays) == 4
    assert len(passes.made) == 1


def test_of_too_many_graphs_those_used_longest_ago_are_dropped(monkeypatch):
    monkeypatch.setattr(graphs, "CudaCapture", lambda: lambda run, inputs: lambda: run(inputs))
    passes = Graphs(room=3 * 2 * 400)  # inputs and outputs of three
    for kind in (*"abc", "a", "d"):
        for _ in range(SEEN + 1):
            passes(lambda tensors: (tensors["x"] + 1,), {"x": torch.zeros(100)}, None, kind)
    assert [kind for kind, *_ in passes.made] == ["c", "a", "d"]
    assert passes.held.keys() == passes.made.keys()


def test_results_outlive_the_next_replay(monkeypatch, target):
    def capture(run, inputs):
        outputs = run(inputs)

        def replay():
            for old, new in zip(outputs, run(inputs), strict=True):
                old.copy_(new)
            return outputs

        return replay

    monkeypatch.setattr(graphs, "CudaCapture", lambda: capture)
    found = []
    for replays in (True, False):
        session = TreeModel(target).session(1, 64, graphs=replays)
        for token in range(SEEN + 3):
            found.append(session.append(session.chains([[token]])).row(0))
            session.commit([()])
    torch.testing.assert_close(torch.cat(found[: SEEN + 3]), torch.cat(found[SEEN + 3 :]))


# ---- whole texts ----


@pytest.fixture
def replaying(monkeypatch):
    """Models whose passes are recorded and replayed; how many replays there were."""
    count = []

    def capture(run, places):
        replay = recorded(run, places)
        return lambda: (count.append(1), replay())[1]

    monkeypatch.setattr(graphs, "CudaCapture", lambda: capture)
    return count


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}], ids=str)
def test_replayed_texts_are_the_texts(replaying, target, near, tree, options):
    """Rows of different lengths, drafts and target replayed, caches that grow."""
    wanted = [plain(target, prompt, NEW) for prompt in PROMPTS] if not options["temperature"] else None
    decoder = SpeculativeDecoder(target, drafts=[near], tree=tree)
    decoder.graphs = True  # which asks for a GPU when it is made
    results = decoder.generate(PROMPTS, max_new_tokens=NEW, **options)
    assert len(replaying) > 5  # of passes
    decoder.graphs = False
    again = decoder.generate(PROMPTS, max_new_tokens=NEW, **options)
    assert [r.token_ids for r in results] == [r.token_ids for r in again]
    assert wanted is None or [r.token_ids for r in results] == wanted


def captures(decoder, prompts, **options):
    """Return the ids of a call with graphs, and how many were captured in it."""
    kept = [each for model in decoder.networks for each in model.graphed.kept]
    before = {id(place) for each in kept for place in each.graphs.made.values()}
    decoder.graphs = True
    found = [result.token_ids for result in decoder.generate(prompts, max_new_tokens=NEW, **options)]
    decoder.graphs = False
    kept = [each for model in decoder.networks for each in model.graphed.kept]
    assert all(each.user() is None for each in kept), "a session outlived its call"
    return found, len({id(place) for each in kept for place in each.graphs.made.values()} - before)


@pytest.fixture
def deciders(target, near):
    return SpeculativeDecoder(copy.deepcopy(target), drafts=[copy.deepcopy(near)], tree=BestFirst(7, 3))


def test_graphs_outlive_a_call(replaying, deciders):
    """A shape that has come a few times is never captured again; what a call left in the cache is not seen."""
    first, made = captures(deciders, PROMPTS)
    assert made >= 2  # of the target and the draft
    assert captures(deciders, PROMPTS[::-1])[0] == first[::-1]
    for _ in range(SEEN):
        captures(deciders, PROMPTS)
    assert captures(deciders, PROMPTS) == (first, 0)
    sampled = {"temperature": 0.8, "seed": 3}
    usual = [result.token_ids for result in deciders.generate(PROMPTS, max_new_tokens=NEW, **sampled)]
    assert captures(deciders, PROMPTS, **sampled)[0] == usual


def replace_weight(model):
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(model.model.layers[0].mlp.up_proj.weight * -2)


def hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: -2 * output)


def patch(model):
    model.model.layers[1].mlp.forward = lambda states: states


def change_setting(model):
    model.model.layers[0].self_attn.scaling *= 3


@pytest.mark.parametrize("change", [replace_weight, hook, patch, change_setting])
def test_graphs_of_a_model_that_changed_are_not_replayed(replaying, deciders, change):
    captures(deciders, PROMPTS)
    change(deciders.target.model)
    usual = [result.token_ids for result in deciders.generate(PROMPTS, max_new_tokens=NEW, temperature=0)]
    found, made = captures(deciders, PROMPTS, temperature=0)
    assert found == usual
    assert made > 0


def test_a_cache_whose_rows_grow_is_captured_anew(replaying, deciders):
    """Rows that join a session of fewer move it to other buffers of the same capacity."""
    greedy = {"max_new_tokens": NEW, "temperature": 0}
    usual = [deciders.generate(prompt, **greedy).token_ids for prompt in PROMPTS]
    deciders.graphs = True
    scheduler = deciders.scheduler(len(PROMPTS))
    requests = [deciders.prepare(prompt, **greedy) for prompt in PROMPTS]
    for request in requests:
        scheduler.add(request)
        for _ in range(SEEN + 2):  # captured with so many rows
            scheduler.step()
    while scheduler.step():
        pass
    assert [request.result.token_ids for request in requests] == usual


def test_passes_of_new_shapes_do_not_count_as_what_trees_cost(replaying, deciders):
    """The first ones are slow: kernels load, attention is planned, graphs are captured."""
    deciders.policy = Observing(7, 3)
    SECONDS.clear()
    for _ in range(3):
        captures(deciders, PROMPTS[:1])
    timed = [seconds is not None for seconds in SECONDS]
    assert not any(timed[: SEEN + 1])
    assert all(timed[-5:])


class Observing(BestFirst):
    """Keeps the seconds that it is told."""

    adapts = True

    def observe(self, *, seconds, **others):
        """Keep them."""
        SECONDS.append(seconds)


SECONDS = []


def test_few_caches_are_kept(replaying, deciders):
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[:2], PROMPTS * 2, PROMPTS * 3):
        captures(deciders, prompts)
    assert all(len(model.graphed.kept) <= graphs.IDLE + 1 for model in deciders.networks)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Where each model is compiled once."""
    return tmp_path_factory.mktemp("packages")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("draft", ["model", "head"])
def test_graphs_on_a_gpu_write_the_same_texts(target, near, draft, tree, options, compiled, packages, monkeypatch):
    monkeypatch.setenv("SPECINFER_CACHE", str(packages))
    dtype = torch.float32 if compiled else torch.float64  # in which compiled passes are not held to rounding
    models = [copy.deepcopy(model).to("cuda", dtype) for model in (target, near)]
    texts = []
    for replay in (False, True):
        options_of = {"graphs": replay, "compile": replay and compiled}
        drafts = [models[1] if draft == "model" else draft_for(target)]
        decoder = SpeculativeDecoder(models[0], drafts=drafts, tree=tree, **options_of)
        assert (decoder.passes == "passes: compiled") == options_of["compile"], decoder.passes
        texts.append([result.token_ids for result in decoder.generate(PROMPTS, max_new_tokens=NEW, **options)])
    assert texts[0] == texts[1]


def test_graphs_need_a_gpu(target):
    with pytest.raises(InputError, match="graphs=True is for GPUs, and a model is on the cpu"):
        SpeculativeDecoder(target, drafts="ngram", graphs=True)
