"""The check of drafts: its expectations are what runs measure, and it says what was planted."""

import json

import pytest
import torch
from conftest import PROMPTS as ALL_PROMPTS
from conftest import VOCAB, byte_tokenizer, like, tiny_llama
from test_heads import draft_for
from transformers import MptConfig, MptForCausalLM

import specinfer.loading
from specinfer import BestFirst, Chain, ModelDraft, SpeculativeDecoder, check_draft, cli
from specinfer.drafts.language_model import ModelDraftSession
from specinfer.errors import InputError
from specinfer.evaluation.doctor import CHAINS, TREES
from specinfer.evaluation.doctor import pass_costs as costs
from specinfer.evaluation.doctor.verdict import RULES, Signs, verdict
from specinfer.loading import Loaded
from specinfer.viz.plots import plot_drafts

PROMPTS = ALL_PROMPTS[:3]
NEW = 12


def hasten(patch):
    """Time as little as can be: no test reads times."""
    for name in ("STEPS", "ROUNDS"):
        patch.setattr(costs, name, 1)


class Changed(ModelDraft):
    """A draft whose candidates, log-probabilities apart, are changed below some depth."""

    def __init__(self, model, name, change):
        super().__init__(model, byte_tokenizer(), name)
        self.change = change

    def open(self, context):
        """Open a session that changes what it is asked."""
        session = ModelDraftSession(self.model, context)
        top = session.top

        def changed(frontier, k):
            tokens, log_probs = top(frontier, k)
            return self.change(tokens, frontier.depth), log_probs

        session.top = changed
        return session


def swapped(model):
    """The model with its layers in the wrong order."""
    other = like(model, 0.0)
    other.model.layers = other.model.layers[::-1]
    return other


def without_norms(model):
    """The model without the norms before its layers' attention."""
    other = like(model, 0.0)
    for layer in other.model.layers:
        layer.input_layernorm = torch.nn.Identity()
    return other


def cut(model, size):
    """The model with the last rows of its output matrix only, whose map to the model's ids is lost."""
    other = like(model, 0.0, vocab=size)
    other.lm_head.weight.data = model.lm_head.weight.data[-size:].clone()
    return other


@pytest.fixture(scope="module")
def decoder(target):
    tokens = byte_tokenizer()
    drafts = {
        "fine": ModelDraft(like(target, 0.0), tokens, "fine"),
        "another target": ModelDraft(tiny_llama(7), tokens, "another target"),
        "wrong layers": ModelDraft(swapped(target), tokens, "wrong layers"),
        "no norm": ModelDraft(without_norms(target), tokens, "no norm"),
        "map ignored": ModelDraft(cut(target, VOCAB // 2), tokens, "map ignored"),
        "one step": Changed(like(target, 0.0), "one step", lambda ids, depth: (ids + (depth > 0)) % VOCAB),
        "badly ranked": Changed(like(target, 0.0), "badly ranked", lambda ids, _: ids.roll(3, -1)),
        "untrained": draft_for(target, "untrained"),
    }
    return SpeculativeDecoder(target, tokens, [*drafts.values(), "ngram"], "auto")


@pytest.fixture(scope="module")
def report(decoder):
    with pytest.MonkeyPatch.context() as patch:
        hasten(patch)
        return check_draft(decoder, PROMPTS, max_new_tokens=NEW)


@pytest.fixture(scope="module")
def merged(target):
    """A decoder with two drafts, and its report."""
    two = SpeculativeDecoder(target, byte_tokenizer(), [like(target), "ngram"], "auto")
    with pytest.MonkeyPatch.context() as patch:
        hasten(patch)
        return two, check_draft(two, PROMPTS, max_new_tokens=NEW)


@pytest.fixture(scope="module")
def found(report):
    return {check.draft: check for check in report.drafts}


def test_a_draft_that_is_the_target_is_good(found):
    """All its first choices are right, at every depth, and chains are accepted to their ends."""
    check = found["fine"]
    assert check.grade == "good"
    assert check.words.startswith("It fits this target")
    assert set(check.hits["top 1"]) == {1.0}
    assert check.positions == [len(PROMPTS) * (NEW - depth) for depth in range(1, 9)]
    assert check.gains.ideal[0] == check.gains.sizes[CHAINS.index(8)].tokens_per_pass[0] == NEW / 2


@pytest.mark.parametrize(
    ("draft", "grade", "words"),
    [
        ("another target", "bad", "trained for another target"),
        ("wrong layers", "bad", "reads wrong layers"),
        ("no norm", "bad", "norms"),
        ("map ignored", "bad", "map (d2t) is probably ignored"),
        ("untrained", "bad", "does not fit"),
        ("one step", "weak", "the state that it hands on is wrong"),
        ("badly ranked", "bad", "badly ranked"),
        ("ngram", "weak", "seldom repeats itself"),
    ],
)
def test_what_was_planted_is_said(found, draft, grade, words):
    """In one or two sentences, and the other sentences are absent."""
    check = found[draft]
    assert (check.grade, words in check.words) == (grade, True), check.words
    assert ("d2t" in check.words) == (draft == "map ignored")
    assert ("hands on" in check.words) == (draft == "one step")


def test_coverage_counts_the_targets_tokens(found, report):
    """The untrained head may propose even ids only; the other drafts have the target's vocabulary."""
    assert 0 < found["untrained"].covered < 1
    assert {check.covered for name, check in found.items() if name != "untrained"} == {1.0}
    assert report.tokens == NEW * len(PROMPTS)


POLICIES = [Chain(3), BestFirst(4, 8), BestFirst(16, 8), BestFirst(64, 8)]


def expected(gains, policy):
    """What a report expects of a policy."""
    name = f"chain {policy.max_depth}" if isinstance(policy, Chain) else f"tree {policy.max_nodes}"
    (size,) = [size for size in gains.sizes if size.tree == name]
    return size


def measured(decoder, drafts, policy):
    """Tokens per pass of real runs with a fixed tree."""
    own = SpeculativeDecoder(decoder.target.model, decoder.tokenizer, drafts, policy)
    stats = [result.stats for result in own.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)]
    return sum(each.new_tokens for each in stats) / sum(each.target_passes for each in stats)


@pytest.mark.parametrize("draft", ["fine", "another target", "one step", "untrained", "ngram"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_expected_tokens_per_pass_are_what_a_run_measures(decoder, found, draft, policy):
    """With the same fixed tree on the same prompts, to the last step."""
    drafts = [each for each in decoder.drafts if each.name == draft]
    size = expected(found[draft].gains, policy)
    assert size.tokens_per_pass[0] == measured(decoder, drafts, policy)
    assert size.nodes <= policy.max_nodes
    if draft == "another target":  # there is a tree before every token of a text but its last
        assert size.nodes >= min(3, policy.max_nodes) * (NEW - 1) / NEW


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_so_are_those_of_merged_drafts(merged, policy):
    decoder, report = merged
    size = expected(report.together, policy)
    assert size.tokens_per_pass[0] == measured(decoder, decoder.drafts, policy) > 1


def test_speed_up_is_tokens_by_milliseconds(report):
    """The best size is the one with the most; costs are positive; sizes are in order."""
    assert costs.PassCosts([0, 4], [10.0, 20.0], [1.0, 2.0]).step(2) == 16.5
    plain = report.passes.step(0)
    assert report.passes.nodes == [0, 1, 4, 8, 16, 32, 64]
    assert report.passes.target == sorted(report.passes.target)
    assert min(report.passes.target) > 0
    for gains in [check.gains for check in report.drafts] + [report.together]:
        assert [size.tree for size in gains.sizes] == [*(f"chain {n}" for n in CHAINS), *(f"tree {n}" for n in TREES)]
        for size in gains.sizes:
            assert size.speed_up == pytest.approx(size.tokens_per_pass[0] * plain / size.milliseconds)
        fastest = max(size.speed_up for size in gains.sizes)
        assert gains.best.speed_up == fastest if fastest > 1 else gains.best is None
        assert "chain" in gains.advice or "tree" in gains.advice or "no size pays" in gains.advice


def test_the_report_is_json_and_text(report):
    """JSON comes back as it was; every line of the text has 100 columns at most."""
    made = report.to_dict()
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert [each["draft"] for each in made["drafts"]] == [check.draft for check in report.drafts]
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    assert all(check.draft in text and check.grade in text for check in report.drafts)
    assert report._repr_html_().startswith("<pre>")


def test_a_report_is_drawn(report):
    """A line per draft and kind of tree, above and below."""
    ax = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    assert report.plot(ax) is ax
    lines = [line for line in ax.get_lines() if (line.get_gid() or "").startswith("tokens-")]
    assert len(lines) == 2 * (len(report.drafts) + 1)
    assert lines[0].get_ydata().tolist() == [size.tokens_per_pass[0] for size in report.drafts[0].gains.sizes[:6]]
    with pytest.raises(InputError, match="not a str"):
        plot_drafts("report")


def test_conventions_are_a_table(target, monkeypatch):
    """The agreements that a draft brings are printed and kept as they are; texts of two tokens have one depth."""
    hasten(monkeypatch)
    draft = ModelDraft(like(target), byte_tokenizer(), "near")
    draft.agreements = [("layers 1, 2; norm before", [0.5, 0.25]), ("layers 0, 1; norm before", [0.1])]
    made = check_draft(SpeculativeDecoder(target, byte_tokenizer(), [draft]), PROMPTS[0], max_new_tokens=2)
    assert made.drafts[0].agreements == draft.agreements
    assert made.drafts[0].positions == [1]
    assert made.together is None
    assert "layers 0, 1; norm before  10%" in str(made)
    assert json.loads(json.dumps(made.to_dict())) == made.to_dict()


def test_models_that_score_chains_only_are_checked_with_chains(monkeypatch):
    """ALiBi reads cache columns, so there are no trees to expect."""
    hasten(monkeypatch)
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "n_layers": 1,
        "n_heads": 4,
        "max_seq_len": 256,
        "initializer_range": 0.25,
    }
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = MptForCausalLM(MptConfig(**sizes, **special)).double().eval()
    made = check_draft(SpeculativeDecoder(model, byte_tokenizer(), ["ngram"]), PROMPTS, max_new_tokens=NEW)
    assert [size.tree for size in made.drafts[0].gains.sizes] == [f"chain {n}" for n in CHAINS]
    assert made.passes.nodes == [0, 1, 4, 8]
    assert "tree" not in str(made)


# ---- the rules, on made figures ----

FITS = Signs([0.6, 0.55, 0.5], 0.9)


@pytest.mark.parametrize(
    ("signs", "grade", "words"),
    [
        (FITS, "good", "It fits this target: its first choice is right at 60% of the positions."),
        (Signs([0.6], 0.9), "good", "fits"),
        (Signs([0.09, 0.09], 0.1), "bad", "Likely causes"),
        (Signs([0.09, 0.09], 0.1, reach=0.5), "bad", "first 50% of the vocabulary"),
        (Signs([0.6, 0.29], 0.9), "weak", "hands on"),
        (Signs([0.6, 0.31], 0.9), "good", "fits"),
        (Signs([0.3, 0.3], 0.8), "weak", "badly ranked"),
        (Signs([0.35, 0.35], 0.7), "weak", "trained little"),
        (Signs([0.6, 0.6], 0.9, covered=0.8), "weak", "holds 80%"),
        (Signs([0.03, 0.01], 0.05, lookup=True, reach=0.2), "weak", "seldom repeats"),
        (Signs([0.5, 0.2], 0.6, lookup=True), "good", "fits"),
        (Signs([0.6, 0.6], 0.9, level=0.6), "good", "A level costs 60%"),
    ],
)
def test_figures_become_words(signs, grade, words):
    made = verdict(signs)
    assert made[0] == grade
    assert words in made[1]


def test_every_rule_is_tried_alone():
    """No rule says anything of a draft that fits, and none is idle."""
    assert verdict(FITS)[0] == "good"
    assert not any(applies(FITS) for _, applies, _ in RULES)


# ---- the command line ----


@pytest.fixture
def run(target, monkeypatch, capsys):
    """Run the command on toy models; return exit code, standard output and standard error."""

    def load(name=None, dtype="auto", device="auto", *_, **__):
        return Loaded(like(target) if name == "near" else target, byte_tokenizer(), str(name))

    monkeypatch.setattr(specinfer.loading, "load", load)
    hasten(monkeypatch)

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["specinfer", "check-draft", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return call


def test_the_command_prints_tables_json_and_a_picture(run, tmp_path):
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "few.jsonl", tmp_path / "check.svg"
    file.write_text('{"prompt": "abcabc"}\n{"prompt": "hello"}\n{"prompt": "none"}\n')
    options = ["--draft", "near", "--prompts", file, "--count", 2, "--max-new-tokens", 8]
    code, out, _ = run(*options, "--plot", picture)
    assert code == 0
    assert "16 tokens of 2 texts" in out
    assert "tokens/pass" in out
    assert picture.read_text().lstrip().startswith("<?xml")
    made = json.loads(run("--draft", "ngram", *options[2:], "--json")[1])
    assert made["tokens"] == 16
    assert [each["draft"] for each in made["drafts"]] == ["ngram"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "'bundled': no heads for this target"),
        (["--draft", "ngram", "--prompts", "nowhere.jsonl"], "cannot read"),
        (["--draft", "ngram", "--max-new-tokens", 1], "max_new_tokens=1"),
        (["--draft", "ngram", "--plot", "x.txt"], "cannot be written as a picture"),
    ],
)
def test_bad_input_is_one_line(run, arguments, message):
    """And exit code 2."""
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_decoder_is_needed_with_drafts(target):
    for decoder in ("near", SpeculativeDecoder(target, byte_tokenizer(), [], None)):
        with pytest.raises(InputError, match="no draft to check"):
            check_draft(decoder, PROMPTS)
