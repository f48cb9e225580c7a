"""Decoding on a stand-in for a GPU: ids are the CPU's, nothing mixes devices, few waits, copies and launches a step.

The stand-in is tested first: a count is worth something only if it would notice one more.
"""

import copy
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import PROMPTS, like, tiny_llama
from stand_in import DEVICE, StandIn, on_device, standing_in
from test_heads import draft_for
from test_published_dflash import LAYERS, load, random_head
from transformers import Qwen2Config, Qwen2ForCausalLM

from specinfer import BestFirst, Expansion, Sampled, SpeculativeDecoder
from specinfer.attention.passes import graphs
from specinfer.errors import NumericalError, UnsupportedModel
from specinfer.tree import Chain, DenseSource, Growth, Kind

TREE = BestFirst(8, 3)
NEW, LENGTHS = 10, [10, 4, 10, 7]
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLING: dict[str, Any] = {"temperature": 0.8, "seed": 3}


class Side(NamedTuple):
    """The models of one device."""

    target: Any
    near: Any
    head: Any

    def decoder(self, draft: str, tree: Any, graphs: bool = False) -> SpeculativeDecoder:
        """Return a decoder with drafts of a kind."""
        objects = {"model": self.near, "head": self.head}
        names = [] if draft == "none" else draft.split(" and ")
        tree = {"none": None, "lookahead": "auto"}.get(draft, tree)
        return SpeculativeDecoder(self.target, None, [objects.get(name, name) for name in names], tree, graphs=graphs)


@pytest.fixture(scope="module")
def host() -> Side:
    target = tiny_llama(0, max_position_embeddings=512)
    return Side(target, like(target), draft_for(target))


@pytest.fixture(scope="module")
def there(host: Side) -> Side:
    with standing_in():
        target, near = (copy.deepcopy(model).to(DEVICE) for model in host[:2])
    return Side(target, near, host.head)


@pytest.fixture
def device() -> Any:
    with standing_in() as device:
        yield device


def ids(results: Any) -> list[list[int]]:
    return [result.token_ids for result in results]


# ---- the stand-in ----


def test_tensors_are_where_their_values_were_put_or_computed(device: StandIn) -> None:
    here, moved = torch.ones(3), torch.ones(3).to(DEVICE)
    made = [
        torch.zeros(2, device=DEVICE),
        torch.tensor([1], device=DEVICE),
        moved.new_zeros(4),
        torch.arange(3).to(moved),
    ]
    for tensor in (moved, moved[1:], 2 * moved, moved.double(), moved.add_(1), torch.cat((moved, moved)), *made):
        assert tensor.device == DEVICE
        assert tensor.is_cuda
    for tensor in (here, moved.cpu(), moved.to("cpu"), moved.new_zeros(2, device="cpu"), torch.zeros_like(here)):
        assert tensor.device.type == "cpu"
        assert not tensor.is_cuda
    assert moved.tolist() == [2.0] * 3
    assert here.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    "mixed",
    [
        lambda here, there: there + here,
        lambda here, there: here.add_(there),
        lambda here, there: torch.cat((there, here)),
        lambda here, there: there @ here,
        lambda here, there: torch.where(there > 0, there, here),
        lambda here, there: there.gather(0, here.long()),
        lambda here, there: torch.stack((there[0], here[0])),
        lambda here, there: torch.nn.functional.linear(there[None], here[None]),
    ],
)
def test_operands_on_two_devices_are_refused(device: StandIn, mixed: Any) -> None:
    here = torch.ones(3)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        mixed(here, here.to(DEVICE))


def test_numbers_of_the_host_are_allowed_and_numpy_is_not(device: StandIn) -> None:
    there = torch.ones(3, device=DEVICE)
    assert (there + torch.tensor(1.0)).tolist() == torch.minimum(torch.tensor(2.0), there + 5).tolist() == [2.0] * 3
    for read in (lambda: there.numpy(), lambda: np.asarray(there)):
        with pytest.raises(TypeError, match="copy it to the host first"):
            read()


@pytest.mark.parametrize(
    "wait",
    [
        lambda there: there.tolist(),
        lambda there: there.cpu(),
        lambda there: there.to("cpu"),
        lambda there: there[0].item(),
        lambda there: bool(there[0] > 0),
        lambda there: range(3)[there.long()[0]],
        lambda there: there.nonzero(),
        lambda there: there[there > 0],
        lambda there: there[[0, 1]],
        lambda there: there.repeat_interleave(there.long()),
        lambda there: torch.empty(3).copy_(there),
        lambda there: there.copy_(torch.empty(3)),
        lambda there: torch.ones(3).to(there),
        lambda there: torch.tensor([1], device=DEVICE),
        lambda there: torch.cuda.synchronize(),
    ],
)
def test_what_waits_is_counted_and_cannot_be_captured(device: StandIn, wait: Any) -> None:
    there = torch.ones(3, device=DEVICE)
    wait(there)
    assert device.waits.total() == 1
    with pytest.raises(UnsupportedModel, match="a pass cannot be captured"):
        device.capture(lambda inputs: (wait(inputs["x"]),), {"x": there})


def test_copies_and_launches_are_counted(device: StandIn) -> None:
    there = torch.ones(3).to(DEVICE, non_blocking=True)
    assert (device.copies.total(), device.launches.total(), device.waits.total()) == (1, 0, 0)
    ((there[1:] + 1).view(2, 1).expand(2, 2) * 2).contiguous()  # views launch nothing, and nothing is to be copied
    torch.nn.functional.linear(there[None], torch.empty(3, 3, device=DEVICE))
    there[there > 0] = 2.0
    assert dict(device.launches) == {"add": 1, "mul": 1, "mm": 1, "gt": 1, "index_put_": 1}
    assert (device.copies.total(), device.waits.total()) == (1, 0)


def test_a_replay_is_one_launch_and_reads_its_inputs_anew(device: StandIn) -> None:
    def run(inputs: graphs.Tensors) -> tuple[torch.Tensor, ...]:
        total = torch.zeros(2, device=DEVICE)
        total += inputs["x"]
        return (total.view(2, 1) * 3,)

    inputs = {"x": torch.ones(2, device=DEVICE)}
    replay = device.capture(run, inputs)
    assert not any(name in device.launches for name in ("zeros", "add_", "mul"))
    for value in (4.0, 5.0):
        inputs["x"].fill_(value)
        device.reset()
        assert replay()[0].flatten().tolist() == [3 * value] * 2
        assert dict(device.launches) == {"graph": 1}


def test_torch_is_as_it_was_afterwards() -> None:
    before = torch.cuda.synchronize, torch.cuda.get_device_name, torch.Generator, graphs.CudaCapture
    with standing_in():
        there = torch.ones(3).to(DEVICE)
    assert on_device(there)
    assert there.device.type == "cpu"
    assert (torch.cuda.synchronize, torch.cuda.get_device_name, torch.Generator, graphs.CudaCapture) == before
    assert (there + torch.ones(3)).tolist() == [2.0] * 3


# ---- ids ----


@pytest.mark.parametrize(("draft", "options"), [
    *((draft, options) for draft in ("none", "recycling", "model", "head") for options in (GREEDY, SAMPLING)),
    ("ngram", GREEDY), ("suffix", SAMPLING), ("lookahead", GREEDY), ("model and recycling", SAMPLING),
], ids=str)  # fmt: skip
def test_ids_are_the_cpus(host: Side, there: Side, device: StandIn, draft: str, options: dict[str, Any]) -> None:
    """A ragged batch, whose rows end at different steps, and one row whose passes are replayed."""
    found = there.decoder(draft, TREE).generate(PROMPTS, max_new_tokens=LENGTHS, **options)
    assert ids(found) == ids(host.decoder(draft, TREE).generate(PROMPTS, max_new_tokens=LENGTHS, **options))
    assert not device.launches["graph"]
    one = there.decoder(draft, TREE, graphs=True).generate(PROMPTS[2], max_new_tokens=20, **options)
    assert one.token_ids == host.decoder(draft, TREE).generate(PROMPTS[2], max_new_tokens=20, **options).token_ids
    assert device.launches["graph"] > 1


@pytest.mark.parametrize("draft", ["recycling", "model", "head"])
@pytest.mark.parametrize("tree", [Expansion((2, 2)), Sampled((2, 1)), "auto"], ids=str)
def test_ids_are_the_cpus_with_other_trees(host: Side, there: Side, device: StandIn, draft: str, tree: Any) -> None:
    found = there.decoder(draft, tree).generate(PROMPTS, max_new_tokens=NEW, **SAMPLING)
    assert ids(found) == ids(host.decoder(draft, tree).generate(PROMPTS, max_new_tokens=NEW, **SAMPLING))


@pytest.mark.parametrize("draft", ["none", "recycling", "model", "head"])
def test_ids_are_the_cpus_where_rows_join(host: Side, there: Side, device: StandIn, draft: str) -> None:
    many = there.decoder(draft, TREE, graphs=True).generate_many(PROMPTS, max_rows=2, max_new_tokens=8, **GREEDY)
    found = {done.number: done.result.token_ids for done in many}
    wanted = host.decoder(draft, TREE).generate(PROMPTS, max_new_tokens=8, **GREEDY)
    assert found == dict(enumerate(ids(wanted)))


@pytest.mark.parametrize(("kind", "tree"), [
    ("z-lab", TREE), ("dflash2", Expansion((2, 2))), ("dspark gated", Expansion((2, 2))), ("dspark rnn", TREE),
    ("domino", Expansion((2, 2))),
], ids=str)  # fmt: skip
def test_published_heads_copy_without_waiting(device: StandIn, tmp_path: Path, kind: str, tree: Any) -> None:
    """Their ids are the CPU's, and what a level brings to the device is not waited for."""
    target, head = tiny_llama(3, num_hidden_layers=LAYERS), load(random_head(tmp_path / "head", kind, 0)[0])
    wanted = SpeculativeDecoder(target, None, [head], tree, compile=False).generate(PROMPTS, max_new_tokens=4, **GREEDY)
    decoder = SpeculativeDecoder(target.to(DEVICE), None, [head], tree, compile=False)
    device.reset()
    assert ids(decoder.generate(PROMPTS, max_new_tokens=4, **GREEDY)) == ids(wanted)
    assert not [wait for wait in device.waits if "blocking" in wait]


@pytest.mark.parametrize("kind", ["z-lab", "dspark rnn"])
@pytest.mark.parametrize("rows", [1, 3])
def test_published_heads_predict_the_cpus_trees_where_passes_are_replayed(
    device: StandIn, tmp_path: Path, kind: str, rows: int
) -> None:
    """A block comes first in its row, and padding behind its context."""
    target, head = tiny_llama(3, num_hidden_layers=LAYERS), load(random_head(tmp_path / "head", kind, 0)[0])
    options = {"max_new_tokens": 24, **GREEDY}
    wanted = SpeculativeDecoder(target, None, [head], TREE, compile=False).generate(PROMPTS[:rows], **options)
    decoder = SpeculativeDecoder(target.to(DEVICE), None, [head], TREE, compile=False, graphs=True)
    found = decoder.generate(PROMPTS[:rows], **options)
    assert ids(found) == ids(wanted)
    trees = [[[*map(int, step.tree.tokens)] for row in results for step in row.steps] for results in (found, wanted)]
    assert trees[0] == trees[1]
    assert device.launches["graph"] > 1


@pytest.mark.parametrize("warper", [{"eta_cutoff": 0.01}, {"top_h": 0.4}], ids=str)
@pytest.mark.parametrize("draft", ["recycling", "head"])
def test_drafts_on_both_devices_use_the_targets_warpers(
    host: Side, there: Side, device: StandIn, draft: str, warper: dict[str, float]
) -> None:
    """The table is on the CPU, wherever the target is."""
    options = {"max_new_tokens": NEW, **SAMPLING, **warper}
    found, wanted = (side.decoder(draft, TREE).generate(PROMPTS, **options) for side in (there, host))
    assert ids(found) == ids(wanted)


DEEP = BestFirst(16, 6)
BESIDE: dict[str, dict[str, Any]] = {  # options with which choices come with the trees, or after them
    "greedy": GREEDY,
    "sampled": SAMPLING,
    "top-p": {**SAMPLING, "top_p": 0.9, "logprobs": 2},
    "log-probabilities": {**GREEDY, "logprobs": 3},
    "rows of both kinds": {"temperature": [0.0, 0.8, 0.0, 1.0], "seed": 3},
    "short texts": {**GREEDY, "max_new_tokens": [3, 1, 5, 2]},
    "a penalty": {**SAMPLING, "repetition_penalty": 1.3},
    "a function": {**GREEDY, "logits_processor": [lambda ids, scores: scores - 2 * (scores > scores.mean())]},
    "a function that ends texts": {**SAMPLING, "stopping_criteria": [lambda ids, scores: ids.shape[1] % 11 == 0]},
}


@pytest.mark.parametrize("draft", ["model", "head"])
@pytest.mark.parametrize("tree", [DEEP, Expansion((3, 2)), Chain(4)], ids=str)
def test_trees_that_come_with_the_targets_choices_are_the_cpus(
    host: Side, there: Side, device: StandIn, draft: str, tree: Any
) -> None:
    """Several rows, which end at different steps; texts, log-probabilities, and trees until those are cut."""
    decoders = there.decoder(draft, tree, graphs=True), host.decoder(draft, tree)
    for name, options in BESIDE.items() if tree is DEEP else [*BESIDE.items()][:2]:
        options = {"max_new_tokens": [16, 10, 16, 12], **options}
        found, wanted = (decoder.generate(PROMPTS, **options) for decoder in decoders)
        assert ids(found) == ids(wanted), name
        for mine, other in zip(found, wanted, strict=True):
            assert len(mine.steps) == len(other.steps)
            left = len(mine.token_ids)
            for step, same in zip(mine.steps, other.steps, strict=True):
                assert step.logprobs == (same.logprobs and pytest.approx(same.logprobs)), name
                assert step.tokens == same.tokens, name
                left -= len(step.tokens)
                if left + len(step.tokens) <= tree.max_depth:  # a graph grows whole trees
                    continue
                assert (step.path, step.drafted_by) == (same.path, same.drafted_by), name
                assert step.tree.tokens.tolist() == same.tree.tokens.tolist(), name
                assert step.tree.parents.tolist() == same.tree.parents.tolist(), name
                assert step.tree.draws == same.tree.draws, name
                assert np.allclose(step.tree.scores, same.tree.scores, atol=1e-5), name


@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=str)
def test_rows_join_trees_that_come_with_the_targets_choices(
    host: Side, there: Side, device: StandIn, options: dict[str, Any]
) -> None:
    decoder = there.decoder("model", DEEP, graphs=True)
    many = decoder.generate_many(PROMPTS * 2, max_rows=3, max_new_tokens=16, **options)
    found = {done.number: done.result.token_ids for done in many}
    wanted = host.decoder("model", DEEP).generate_many(PROMPTS * 2, max_rows=3, max_new_tokens=16, **options)
    assert found == {done.number: done.result.token_ids for done in wanted}


@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=str)
def test_a_drafts_bad_numbers_are_seen_when_its_trees_come(
    there: Side, device: StandIn, options: dict[str, Any]
) -> None:
    """They end the step, as on a CPU, not a row."""
    near = copy.deepcopy(there.near)
    decoder = SpeculativeDecoder(there.target, None, [near], DEEP, graphs=True)
    decoder.generate(PROMPTS[:2], max_new_tokens=20, **options)
    steps = iter(decoder.open(PROMPTS[:2], max_new_tokens=60, **options))
    next(steps)
    with torch.no_grad():
        near.lm_head.weight[7:] = torch.nan
    with pytest.raises(NumericalError, match="draft 0 proposed something that is not a tree"):
        list(steps)


def test_who_looks_at_trees_first_waits_for_them(there: Side, device: StandIn) -> None:
    """A penalty reads the paths to nodes, `auto` looks at their chances, and two drafts' trees are merged."""
    penalty = {"repetition_penalty": 1.2}
    cases: list[tuple[str, Any, dict[str, float], int]] = [
        ("head", DEEP, {}, 1), ("head", DEEP, penalty, 2), ("head", "auto", {}, 2), ("model and head", DEEP, {}, 3),
        ("head", Expansion((2, 2)), {}, 1), ("head", Chain(3), {}, 1),
    ]  # fmt: skip
    for draft, tree, more, waits in cases:
        decoder, seen = there.decoder(draft, tree, graphs=True), []
        for _ in decoder.open(PROMPTS[2], max_new_tokens=24, **GREEDY, **more):
            seen.append(device.waits.total())
            device.reset()
        assert set(seen[8:-7]) <= {waits, 1 if tree == "auto" else waits}, (draft, tree, more, seen)
        assert waits in seen[2:-7], (draft, tree, more)


# ---- counts ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trees_and_what_lies_beside_them_come_to_the_host_as_they_are_and_at_once(device: StandIn, dtype: Any) -> None:
    """Of odd sizes and all types, bit for bit; a bare root brings nothing."""
    scores = torch.tensor([[0, -1 / 3, -torch.inf], [-0.0, -1e-40, torch.nan]], dtype=dtype)
    numbers = torch.tensor([[-1, 0, 1], [-1, 2**62 + 1, -(2**62)]])
    columns = numbers, numbers + 1, scores, scores > -torch.inf
    beside = torch.tensor([[7]]), torch.zeros(2, 0, dtype=torch.int64), torch.tensor([True]), scores[:, 1:]
    moved, others = [[each.to(DEVICE, non_blocking=True) for each in part] for part in (columns, beside)]
    growth = Growth(*moved, Kind.RANKED)
    device.reset()
    growth, found = growth.to_host(*others)
    assert device.waits.total() == 1
    for was, now in zip((*columns, *beside), (*growth[:4], *found), strict=True):
        assert now.device.type == "cpu"
        assert (now.dtype, now.shape, now.numpy().tobytes()) == (was.dtype, was.shape, was.numpy().tobytes())
    bare = Chain(0).grow(DenseSource(lambda _: scores, 2, device=DEVICE))
    device.reset()
    assert [len(tree) for tree in bare.trees([5, 6])] == [1, 1]
    assert not device.waits


class Step(NamedTuple):
    """What a step does at most: waits exactly, copies and launches in the median step."""

    waits: int
    copies: int
    launches: int


STEADY = {  # draft, rows, options -> a step with graphs, once its passes are captured
    ("none", 1, "greedy"): Step(1, 3, 8),
    ("none", 4, "greedy"): Step(1, 3, 7),
    ("none", 1, "sampling"): Step(1, 3, 18),
    ("none", 4, "sampling"): Step(1, 3, 50),
    ("ngram", 1, "greedy"): Step(1, 4, 10),
    ("suffix", 1, "greedy"): Step(1, 4, 10),
    ("recycling", 1, "greedy"): Step(2, 4, 20),
    ("model", 1, "greedy"): Step(1, 5, 16),
    ("model", 4, "greedy"): Step(1, 7, 41),
    ("head", 1, "greedy"): Step(1, 5, 25),
    ("head", 4, "greedy"): Step(1, 5, 35),
    ("head", 1, "sampling"): Step(1, 5, 42),
    ("head", 4, "sampling"): Step(1, 7, 103),
    ("model and recycling", 1, "greedy"): Step(3, 8, 46),
}


@pytest.mark.parametrize(("draft", "rows", "drawn"), STEADY, ids=str)
def test_a_step_waits_and_launches_no_more_than_this(
    there: Side, device: StandIn, draft: str, rows: int, drawn: str
) -> None:
    """One wait for the target's choices and a tree that came with them, else one for each draft's tree, one for what
    the table was told.  At the end of a text, trees are cut before they are scored.
    """
    steps, most = [], STEADY[draft, rows, drawn]
    options = SAMPLING if drawn == "sampling" else GREEDY
    decoder = there.decoder(draft, BestFirst(16, 6), graphs=True)
    device.reset()
    for _ in decoder.open(PROMPTS if rows == 4 else PROMPTS[2], max_new_tokens=40, **options):
        steps.append(Step(device.waits.total(), device.copies.total(), device.launches.total()))
        assert not [wait for wait in device.waits if "blocking" in wait]
        device.reset()
    steady, last = steps[len(steps) // 2 : -7], steps[-7:]
    assert len(steady) > 2
    assert max(step.waits for step in last) <= most.waits + 1
    assert {step.waits for step in steady} == {most.waits}
    assert median(step.copies for step in steady) <= most.copies
    assert most.launches / 2 < median(step.launches for step in steady) <= most.launches


def test_without_graphs_a_step_launches_every_operator(there: Side, device: StandIn) -> None:
    """Of the tiny target's two layers; graphs leave a quarter."""
    decoder = there.decoder("none", None)
    launches = []
    for _ in decoder.open(PROMPTS[2], max_new_tokens=6, **GREEDY):
        launches.append(device.launches.total())
        device.reset()
    assert 100 <= launches[-2] <= 120


def test_attention_makes_no_plan_for_every_length(there: Side, device: StandIn) -> None:
    """Passes leave cuDNN's kernels out, and only passes."""
    seen: list[bool] = []
    decoder = there.decoder("none", None)
    with there.target.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled())):
        decoder.generate(PROMPTS[0], max_new_tokens=1)  # checks the model, by calls of its own
        seen.clear()
        decoder.generate(PROMPTS[0], max_new_tokens=3)
    assert set(seen) == {False}
    assert torch.backends.cuda.cudnn_sdp_enabled()


def held(decoder: SpeculativeDecoder) -> list[tuple[int, int]]:
    """Return graphs and their bytes, by cache."""
    kept = (each for model in decoder.networks for each in model.graphed.kept)
    return [(len(each.graphs.made), sum(each.graphs.held.values())) for each in kept]


@pytest.mark.parametrize("draft", ["none", "model", "head"])
def test_calls_of_different_lengths_hold_what_a_few_hold(there: Side, device: StandIn, draft: str) -> None:
    """All sizes that come are captured in the first calls: later ones capture nothing, and hold no more memory."""
    decoder = there.decoder(draft, BestFirst(4, 2), graphs=True)
    after: list[list[tuple[int, int]]] = []
    for turn in range(50):
        decoder.generate([5, 9, 4] * (1 + turn % 5), max_new_tokens=3 + turn % 4, **GREEDY)
        after.append(held(decoder))
    assert any(made for made, _ in after[-1])
    assert all(found == after[12] for found in after[12:])


@pytest.mark.parametrize("draft", ["none", "model", "head"])
def test_graphs_of_four_rows_serve_three(
    host: Side, there: Side, device: StandIn, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is of a power of two of rows, so texts that come and go are not captured anew for each number of them."""
    capture, kinds = device.capture, list[Any]()
    monkeypatch.setattr(device, "capture", lambda run, inputs: (kinds.append(run), capture(run, inputs))[1])
    decoder, options = there.decoder(draft, TREE, graphs=True), {"max_new_tokens": 12, **GREEDY}
    wanted = ids(host.decoder(draft, TREE).generate(PROMPTS, **options))
    for _ in range(2):
        assert ids(decoder.generate(PROMPTS, **options)) == wanted
    assert kinds
    kinds.clear()
    assert ids(decoder.generate(PROMPTS[1:], **options)) == wanted[1:]
    assert not kinds
    assert ids(decoder.generate(PROMPTS, **options)) == wanted


def test_masks_of_several_kinds_of_layers_are_replayed(device: StandIn) -> None:
    """The first layer sees all tokens, the second one those of a window."""
    config = Qwen2Config(
        vocab_size=132,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    )
    torch.manual_seed(0)
    target = Qwen2ForCausalLM(config).eval()
    near = like(target)
    texts = []
    for models in ((target, near), (copy.deepcopy(target).to(DEVICE), copy.deepcopy(near).to(DEVICE))):
        graphs = models[0] is not target
        decoder = SpeculativeDecoder(models[0], None, [models[1]], TREE, graphs=graphs)
        texts.append(decoder.generate(PROMPTS[2], max_new_tokens=30, **GREEDY).token_ids)
    assert texts[0] == texts[1]
    assert device.launches["graph"] > 10


def test_a_graph_of_a_tree_holds_the_settings_it_was_made_with(host: Side, there: Side, device: StandIn) -> None:
    """Other settings are other graphs, and what waits between levels is in none: all draft as the CPU does."""
    options = {"max_new_tokens": 30, "seed": 3}
    decoder = there.decoder("head", TREE, graphs=True)
    plain = host.decoder("head", TREE)
    decoder.generate(PROMPTS[2], temperature=1.5, **options)
    for warper in ({"temperature": 0.5}, {"top_k": 3}, {"eta_cutoff": 0.01}, {"top_h": 0.4}):
        found, wanted = (
            each.generate(PROMPTS[2], **{"temperature": 1.0, **warper}, **options) for each in (decoder, plain)
        )
        assert found.token_ids == wanted.token_ids, warper
        trees, others = ([step.tree.tokens.tolist() for step in each.steps[:-6]] for each in (found, wanted))
        assert trees == others, warper  # before the end, where the CPU's are not grown beyond it
        assert len(trees) > 10
