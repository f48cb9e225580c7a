"""What a caller sets for all of torch (default device, default dtype, autocast): texts are the model's all the same."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PROMPTS, byte_tokenizer, gap_at_difference, like, plain, tiny_llama
from test_heads import draft_for

import specinfer
from specinfer import BestFirst, Chain, Expansion, Sampled, SpeculativeDecoder, check_model
from specinfer.attention import Support
from specinfer.calls.verifying import verify_tree

DRAFTS = {
    "look-ups": lambda target: ["ngram", "suffix"],
    "recycling": lambda target: ["recycling"],
    "lookahead": lambda target: ["lookahead"],
    "model": lambda target: [like(target)],
    "head": lambda target: [draft_for(target)],
}
TREES = {"best-first": BestFirst(60, 9), "sampled": Sampled((2, 1)), "expansion": Expansion((2, 1)), "auto": "auto"}
OPTIONS = [
    {"temperature": 0, "seed": 3},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"penalty_alpha": 0.4, "top_k": 3, "seed": 3},
]


class DefaultDtype:
    """Another default dtype for a while."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __enter__(self):
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *error):
        torch.set_default_dtype(self.before)


CONTRASTED = [("look-ups", "best-first"), ("model", "best-first"), ("model", "auto")]
SETTINGS = {
    "device": lambda: torch.device("meta"),
    "float64": lambda: DefaultDtype(torch.float64),
    "bfloat16": lambda: DefaultDtype(torch.bfloat16),
}


def texts(target, drafts, tree, options):
    """Everything in the setting: the decoder is made, and generates in several ways."""
    decoder = SpeculativeDecoder(target, byte_tokenizer(), drafts, tree, compile=False)
    results = decoder.generate(PROMPTS, max_new_tokens=8, logprobs=True, **options)
    is_timed = tree == "auto"  # then times decide about trees, and these about the last bits
    trees = None if is_timed else [[step.tree.tokens.tolist() for step in result.steps] for result in results]
    logprobs = [[round(value, 9) if is_timed else value for value in result.logprobs] for result in results]
    found = [result.token_ids for result in results], logprobs, trees
    if "penalty_alpha" in options:
        return found
    many = sorted(decoder.generate_many(PROMPTS, max_rows=2, max_new_tokens=8, **options))
    assert [result.token_ids for _, result, _ in many] == found[0]
    stream = decoder.stream(PROMPTS[0], max_new_tokens=8, **options)
    assert "".join(stream) == stream.result.text
    return *found, decoder.score(PROMPTS, [[5, 6], [7], [8, 9, 10], [11]])


@pytest.mark.parametrize(
    ("draft", "tree"), [*((draft, "best-first") for draft in DRAFTS), *(("model", tree) for tree in [*TREES][1:])]
)
def test_defaults_of_torch_change_nothing(target, draft, tree):
    """Ids, log-probabilities, trees and scores; each setting meets each draft and tree, with options in turn."""
    chosen = OPTIONS if (draft, tree) in CONTRASTED else OPTIONS[:2]
    drafts, wanted = DRAFTS[draft](target), {}
    for turn, (name, setting) in enumerate(SETTINGS.items(), len(draft)):
        number = turn % len(chosen)
        if number not in wanted:
            wanted[number] = texts(target, drafts, TREES[tree], chosen[number])
        with setting():
            found = texts(target, drafts, TREES[tree], chosen[number])
        assert found == wanted[number], name


@pytest.mark.parametrize("setting", SETTINGS)
def test_seeds_are_drawn_and_trees_verified_under_defaults(target, setting):
    decoder = SpeculativeDecoder(target, None, [like(target)], Chain(3), compile=False)
    step = decoder.generate(PROMPTS[0], max_new_tokens=8, temperature=0).steps[0]
    logits = torch.randn(len(step.tree), 264, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = verify_tree(step.tree, logits, prefix=PROMPTS[0])
    with SETTINGS[setting]():
        torch.manual_seed(5)
        seeds = {result.seed for result in decoder.generate(PROMPTS, max_new_tokens=2, temperature=1.0)}
        assert len(seeds) == len(PROMPTS)
        assert verify_tree(step.tree, logits, prefix=PROMPTS[0]) == wanted
        assert decoder.generate(PROMPTS[0], max_new_tokens=2).sequences.device.type == "cpu"


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_default_of_torch_makes_no_model_unsupported(setting):
    model = tiny_llama(5)
    with SETTINGS[setting]():
        assert check_model(model).support is Support.EXACT


# ---- autocast ----


@pytest.fixture(scope="module")
def single():
    """A target in float32, which autocast casts."""
    return tiny_llama(0).float()


def casting():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_a_model_first_seen_under_autocast_is_supported(single):
    """It is judged by the type that it computes in, and again without autocast."""
    model = tiny_llama(7).float()
    with casting():
        check = check_model(model)
    assert (check.support, check.dtype) == (Support.EXACT, "float32 in bfloat16")
    assert check.error > 1e-4
    after = check_model(model)
    assert (after.support, after.dtype) == (Support.EXACT, "float32")
    assert after.error < 1e-4


@pytest.mark.parametrize("made_inside", [False, True])
def test_text_is_generates_own_under_autocast(single, made_inside):
    """Without speculation to the bit; with trees up to near-ties, as in a model of 16 bits; and afterwards again."""
    for drafts, tree in (((), None), ([like(single).float(), "ngram"], BestFirst(8, 4)), (["recycling"], "auto")):
        decoder = SpeculativeDecoder(single, None, drafts, tree, compile=False)
        for prompt in PROMPTS:
            with casting(), torch.inference_mode():
                wanted = plain(single, prompt, 12)
                if made_inside:
                    decoder = SpeculativeDecoder(single, None, drafts, tree, compile=False)
                found = decoder.generate(prompt, max_new_tokens=12, temperature=0).token_ids
                assert found == wanted if tree is None else gap_at_difference(single, prompt, wanted, found) < 0.05
            after = decoder.generate(prompt, max_new_tokens=12, temperature=0).token_ids
            assert after == plain(single, prompt, 12)


def test_a_run_computes_as_where_it_was_begun(single):
    """A stream that is read elsewhere, or half of it."""
    decoder = SpeculativeDecoder(single, byte_tokenizer(), [like(single).float()], Chain(3), compile=False)
    options = {"max_new_tokens": 16, "temperature": 0, "logprobs": True}
    with casting():
        wanted = decoder.generate(PROMPTS[0], **options).logprobs
        outside, half = decoder.stream(PROMPTS[0], **options), decoder.stream(PROMPTS[0], **options)
        next(half)
    for stream in (outside, half):
        list(stream)
        assert stream.result.logprobs == wanted
    begun = decoder.stream(PROMPTS[0], **options)
    with casting():
        list(begun)
    assert begun.result.logprobs == decoder.generate(PROMPTS[0], **options).logprobs != wanted


def test_float64_is_not_cast(target):
    with casting():
        decoder = SpeculativeDecoder(target, None, ["ngram"], BestFirst(8, 4), compile=False)
        assert decoder.generate(PROMPTS[0], max_new_tokens=12).token_ids == plain(target, PROMPTS[0], 12)
        assert check_model(target).dtype == "float64"


def test_custom_generate_under_a_default_device(target):
    ids = torch.tensor([PROMPTS[2]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    wanted, draft = target.generate(ids, **options).tolist(), like(target)
    with torch.device("meta"):
        found = target.generate(ids, **options, custom_generate=specinfer.custom_generate, assistant_model=draft)
    assert found.tolist() == wanted


def test_a_process_with_a_default_device_from_the_beginning():
    """Before specinfer is imported: nothing of it is made on import."""
    code = (
        "import torch; torch.set_default_device('meta'); import sys; sys.path.insert(0, sys.argv[1])\n"
        "from conftest import tiny_llama\n"
        "from specinfer import SpeculativeDecoder\n"
        "with torch.device('cpu'): model = tiny_llama(0)\n"
        "print(SpeculativeDecoder(model, compile=False).generate([5, 9, 17], max_new_tokens=6).token_ids)"
    )
    command = [sys.executable, "-P", "-c", code, str(Path(__file__).parents[1])]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout.strip() == str(plain(tiny_llama(0), [5, 9, 17], 6)), found.stderr
