"""Targets whose layers lie on disk: the same ids as in memory, drafts that borrow their weights, what is refused."""

import importlib.util
import json
import re
import sys
import threading

import pytest
import torch
from conftest import PROMPTS, byte_tokenizer, like, plain, tiny_llama
from test_heads import draft_for
from test_stateful import build as hybrid
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from specinfer import Auto, BestFirst, Chain, SpeculativeDecoder, check_model, cli
from specinfer.attention import Support, TreeCache, TreeModel, TreeSession, device_of, value_of, weight_of
from specinfer.attention.passes.plain import PlainPass
from specinfer.drafts.head import HeadDraft
from specinfer.drafts.lookup.ngram import NGramDraft
from specinfer.errors import InputError, ModelError, UnsupportedModel
from specinfer.loading import load

pytest.importorskip("accelerate")

IN_LAYERS = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
IN_LAYERS |= {"model.layers.0": "disk", "model.layers.1": "disk"}
PLACES = {  # tied embeddings?, device map
    "layers": (False, IN_LAYERS),
    "layers, tied": (True, IN_LAYERS),
    "everything": (False, {"": "disk"}),
    "everything, tied": (True, {"": "disk"}),
}


def dispatched(folder, device_map, dtype=torch.float64):
    return AutoModelForCausalLM.from_pretrained(folder, device_map=dict(device_map), dtype=dtype).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random llama as files, with its own output matrix and with the embedding's."""
    made = {}
    for tied in (False, True):
        made[tied] = tmp_path_factory.mktemp("target")
        tiny_llama(tie_word_embeddings=tied).save_pretrained(made[tied])
        byte_tokenizer().save_pretrained(made[tied])
    return made


@pytest.fixture(scope="module", params=PLACES)
def pair(request, folders):
    """The same model in memory, and with layers on disk."""
    tied, device_map = PLACES[request.param]
    in_memory = AutoModelForCausalLM.from_pretrained(folders[tied], dtype=torch.float64).eval()
    return in_memory, dispatched(folders[tied], device_map)


@pytest.fixture(scope="module")
def on_disk(folders):
    return dispatched(folders[False], {"": "disk"})


def state_of(model):
    """What a call must leave as it was: hooks, forwards, modes, where weights are."""
    hooks = [(id(getattr(m, "_hf_hook", None)), id(vars(m).get("forward")), m.training) for m in model.modules()]
    weights = model.named_parameters(remove_duplicate=False)  # hooks untie tied weights when they first run
    return hooks, {name: weight.device.type for name, weight in weights}


# ---- ids ----


def test_a_model_on_disk_scores_trees_exactly(pair):
    _, offloaded = pair
    before = state_of(offloaded)
    assert check_model(offloaded).support is Support.EXACT
    assert state_of(offloaded) == before
    assert "meta" in before[1].values()
    assert check_model(offloaded) is check_model(offloaded)  # kept: fetching weights is no change


def test_the_prompt_takes_no_pass_of_its_own(pair, monkeypatch):
    """Where states are not needed before the first tree: weights are fetched once less."""
    passes, run = [], PlainPass.run
    monkeypatch.setattr(PlainPass, "run", lambda self, model, *given: passes.append(model) or run(self, model, *given))
    in_memory, offloaded = pair
    for draft, more in ((like(in_memory), 0), (draft_for(in_memory), 1)):  # a head reads the prompt's states
        decoder = SpeculativeDecoder(offloaded, None, [draft], BestFirst(6, 3))
        passes.clear()
        result = decoder.generate(PROMPTS[0], max_new_tokens=12)
        assert passes.count(decoder.target) == result.stats.target_passes + more
        assert result.steps[0].tree.num_drafted > 0
        assert result.stats.seconds.prefill > 0


@pytest.mark.parametrize("temperature", [0, 1])
def test_prompts_are_read_beside_the_trees_of_running_rows(pair, temperature, monkeypatch):
    """Rows that join take no pass of their own; a row near its end has room for them, and texts stay what they are."""
    counted = {"run": [], "score": []}
    run, score = PlainPass.run, TreeSession.score
    note = lambda name, model: counted[name].append(model)  # noqa: E731
    monkeypatch.setattr(PlainPass, "run", lambda self, model, *given: note("run", model) or run(self, model, *given))
    monkeypatch.setattr(TreeSession, "score", lambda self, trees: note("score", self.model) or score(self, trees))
    in_memory, offloaded = pair
    prompts = [[5, 6], [9] * 40, [7, 8, 1], [3], [2] * 200, [4, 4]]
    asked = [{"prompt": prompt, "max_new_tokens": 4 + number, "seed": number} for number, prompt in enumerate(prompts)]
    wanted = [SpeculativeDecoder(in_memory, None, [], None).generate(**one, temperature=temperature) for one in asked]
    decoder = SpeculativeDecoder(offloaded, None, [like(in_memory)], BestFirst(6, 3))
    decoder.generate(prompts[0], max_new_tokens=2)  # the model was checked
    for sessions in counted.values():
        sessions.clear()
    found = {done.number: done.result for done in decoder.generate_many(asked, max_rows=2, temperature=temperature)}
    assert [found[number].token_ids for number in range(len(asked))] == [result.token_ids for result in wanted]
    passes, steps = (sessions.count(decoder.target) for sessions in counted.values())
    assert passes == steps


def test_chains_of_an_offloaded_hybrid(tmp_path):
    """Its rows are read one by one, and cannot begin with padding."""
    model = hybrid("lfm2")
    model.save_pretrained(tmp_path)
    offloaded = dispatched(tmp_path, {"": "disk"}, torch.float32)
    decoders = [SpeculativeDecoder(target, None, ["ngram"], Chain(3), compile=False) for target in (model, offloaded)]
    rows = [[5, 9, 3, 5, 9, 3, 5, 9], [7, 2, 40], [11]]
    here, there = ([r.token_ids for r in d.generate(rows, max_new_tokens=12, temperature=0)] for d in decoders)
    assert there == here


DRAFTS = {
    "model": lambda target: [like(target)],
    "head": lambda target: [draft_for(target)],
    "n-grams": lambda target: [NGramDraft()],
    "recycling and suffixes": lambda target: "auto",
}


GREEDY, SAMPLED = {"temperature": 0}, {"temperature": 1.0, "seed": [3, 4, 5, 6]}
MET = [*zip(PLACES, DRAFTS, [GREEDY] * 4, strict=True), *zip(PLACES, reversed(DRAFTS), [SAMPLED] * 4, strict=True)]


@pytest.mark.parametrize(("pair", "draft", "options"), MET, indirect=["pair"], ids=str)
def test_ids_are_those_in_memory(pair, draft, options):
    in_memory, offloaded = pair
    drafts = DRAFTS[draft](in_memory)
    before = state_of(offloaded)
    decoders = [SpeculativeDecoder(m, None, drafts, BestFirst(12, 4), compile=False) for m in pair]
    here, there = ([r.token_ids for r in d.generate(PROMPTS, max_new_tokens=12, **options)] for d in decoders)
    assert there == here
    if not options["temperature"]:
        assert there == [plain(offloaded, prompt, 12) for prompt in PROMPTS]
    assert state_of(offloaded) == before


def test_a_draft_saves_passes_of_a_target_on_disk(pair):
    in_memory, offloaded = pair
    decoder = SpeculativeDecoder(offloaded, None, [like(in_memory, 0.0)], Chain(4))
    assert decoder.generate(PROMPTS[0], max_new_tokens=24).stats.target_passes <= 6


def test_a_heads_matrices_are_fetched_once_and_the_target_keeps_none(on_disk, folders):
    in_memory = AutoModelForCausalLM.from_pretrained(folders[False], dtype=torch.float64)
    head = draft_for(on_disk)  # its fingerprint reads the embedding
    first, second = (SpeculativeDecoder(on_disk, None, [head]).drafts[0].model.model for _ in range(2))
    assert first is second
    assert torch.equal(first.embedding, in_memory.model.embed_tokens.weight)
    assert torch.equal(first.output.weight, in_memory.lm_head.weight[first.token_ids])
    assert weight_of(on_disk.lm_head) is weight_of(on_disk.lm_head)
    assert {weight.device.type for weight in on_disk.parameters()} == {"meta"}


def test_heads_learn_from_a_target_on_disk(on_disk, tmp_path):
    decoder = SpeculativeDecoder(on_disk, None, [draft_for(on_disk)], online=1.0)
    decoder.generate(PROMPTS[0], max_new_tokens=24)
    decoder.save_drafts(tmp_path / "learnt")
    assert isinstance(HeadDraft.load(tmp_path / "learnt"), HeadDraft)


def test_threads_take_turns(on_disk):
    """Hooks put weights into the modules and take them out again: two passes at once would do so in each other's."""
    decoder, found = SpeculativeDecoder(on_disk, None, ["ngram"], BestFirst(6, 3)), {}

    def work(index):
        found[index] = decoder.generate(PROMPTS[index], max_new_tokens=12).token_ids

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(PROMPTS))]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    finally:
        sys.setswitchinterval(interval)
    assert found == {index: plain(on_disk, prompt, 12) for index, prompt in enumerate(PROMPTS)}


def test_it_has_a_device_and_real_weights(pair):
    in_memory, offloaded = pair
    model = TreeModel(offloaded)
    assert model.device == device_of(offloaded) == torch.device("cpu")
    assert (model.dtype, model.embedded) == (torch.float64, TreeModel(in_memory).embedded)
    for module, other in zip(offloaded.modules(), in_memory.modules(), strict=True):
        for name, weight in other._parameters.items():
            assert weight is None or torch.equal(value_of(module, name), weight)


def test_a_nested_hook_is_read(on_disk, folders):
    """A module with hooks of two kinds has them in a sequence."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = dispatched(folders[False], {"": "disk"})
    add_hook_to_module(model.lm_head, ModelHook(), append=True)
    assert torch.equal(weight_of(model.lm_head), weight_of(on_disk.lm_head))


def test_passes_run_plain_and_say_why(on_disk):
    decoder = SpeculativeDecoder(on_disk, None, ["ngram"], compile=True)
    assert "hooks fetch weights" in decoder.passes


# ---- several devices ----


class OneDevice(TorchFunctionMode):
    """Refuses to write tensors of one device at indices of another, as GPUs do."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.__setitem__, torch.Tensor.index_select, torch.Tensor.index_copy_):
            tensors = [part for part in tree_leaves(args) if isinstance(part, torch.Tensor)]
            assert len({tensor.device for tensor in tensors}) == 1, function
        return function(*args, **(kwargs or {}))


def test_caches_lie_where_layers_execute():
    """The second layer executes on a device that only pretends to compute: ragged rows, kept slots, a row that ends."""
    devices = torch.device("cpu"), torch.device("meta")
    cache, turns = TreeCache(rows=2, capacity=4, max_capacity=16), 0
    with OneDevice():
        for paths in ([(0, 1, 2), (0,)], [(1, 2), (0, 2)], [(2,), None]):
            cache.stage([3] * cache.rows, 3)
            for layer, device in enumerate(devices):
                states = torch.zeros(2, 1, 3, 4, device=device)
                keys, _ = cache.update(states, states, layer)
                turns += keys.device == device
            cache.keep(paths)
            cache.check_integrity()
    assert (turns, cache.lengths) == (6, [6])


# ---- what is refused ----


def test_layers_on_several_devices_without_hooks_are_refused():
    model = tiny_llama()
    model.model.layers[1].to("meta")
    with pytest.raises(UnsupportedModel, match=r"spread over cpu, meta.*device_map"):
        TreeModel(model)


def test_weights_that_nobody_has_are_refused():
    with pytest.raises(ModelError, match="the weight of a Linear has no values"):
        weight_of(tiny_llama().to("meta").lm_head)


def test_graphs_and_training_are_refused(on_disk, tmp_path):
    from specinfer.training import distill

    with pytest.raises(InputError, match="hooks move weights"):
        SpeculativeDecoder(on_disk, None, ["ngram"], graphs=True)
    with pytest.raises(UnsupportedModel, match="device_map cannot be trained for"):
        distill(on_disk, byte_tokenizer(), [], tmp_path)


# ---- how large trees get ----


def test_auto_is_the_same_object_with_or_without_disk(pair):
    """Ids do not depend on the sizes that it chooses."""
    in_memory, offloaded = pair
    decoder = SpeculativeDecoder(offloaded, None, [like(in_memory)], Auto())
    assert decoder.generate(PROMPTS[2], max_new_tokens=40).token_ids == plain(in_memory, PROMPTS[2], 40)


# ---- loading ----


def test_loading_puts_layers_on_disk_and_drafts_in_memory(folders, tmp_path):
    folder = str(folders[False])
    given = {"dtype": "float32", "device_map": IN_LAYERS, "offload_folder": tmp_path / "made", "compile": False}
    decoder = SpeculativeDecoder.from_pretrained(folder, [folder], BestFirst(6, 3), **given)
    assert decoder.target.dispatched
    assert not decoder.drafts[0].model.dispatched
    result = decoder.generate(PROMPTS[0], max_new_tokens=8)
    assert result.token_ids == plain(decoder.drafts[0].model.model, PROMPTS[0], 8)


def test_what_does_not_fit_goes_to_disk(folders):
    model = load(folders[False], "float32", device_map="auto", max_memory={"cpu": "100KB"}).model
    assert "meta" in {weight.device.type for weight in model.parameters()}
    assert check_model(model).support is Support.EXACT


def test_other_options_reach_transformers(folders):
    assert load(folders[False], attn_implementation="eager").model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 5}, "unknown option max_tokens of loading: did you mean max_new_tokens, of `generate`"),
        ({"max_new_tokens": 5}, "give it to `generate`"),
        ({"device_mapp": "auto"}, "did you mean device_map"),
        ({"trust_remote_code": True}, "no code that comes with a model runs"),
        ({"use_safetensors": False}, "safetensors alone"),
        ({"torch_dtype": torch.float32}, "give dtype"),
        ({"max_memory": {"cpu": 1}}, 'give device_map="auto"'),
        ({"device_map": "auto", "device": "cpu"}, "leave one out"),
        ({"device_map": "everywhere"}, "device_map has 'everywhere'"),
        ({"device_map": {"": "cuda:99"}}, "torch sees"),
        ({"device_map": {"model": "meta"}}, "device_map has 'meta'"),
        ({"device_map": "auto", "max_memory": {"cpu": "much"}}, "max_memory"),
        ({"device_map": "auto", "max_memory": {99: "1GiB"}}, "max_memory has 99"),
        ({"device_map": "auto", "offload_folder": "/dev/null/x"}, "cannot be written"),
    ],
    ids=str,
)
def test_impossible_options_are_refused_before_anything_is_loaded(options, message, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    for call in (load, SpeculativeDecoder.from_pretrained):
        with pytest.raises(ModelError, match=re.escape(message)):
            call("a-model", **options)


def test_a_device_map_needs_accelerate(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: (name != "accelerate" and find(name, *rest)) or None
    )
    with pytest.raises(ModelError, match="pip install accelerate"):
        load("a-model", device_map="auto")


@pytest.mark.parametrize("sizes", ["cpu", "cpu=", "cpu=1GiB,=2", "cpu=many"])
def test_sizes_on_the_command_line_are_refused_in_one_line(sizes, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["specinfer", "generate", "Hi", "--device-map", "auto", "--max-memory", sizes])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_line_generates_from_disk(folders, monkeypatch, capsys):
    options = [
        "--device-map",
        "auto",
        "--max-memory",
        "cpu=100KB",
        "--draft",
        "ngram",
        "--max-new-tokens",
        "3",
        "--raw",
    ]
    monkeypatch.setattr(
        "sys.argv", ["specinfer", "generate", "Hi", "--target", str(folders[False]), *options, "--json"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 3


# ---- the benchmark ----


def test_the_benchmark_runs(folders, script, tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{text}", "split": "dev"}}\n' for text in ("abcabc", "Hello")))
    folder, out = str(folders[True]), tmp_path / "out.jsonl"
    options = [
        "--prompts",
        str(prompts),
        "--count",
        "2",
        "--max-new-tokens",
        "6",
        "--dtype",
        "float32",
        "--out",
        str(out),
    ]
    monkeypatch.setattr("sys.argv", ["offload.py", "--target", folder, "--draft", folder, *options])
    script("offload").main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["method"] for line in lines] == ["auto", "generate", "assisted"] * 2
    assert len({str(line["ids"]) for line in lines[:3]}) == len({str(line["ids"]) for line in lines[3:]}) == 1
    printed = capsys.readouterr().out
    assert printed.count(" 2/2 ") == 3
    assert "nodes of auto's trees: " in printed
