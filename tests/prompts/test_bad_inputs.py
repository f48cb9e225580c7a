"""Bad inputs, generated: every argument gets values of every wrong kind, and each is refused with a line of advice."""

import random
from collections.abc import Callable, Iterator
from functools import cache
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from conftest import byte_tokenizer, counted, like, tiny_llama

from specinfer import (
    Auto,
    BestFirst,
    Chain,
    Expansion,
    Memory,
    ModelDraft,
    Result,
    Sampled,
    SpeculativeDecoder,
    check_model,
    cli,
    loading,
)
from specinfer.drafts.lookup.lookahead import LookaheadDraft
from specinfer.drafts.lookup.ngram import NGramDraft
from specinfer.drafts.lookup.suffix import SuffixDraft
from specinfer.errors import SpecinferError


class Odd:
    """No value that anything takes."""


VALUES: dict[str, Callable[[], Any]] = {
    "object": Odd,
    "bytes": lambda: b"x",
    "negative": lambda: -1,
    "zero": lambda: 0,
    "one": lambda: 1,
    "fraction": lambda: 1.5,
    "nan": lambda: nan,
    "infinite": lambda: inf,
    "huge": lambda: 2**70,
    "complex": lambda: 1j,
    "true": lambda: True,
    "none": lambda: None,
    "nothing": lambda: "",
    "text": lambda: "wrong",
    "nul": lambda: "a\0b",
    "surrogate": lambda: "\ud800",
    "path": lambda: Path("/dev/null/file"),
    "empty": list,
    "list": lambda: [Odd()],
    "nested": lambda: [[[]]],
    "ids": lambda: [1, 2],
    "dict": lambda: {"a": 1},
    "set": lambda: {1.5},
    "class": lambda: int,
    "function": lambda: len,
    "generator": lambda: iter([0.5]),
    "tensor": lambda: torch.zeros(2, 2),
    "array": lambda: np.array([[1.5]]),
}
# Values that are fine, by what an argument takes.
FLAG, COUNT, SIZE, SHARE, POSITIVE = "true", "one", "zero one", "zero one", "one fraction huge"
TOKEN, TOKENS, SEED, ONES = "zero one", "zero one empty ids", "negative zero one", "one true"
TEXT, WORD = "text nul ids", "nothing text nul surrogate"

OPTIONS = {  # of which None is none
    "seed": SEED,
    "generation_config": "",
    "attention_mask": "",
    "position_ids": "",
    "token_type_ids": "",
    "logits_processor": "empty",
    "stopping_criteria": "empty",
    "do_sample": FLAG,
    "repetition_penalty": POSITIVE,
    "temperature": f"zero {POSITIVE}",
    "top_k": f"{SIZE} huge",
    "top_p": "one",
    "top_h": "one",
    **dict.fromkeys(["min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"], SHARE),
    "max_new_tokens": COUNT,
    "max_length": "one huge",
    "min_new_tokens": SIZE,
    "min_length": f"{SIZE} huge",
    "max_time": f"zero infinite {POSITIVE}",
    "stop_strings": "text nul empty",
    "no_repeat_ngram_size": f"{SIZE} huge",
    "eos_token_id": f"negative {TOKENS}",
    "pad_token_id": f"negative {TOKENS} huge",
    "forced_eos_token_id": TOKENS,
    "forced_bos_token_id": TOKEN,
    "bad_words_ids": "",
    "sequence_bias": "",
    **dict.fromkeys(["suppress_tokens", "begin_suppress_tokens"], "empty ids"),
    **dict.fromkeys(["renormalize_logits", "remove_invalid_values", "return_dict_in_generate"], FLAG),
    "exponential_decay_length_penalty": "ids",
    "num_return_sequences": COUNT,
    "num_beams": ONES,
    "use_cache": ONES,
    "guidance_scale": ONES,
    "output_scores": "zero",
    "length_penalty": ONES,
    "early_stopping": "zero",
    **dict.fromkeys(["watermarking_config", "cache_implementation", "num_assistant_tokens", "compile_config"], ""),
    "low_memory": "zero",
    "streamer": "",
}
GENERATED = {name: f"{fine} none" for name, fine in OPTIONS.items()} | {
    "logprobs": "true one",
    "raw": FLAG,
    "prediction": "nothing text nul empty ids none",
}
CONSTRUCTED = {
    "drafts": "empty",
    "tree": "none",
    "verifier": "none",
    "confidence_gate": f"none {SHARE}",
    "graphs": "",
    "memory": "none",
    "online": "",
}
LOADED = {
    "target": "none",
    "dtype": "",
    "device": "",
    "device_map": "none",
    "max_memory": "none",
    "quantize": "none",
    "offload_folder": "none",
    "tensor_parallel": ONES,
    "revision": f"none {WORD}",
    "variant": "none",
    "token": f"none true {WORD}",
    "attn_implementation": "none dict",
    "offload_buffers": "none true",
    "subfolder": "none nothing",
    "cache_dir": f"none path {WORD}",
    "quantization_config": "none",
}
# Of each call: arguments that are right, and of those that are made wrong the values that are fine.
CALLS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "generate": (
        {"prompt": [1, 2, 3], "max_new_tokens": 2},
        {**GENERATED, "prompt": TEXT, "keep_stop_string": FLAG, "max_rows": COUNT},
    ),
    "stream": ({"prompt": [1, 2, 3], "max_new_tokens": 2}, {"prompt": TEXT, "seed": f"{SEED} none", "raw": FLAG}),
    "generate_many": (
        {"prompts": [[1, 2]], "max_new_tokens": 2},
        {"prompts": "empty list nested ids set generator tensor array", "seed": f"{SEED} none", "max_rows": COUNT},
    ),
    "score": (
        {"prompt": [1, 2], "continuation": [3]},
        {"prompt": TEXT, "continuation": TEXT, "raw": FLAG, "top_logprobs": SIZE},
    ),
    "SpeculativeDecoder": ({"drafts": "ngram"}, {**CONSTRUCTED, "model": "", "tokenizer": "none"}),
    "from_pretrained": ({"drafts": "ngram", "dtype": "float32"}, {**LOADED, "drafts": CONSTRUCTED["drafts"]}),
    "ModelDraft": ({}, {"model": "", "tokenizer": "none", "name": f"none path {WORD}", "tokens": ""}),
    "BestFirst": ({"max_nodes": 4, "max_depth": 2}, {"max_nodes": SIZE, "max_depth": SIZE, "min_probability": SHARE}),
    "Expansion": ({}, {"expansion": "empty ids"}),
    "Sampled": ({"expansion": [1]}, {"expansion": "empty ids", "replacement": FLAG}),
    "Chain": ({}, {"length": SIZE}),
    "Auto": ({}, {"max_nodes": f"none {SIZE}", "max_depth": f"none {SIZE}", "profile": "none"}),
    "NGramDraft": ({}, {"max_ngram": COUNT}),
    "SuffixDraft": ({}, {"max_context": COUNT}),
    "LookaheadDraft": ({}, {"window": COUNT, "guesses": COUNT, "ngram": ""}),
    "Memory.load": ({}, {"path": ""}),
    "Result.load": ({}, {"path": ""}),
    "save": ({}, {"path": "text"}),
    "to_html": ({}, {"path": "text none"}),
    "check_model": ({}, {"model": ""}),
}
BAD = {
    (call, name): [label for label in VALUES if label not in fine.split()]
    for call, (_, arguments) in CALLS.items()
    for name, fine in arguments.items()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and its tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama().float().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def calls(folder: Path) -> dict[str, Callable[..., Any]]:
    """What is called, by name, on tiny models."""
    model, tokenizer = tiny_llama(), byte_tokenizer()
    decoder = SpeculativeDecoder(model, tokenizer, [like(model)], BestFirst(4, 2))
    result = decoder.generate([1, 2], max_new_tokens=2)
    made = (BestFirst, Expansion, Sampled, Chain, Auto, NGramDraft, SuffixDraft, LookaheadDraft, check_model)
    return {
        "generate": decoder.generate,
        "stream": lambda **given: list(decoder.stream(**given)),
        "generate_many": lambda **given: list(decoder.generate_many(**given)),
        "score": decoder.score,
        "SpeculativeDecoder": lambda **given: SpeculativeDecoder(**{"model": model, "tokenizer": tokenizer, **given}),
        "from_pretrained": lambda **given: SpeculativeDecoder.from_pretrained(**{"target": str(folder), **given}),
        "ModelDraft": lambda **given: SpeculativeDecoder(model, tokenizer, [ModelDraft(**{"model": model, **given})]),
        "Memory.load": Memory.load,
        "Result.load": Result.load,
        "save": result.save,
        "to_html": result.to_html,
        **{each.__name__: each for each in made},
    }


def refuse(call: Callable[..., Any], given: dict[str, Any], what: str) -> None:
    """Fail unless a call is refused in one line."""
    try:
        call(**given)
        message = "accepted"
    except SpecinferError as error:
        message = str(error)
        if 10 < len(message) < 400 and "\n" not in message:
            return
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
    pytest.fail(f"{what}: {message}")


def test_there_are_enough() -> None:
    assert sum(map(len, BAD.values())) > 2000


@pytest.mark.parametrize(("call", "name"), BAD, ids=[".".join(pair) for pair in BAD])
def test_wrong_values_are_refused(
    calls: dict[str, Callable[..., Any]], call: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for label in BAD[call, name]:
        refuse(calls[call], {**CALLS[call][0], name: VALUES[label]()}, f"{call}({name}={label})")


def combinations(count: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield calls and several arguments that are wrong at once, always the same ones."""
    draw = random.Random(0)
    for _ in range(count):
        call = draw.choice([call for call, (_, arguments) in CALLS.items() if len(arguments) > 2])
        names = draw.sample(sorted(CALLS[call][1]), 3)
        yield call, {name: draw.choice(BAD[call, name]) for name in names}


def test_several_wrong_values_are_refused(calls: dict[str, Callable[..., Any]]) -> None:
    for call, labels in combinations(200):
        wrong = {name: VALUES[label]() for name, label in labels.items()}
        refuse(calls[call], {**CALLS[call][0], **wrong}, f"{call}({labels})")


def test_nothing_runs_before_all_is_checked(calls: dict[str, Callable[..., Any]]) -> None:
    """Of a call for text: tests above would pass, too, if an error came late."""
    model = tiny_llama()
    decoder = SpeculativeDecoder(model, byte_tokenizer(), "ngram", BestFirst(4, 2))
    with counted(model) as passes:
        for name in GENERATED:
            if name != "token_type_ids":  # which are compared with none
                refuse(decoder.generate, {"prompt": [1, 2, 3], name: VALUES[BAD["generate", name][0]]()}, name)
    assert not passes


# ---- the command line ----

WORDS = ["", "wrong", "-1", "0", "1.5", "1e999", "nan", "1,,2", "=", "/dev/null/file", "\udcff", "a b", "9" * 30]
EACH = 3  # words after an option
MISSING = ["--prompts", "missing.jsonl"]
COMMANDS = {  # arguments that are right, or name what is missing where a command would take long
    "generate": ["abc", "--raw", "--target", "tiny", "--draft", "ngram", "--max-new-tokens", "2"],
    "tree": ["abc", "--raw", "--target", "tiny", "--draft", "ngram", "--max-new-tokens", "2"],
    "check-model": ["tiny"],
    "check-draft": ["--target", "missing"],
    "compare": [*MISSING, "--target", "tiny", "--out", "out"],
    "record": [*MISSING, "--target", "tiny", "--out", "out"],
    "paper-tables": [*MISSING, "--target", "tiny"],
    "replay": ["missing"],
    "distill": [*MISSING, "--target", "tiny", "--out", "out"],
}


def options_of(command: str) -> list[str]:
    """Return the options of a command that take a value."""
    params = typer.main.get_command(cli.app).commands[command].params  # type: ignore[attr-defined]
    return [
        param.opts[0] for param in params if param.opts[0].startswith("--") and not getattr(param, "is_flag", False)
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_refuses_in_one_line(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A word after an option is fine, or gives exit code 2 and one line; so do an unknown option and none at all."""
    draw, refused = random.Random(0), 0
    monkeypatch.setattr(loading, "load", cache(loading.load))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(folder)
    given = [[option, word] for option in options_of(command) for word in draw.sample(WORDS, EACH)]
    for wrong in [*given, ["--no-such-option"]]:
        monkeypatch.setattr("sys.argv", ["specinfer", command, *COMMANDS[command], *wrong])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        error = capsys.readouterr().err
        assert ended.value.code in (0, 2), wrong
        assert "Traceback" not in error, wrong
        if ended.value.code == 2:
            refused += 1
            told = error.rpartition("\nspecinfer: ")[2] if wrong[0] == "--profile" else error  # after its text
            assert told.startswith("specinfer: ") or told != error, (wrong, error)
            assert told.count("\n") == 1, (wrong, error)
    assert refused > len(given) / 2
