"""Drafts of published formats that are trained here: they learn, go on after a kill, load, and are exported."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import byte_tokenizer, plain, tiny_llama
from safetensors.torch import load_file, save_file

import specinfer.loading
from specinfer import BestFirst, SpeculativeDecoder, check_draft, cli
from specinfer.drafts.head import HeadDraft, target_fingerprint
from specinfer.drafts.published.conventions import Convention
from specinfer.drafts.published.formats import load_published
from specinfer.errors import InputError, ModelError
from specinfer.evaluation.doctor import measured_costs as costs
from specinfer.loading import Loaded
from specinfer.training import Recipe, TextSettings, TrainingSettings, distill, optimise, published, train
from specinfer.training.architectures import PUBLISHED, published_aux_layers, train_published
from specinfer.training.data import Texts
from specinfer.training.export import export_draft
from specinfer.training.job import TrainingJob
from specinfer.training.recorded_text import TrainingPrompt

WORDS = 64  # tokens that the target writes: few, so that drafts can learn it in seconds
AUX_LAYERS = (2, 3, 4, 7)
IDS = "eagle_aux_hidden_state_layer_ids"
CONVENTIONS = {
    "eagle3": Convention((2, 3, 4), (("norm_before_residual", False), ("norm_output", False))),
    "medusa": Convention((7,)),
    "dflash": Convention((2, 3, 4)),
    "dspark": Convention((2, 3, 4)),
}
SETTINGS = TrainingSettings(
    epochs=20.0,
    tokens_per_batch=256,
    vocabulary=60,
    held_out=0.1,
    checkpoint_every=40,
    learning_rate=5e-3,
    unroll=2,
    heads=3,
    block=4,
)
SHORT = replace(SETTINGS, epochs=1.0, checkpoint_every=2)


@pytest.fixture(scope="module")
def target():
    return tiny_llama(spread=0.12, vocab=WORDS, num_hidden_layers=7).float()


@pytest.fixture(scope="module")
def shards(target, tmp_path_factory):
    """Texts that the target writes greedily, with the states that chose each token."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, WORDS, (60, 4), generator=generator)
    ids = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=20, do_sample=False)
    with torch.no_grad():
        hidden = target(ids, output_hidden_states=True).hidden_states
    states = torch.stack([hidden[layer] for layer in AUX_LAYERS], 2)
    states = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
    rows, length = ids.shape
    columns = {"ids": ids.flatten().int(), "states": states.flatten(0, 1).contiguous()}
    lengths = {"lengths": torch.full((rows,), length), "prompt_lengths": torch.full((rows,), 4)}
    path = tmp_path_factory.mktemp("text") / "00000.safetensors"
    save_file(columns | lengths, path)
    return [path]


@pytest.fixture(scope="module")
def trained(target, shards, tmp_path_factory):
    """Every architecture, trained: folder and figures by name."""
    out = tmp_path_factory.mktemp("drafts")
    return {arch: (out / arch, run(target, shards, out / arch, arch)) for arch in PUBLISHED}


def run(target, shards, folder, arch, settings=SETTINGS, progress=lambda *_: None):
    job = TrainingJob(folder, arch, settings, AUX_LAYERS, target="org/tiny")
    return train_published(target, None, shards, job, progress)


@pytest.mark.parametrize("arch", PUBLISHED)
def test_training_learns_more_than_how_frequent_tokens_are(trained, shards, arch):
    """At every depth, on held-out texts."""
    figures = trained[arch][1]
    texts = Texts(shards, SETTINGS.held_out)
    counts = texts.counts(WORDS)
    guess = (counts.max() / counts.sum()).item()
    assert len(figures["hits"]) == {"eagle3": 2, "medusa": 3, "dflash": 3, "dspark": 4}[arch]
    assert all(rates[0] > 1.3 * guess for rates in figures["hits"])
    assert figures["history"][-1]["loss"] < figures["history"][0]["loss"]
    assert figures["coverage"] > 0.9


@pytest.fixture(scope="module")
def greedy(target):
    """Prompts, and the target's own greedy ids after them."""
    prompts = [[first, 9, 17, 30 + first] for first in range(8)]
    return [(prompt, plain(target, prompt, 24)) for prompt in prompts]


@pytest.mark.parametrize("arch", PUBLISHED)
def test_what_is_trained_is_a_published_head(target, trained, greedy, arch):
    """It drafts what it learnt: as often right as on held-out texts, and the ids stay the target's."""
    draft = load_published(trained[arch][0], CONVENTIONS[arch])
    decoder = SpeculativeDecoder(target, drafts=[draft], tree=BestFirst(8, 3))
    accepted = steps = 0
    for prompt, wanted in greedy:
        result = decoder.generate(prompt, max_new_tokens=24)
        assert result.token_ids == wanted
        accepted, steps = accepted + 24, steps + len(result.steps)
    assert accepted / steps > 1.5


@pytest.mark.parametrize("arch", PUBLISHED)
def test_a_killed_training_goes_on_and_ends_as_if_it_had_not_been(target, shards, tmp_path, arch):
    whole = run(target, shards, tmp_path / "whole", arch, SHORT)
    assert whole["steps"] == 5

    def kill(stage, done, *_):
        if done == 3:  # a step after a checkpoint
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(target, shards, tmp_path / "killed", arch, SHORT, kill)
    again = []
    figures = run(target, shards, tmp_path / "killed", arch, SHORT, lambda _, done, *__: again.append(done))
    assert (again, figures) == ([3, 4, 5], whole)
    (kept,), (killed,) = ([*(tmp_path / name).glob("*.safetensors")] for name in ("whole", "killed"))
    weights = load_file(kept), load_file(killed)
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


# ---- faults that are planted in a head that works ----


def planted(folder, out, config=None, weights=lambda weights: None):
    """A copy of an EAGLE-3 head with some fields of its configuration, or its weights, changed."""
    out.mkdir()
    read = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(read | (config or {})))
    found = load_file(folder / "model.safetensors")
    weights(found)
    save_file(found, out / "model.safetensors")
    return out


def checked(target, folder):
    """What `check_draft` says of a head that need not fit."""
    draft = load_published(folder)
    draft.least = 0.0
    prompts = [[first, 9, 17, 30 + first] for first in range(4)]
    (check,) = check_draft(SpeculativeDecoder(target, drafts=[draft]), prompts, max_new_tokens=16).drafts
    return check


@pytest.fixture
def quick(monkeypatch):
    """No test reads times."""
    for name in ("STEPS", "ROUNDS"):
        monkeypatch.setattr(costs, name, 1)


def test_layers_off_by_one_are_found_and_mended(quick, target, trained, tmp_path):
    """The configuration names the layers before those that the head was trained on."""
    right = checked(target, planted(trained["eagle3"][0], tmp_path / "right"))
    found = checked(target, planted(trained["eagle3"][0], tmp_path / "wrong", {IDS: [1, 2, 3]}))
    assert right.grade != "bad"
    assert found.agreements[0][0].startswith("states 2, 3, 4")
    assert found.hits == right.hits
    (_, best), *others = found.agreements
    wrong = [rates for words, rates in others if words.startswith("states 1, 2, 3")]
    assert wrong
    assert all(sum(rates) < sum(best) for rates in wrong)


def lost_norm(weights):
    weights["norm.weight"] *= torch.linspace(-2, 2, len(weights["norm.weight"]))


def shifted_vocabulary(weights):
    weights["d2t"] = torch.full_like(weights["d2t"], WORDS - len(weights["d2t"]))
    weights["t2d"] = torch.arange(WORDS) >= WORDS - len(weights["d2t"])


@pytest.mark.parametrize("fault", [lost_norm, shifted_vocabulary])
def test_wrong_norms_and_vocabularies_are_found(quick, target, trained, tmp_path, fault):
    check = checked(target, planted(trained["eagle3"][0], tmp_path / "head", weights=fault))
    assert check.grade == "bad"
    assert "does not fit this target" in check.words
    with pytest.raises(ModelError, match="does not fit this target"):
        SpeculativeDecoder(target, drafts=[load_published(tmp_path / "head")])


def test_a_head_of_another_target_is_found(quick, trained, tmp_path):
    other = tiny_llama(seed=9, spread=0.12, vocab=WORDS, num_hidden_layers=7).float()
    check = checked(other, planted(trained["eagle3"][0], tmp_path / "head"))
    assert check.grade == "bad"
    assert "trained for another target" in check.words


# ---- blocks ----


def test_slots_see_the_context_up_to_their_root_and_their_own_block():
    """Two blocks of two slots, at columns 0 and 2 of three."""
    mask = published.block_mask(torch.tensor([[0, 2]]), 2, 3)[0, 0].int().tolist()
    first, second = [1, 1, 0, 0, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]
    assert mask == [first, first, second, second]


def test_roots_are_tokens_to_learn():
    learn = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]]).bool()
    roots, real = published.chosen_roots(learn)
    assert roots.shape == (2, 3)
    assert real.sum(1).tolist() == [3, 1]
    assert learn.gather(1, roots)[real].all()
    assert len(set(roots[0].tolist())) == 3


@pytest.mark.parametrize("arch", ["dflash", "dspark"])
def test_blocks_that_share_a_pass_are_as_alone(target, trained, shards, arch):
    """And a block's context is what a draft session would give it: states up to its root."""
    draft = load_published(trained[arch][0], CONVENTIONS[arch])
    network = draft.network.bound(target)
    loss = published.BlockLoss(network, target, SETTINGS, torch.ones(3, 32))
    batch = (texts := Texts(shards, SETTINGS.held_out, skip=1)).load(texts.train[:2])
    roots = torch.tensor([[5, 9, 12], [6, 4, 15]])
    with torch.no_grad():
        together = loss.hidden(batch.ids[:, :-1], batch.states[:, :-1], roots)
        for row, column in ((0, 1), (1, 2)):
            cut = int(roots[row, column]) + 1
            alone = loss.hidden(
                batch.ids[row : row + 1, :cut], batch.states[row : row + 1, :cut], roots[row, column].view(1, 1)
            )
            torch.testing.assert_close(together[row, column], alone[0, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arch", ["eagle3", "dflash"])
def test_sizes_of_states_are_in_the_matrix_that_is_kept(target, trained, shards, arch):
    """A network reads states as they are; in training it reads them divided by their typical sizes."""
    draft = load_published(trained[arch][0], CONVENTIONS[arch])
    kind = {"eagle3": published.Eagle3Loss, "dflash": published.BlockLoss}[arch]
    scales = torch.rand(3, 32) + 0.5
    states, network = torch.randn(1, 4, 4, 32), draft.network.bound(target)
    loss = kind(network, target, SETTINGS, scales)
    before = network.fc(loss.fused(states).flatten(2))
    loss.fold_scales()
    torch.testing.assert_close(network.fc(loss.fused(states).flatten(2)), before)
    torch.testing.assert_close(network.fc(states[:, :, :-1].flatten(2)), before)


def test_medusa_heads_are_kept_with_the_targets_output_matrix(target, trained):
    weights = load_file(trained["medusa"][0] / "medusa_lm_head.safetensors")
    assert sorted(weights) == sorted(
        name for i in range(3) for name in (f"{i}.0.linear.weight", f"{i}.0.linear.bias", f"{i}.1.weight")
    )
    assert torch.equal(weights["2.1.weight"], target.lm_head.weight.bfloat16())


# ---- export ----


def trees(target, folder):
    """Every step's tree of a head, as tokens, parents and scores."""
    draft = load_published(folder, CONVENTIONS["eagle3"])
    result = SpeculativeDecoder(target, drafts=[draft], tree=BestFirst(12, 4)).generate([3, 9, 17], max_new_tokens=20)
    return [(s.tree.tokens.tolist(), s.tree.parents.tolist(), s.tree.scores.tolist()) for s in result.steps]


@pytest.mark.parametrize("form", ["eagle3", "speculators"])
def test_exported_heads_grow_the_same_trees_node_for_node(target, trained, tmp_path, form):
    folder, _ = trained["eagle3"]
    export_draft(folder, form, tmp_path / form)
    assert trees(target, tmp_path / form) == trees(target, folder)
    assert any(len(tokens) > 4 for tokens, *_ in trees(target, folder))
    names = set(load_file(tmp_path / form / "model.safetensors"))
    layer = "midlayer" if form == "eagle3" else "layers.0"
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", f"{layer}.hidden_norm.weight"} <= names
    config = json.loads((tmp_path / form / "config.json").read_text())
    assert config["draft_vocab_size"] == SETTINGS.vocabulary
    if form == "speculators":
        assert config["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"
        assert config["norm_before_residual"] is False


def test_other_drafts_are_not_exported(trained, target, tmp_path):
    """One line that names what it is."""
    head = train.new_head(target, (2, 7), 1, torch.arange(32))
    HeadDraft(head, target_fingerprint(target, byte_tokenizer())).save(tmp_path / "head")
    for folder, complaint in (
        (trained["medusa"][0], "holds a draft of arch 'medusa'"),
        (tmp_path / "head", "holds a draft of type 'specinfer_eagle_head'"),
    ):
        with pytest.raises(InputError, match=complaint):
            export_draft(folder, "speculators", tmp_path / "out")
    with pytest.raises(InputError, match="format 'gguf' is unknown: choose eagle3 or speculators"):
        export_draft(trained["eagle3"][0], "gguf", tmp_path / "out")
    with pytest.raises(InputError, match="is not empty"):
        export_draft(trained["eagle3"][0], "eagle3", tmp_path / "head")
    assert not (tmp_path / "out").exists()


# ---- the whole way ----


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command line on a tiny target of seven layers; return exit code and output."""
    model = tiny_llama(spread=0.12, num_hidden_layers=7).float()
    monkeypatch.setattr(specinfer.loading, "load", lambda *_: Loaded(model, byte_tokenizer(), "org/tiny"))

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["specinfer", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return call


def test_one_folder_of_text_serves_all_architectures(tmp_path):
    """And each has its card."""
    model = tiny_llama(spread=0.12, num_hidden_layers=7).float()
    prompts = [TrainingPrompt(word, "prompts.jsonl", 1) for word in ("abcabc", "a", "def f(x):", "zz")]
    made = set()
    for arch in PUBLISHED:
        out = tmp_path / arch
        out.mkdir()
        if arch != PUBLISHED[0]:
            (out / "text").symlink_to(tmp_path / PUBLISHED[0] / "text")
        recipe = Recipe(1, arch, TextSettings(new_tokens=8), replace(SHORT, vocabulary=40))
        distill(model, byte_tokenizer(), prompts, out, recipe, name="org/tiny")
        made |= {path.stat().st_mtime_ns for path in (out / "text").glob("*.safetensors")}
        card = (out / "1" / "README.md").read_text()
        assert "org/tiny" in card
        assert ("| block |" in card) == (arch in ("dflash", "dspark"))
        assert "{" not in card
    assert len(made) == len(list((tmp_path / "eagle3" / "text").glob("*.safetensors")))


def test_the_commands(command, tmp_path):
    (tmp_path / "p.txt").write_text("abcabc\na\nthe cat\nzz\n")
    options = ["--prompts", tmp_path / "p.txt", "--out", tmp_path / "out", "--new-tokens", 12, "--vocabulary", 40]
    code, out, err = command("distill", *options, "--arch", "eagle3", "--epochs", 1, "--json")
    assert (code, err) == (0, "")
    (draft,) = json.loads(out)["drafts"]
    code, out, err = command("export-draft", draft["folder"], "--format", "speculators", "--out", tmp_path / "s")
    assert (code, err) == (0, "")
    assert (tmp_path / "s" / "config.json").exists()
    code, out, err = command("export-draft", draft["folder"], "--format", "gguf", "--out", tmp_path / "g")
    assert (code, out, err.count("\n")) == (2, "", 1)
    code, out, err = command("distill", *options, "--epochs", 1, "--time", 2)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "give one of them" in err


def test_training_by_the_clock_plans_its_steps_by_the_rate_of_the_first_ten(target, shards, tmp_path, monkeypatch):
    """Nine of them in a second, a held-out batch for every 12, and 10 seconds left.  What goes on keeps the plan."""
    clock = iter(range(10**6))
    monkeypatch.setattr(optimise, "perf_counter", lambda: float(next(clock)))
    settings, totals = replace(SHORT, minutes=0.2, checkpoint_every=12), []

    def watch(_, done, total, __):
        totals.append(total)
        if done == 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(target, shards, tmp_path / "1", "medusa", settings, watch)
    planned = 10 + round(10 / ((1 + 1 / 12) / 9))
    assert totals[9:] == [planned] * 4
    figures = run(target, shards, tmp_path / "1", "medusa", settings)
    assert (figures["steps"], figures["history"][-1]["step"]) == (planned, planned)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recipe(2, "eagle3"), "drafts=1"),
        (lambda: Recipe(1, "medusa", training=TrainingSettings(layers=2)), "layers=2"),
        (lambda: Recipe(1, "dflash", training=TrainingSettings(block=1)), "block=1"),
        (lambda: Recipe(1, "medusa", training=TrainingSettings(heads=0)), "heads=0"),
        (lambda: Recipe(1, "dspark", training=TrainingSettings(vocabulary=3)), "vocabulary=3"),
        (lambda: Recipe(1, training=TrainingSettings(minutes=0.0)), "minutes=0"),
        (lambda: published_aux_layers(tiny_llama()), "has 2 layers, not 7 or more"),
    ],
)
def test_impossible_recipes(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_states_are_those_that_eagle_reads_by_default():
    """Layers 2, N / 2 and N - 3, and the output."""
    assert published_aux_layers(tiny_llama(num_hidden_layers=30, hidden_size=8, vocab=8)) == (2, 15, 27, 30)
