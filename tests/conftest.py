"""Tiny models, tokenizers and drafts that the tests share.  Nothing here needs a network or a file."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from torch._inductor import config as inductor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specinfer import TokenTree, check_model, cli
from specinfer.attention.torch_private import COMPILER_OPTIONS
from specinfer.engine.draft import Draft, DraftSession
from specinfer.tree import Draw, Forest, Policy

if "PYTEST_XDIST_WORKER" in os.environ:  # a thread for each worker and for what it starts: more would wait
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

inductor.aot_inductor.compile_wrapper_opt_level = "O0"  # of compiled passes, kernels alone need to be fast
COMPILER_OPTIONS["aot_inductor.precompile_headers"] = True  # many packages are made: torch's headers are read once ...
inductor.cpp_cache_precompile_headers = False  # ... but `torch.compile` makes one kernel, of flex attention

VOCAB = 264  # of the tiny target: 256 bytes, two special tokens, and padding beyond the tokenizer's table
EOS_TEXT, PAD_TEXT = 256, 257
PROMPTS = [[5, 9, 17, 5, 9], [40], [100, 7, 7, 7, 100, 7, 7, 31, 2, 100], [250, 3, 60]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest of the last files, which one process would have to itself in the end."""
    items.sort(key=lambda item: item.path.name != "test_viz_browser.py")


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections, which else walk over torch again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """What runs afterwards finds all objects again."""
    gc.unfreeze()


def tiny_llama(seed: int = 0, vocab: int = VOCAB, spread: float = 0.25, **options: Any) -> Any:
    """A random llama of two layers in float64, so that no near-tie can hide a mistake."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=vocab, initializer_range=spread, **{**sizes, **heads, **special, **options})
    return LlamaForCausalLM(config).double().eval()


def like(model: Any, noise: float = 0.1, vocab: int | None = None, seed: int = 1) -> Any:
    """A draft that often agrees with the model: its weights plus noise, its vocabulary cut or padded."""
    config = copy.deepcopy(model.config)
    config.vocab_size = vocab or config.vocab_size
    draft = type(model)(config).double().eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for own, other in zip(draft.parameters(), model.parameters(), strict=True):
            rows = min(len(own), len(other))
            own[:rows] = other[:rows] + noise * other.std() * torch.randn_like(other[:rows])
    return draft


def byte_tokenizer(**options: Any) -> Any:
    """A byte-level tokenizer: ids 0 to 255 are bytes, so one emoji is four tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**special, **options})


def word_pieces() -> Any:
    """A tokenizer whose tokens cannot be read as text on their own."""
    tokenizer = Tokenizer(WordPiece({"<unk>": 0, "the": 1, "##cat": 2}, unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


class HostileTokenizer:
    """A tokenizer whose every token would be markup, if it were let: ids cycle through `TEXTS`."""

    TEXTS = (
        "<script>window.hacked = 1</script>",
        "</script><script>window.hacked = 2</script>",
        "<img src=x onerror='window.hacked = 3'>",
        "<!--",
        "]]>",
        "\"'`${window.hacked = 4}",
        "&lt;b&gt;",
        "\u2028\u2029\u202e",
        " a\n",
        "\\",
        "$title",
        "\x00\x1b",
    )

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Return the ids' texts, joined."""
        return "".join(self.TEXTS[i % len(self.TEXTS)] for i in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        """Return how the token is written."""
        return self.decode([token])


def plain(model: Any, prompt: Sequence[int], new: int | None = 24, **options: Any) -> list[int]:
    """The new ids of transformers' own greedy `generate`; options that are None are left out."""
    ids = torch.tensor([list(prompt)])
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, **options}
    options = {name: value for name, value in options.items() if value is not None}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def gap_at_difference(model: Any, prompt: Sequence[int], wanted: Sequence[int], found: Sequence[int]) -> float:
    """The gap between the two likeliest tokens where two texts part, over the logits' spread; 0 if they do not."""
    first = next((i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b), None)
    if first is None:
        return 0.0
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *wanted[:first]]])).logits[0, -1].float()
    best = logits.topk(2)
    assert {wanted[first], found[first]} == {*best.indices.tolist()}
    return float((best.values[0] - best.values[1]) / logits.std())


@contextmanager
def counted(*models: Any) -> Iterator[list[Any]]:
    """Count the forward passes of models: one entry each.  Hooks are checked before, as decoders would."""
    calls: list[Any] = []
    hooks = [model.register_forward_pre_hook(lambda module, _: calls.append(module)) for model in models]
    for model in models:
        check_model(model)
    calls.clear()
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def copied(function: Callable[..., Any], *args: Any, **options: Any) -> Iterator[Any]:
    """Call a function in a copy of this process, which has imported everything, and kill the copy (-9) in the end."""

    def call() -> None:
        torch.set_num_threads(1)  # those of the pool are not copied
        function(*args, **options)

    process = multiprocessing.get_context("fork").Process(target=call, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def launched(function: Callable[..., Any], *args: Any) -> int | None:
    """Call a function in two processes that torchrun's launcher starts, copies of this one; return its exit code."""

    def call() -> None:
        torch.set_num_threads(1)  # those of the pool are not copied
        function(*args)

    config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork")
    config.max_restarts = 0
    launcher = multiprocessing.get_context("fork").Process(target=elastic_launch(config, call))
    launcher.start()
    launcher.join(100)
    launcher.terminate()  # which ends what it started
    launcher.join()
    return launcher.exitcode


def run_command(*arguments: Any) -> None:
    """Do what the command line does."""
    sys.argv = ["specinfer", *map(str, arguments)]
    cli.main()


def ends(rows: Sequence[Sequence[int]]) -> list[int]:
    """The last token of each row: the roots of its trees."""
    return [row[-1] for row in rows]


class Scripted(Draft):
    """A draft that proposes one chain: whatever `future` says will follow a row's ids."""

    def __init__(self, future: Callable[[list[int]], Sequence[int]], name: str = "scripted") -> None:
        self.future, self.name = future, name

    def open(self, context: Any) -> ScriptedSession:
        """Start with the rows' prompts."""
        return ScriptedSession(self.future, context)


class ScriptedSession(DraftSession):
    """The rows' ids, and the script."""

    def __init__(self, future: Callable[[list[int]], Sequence[int]], context: Any) -> None:
        self.future, self.draft = future, context.draft
        self.rows = [list(prompt) for prompt in context.prompts]

    def propose(self, policy: Policy, roots: Sequence[int], max_depth: int) -> Forest:
        """Return one chain a row."""
        return Forest.of([self._chain(row, min(policy.max_depth, max_depth)) for row in self.rows])

    def commit(self, tokens: Sequence[Sequence[int] | None], states: Sequence[object] = (), scored: Any = ()) -> None:
        """Append what was committed; None retires a row."""
        kept = zip(self.rows, tokens, strict=True)
        self.rows = [row + list(new) for row, new in kept if new is not None]

    def _chain(self, row: list[int], depth: int) -> TokenTree:
        tokens = list(self.future(row))[:depth]
        steps = range(len(tokens))
        scores, draws = [-0.1 * (i + 1) for i in steps], [[Draw(self.draft, 0)] for _ in steps]
        return TokenTree.from_nodes(row[-1], tokens, list(steps), scores, draws)


def oracle(model: Any, wrong: bool = False, **options: Any) -> Scripted:
    """A draft that knows the target's greedy choices, or that is never right about the first one."""

    def future(row: list[int]) -> list[int]:
        tokens = plain(model, row, 8, **options)
        return [(token + 1) % model.config.vocab_size for token in tokens] if wrong else tokens

    return Scripted(future, "wrong" if wrong else "oracle")


def following(script: Sequence[int], start: int) -> Callable[..., torch.Tensor]:
    """A logits processor that forces the tokens of a script after `start` ids, and the last one ever after."""

    def force(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, script[min(input_ids.shape[1] - start, len(script) - 1)]] = 0.0
        return forced

    return force


@pytest.fixture(scope="session")
def target() -> Any:
    """The target that most tests decode with."""
    return tiny_llama(0)


@pytest.fixture(scope="session")
def near(target: Any) -> Any:
    """A draft that often agrees with the target."""
    return like(target)


@pytest.fixture(scope="session")
def far() -> Any:
    """A draft that hardly ever agrees with the target."""
    return tiny_llama(7)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The byte-level tokenizer of the tiny target."""
    return byte_tokenizer()


@pytest.fixture
def waits(monkeypatch: Any) -> list[str]:
    """Reads of tensors' values, each of which would wait for a GPU: the names of the methods, in order."""
    seen: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        read = getattr(torch.Tensor, name)

        def counted(tensor: torch.Tensor, *args: Any) -> Any:
            seen.append(name)
            return read(tensor, *args)

        return counted

    for name in ("cpu", "item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, counting(name))
    return seen


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What specinfer warns of (pytest's own fixture looks through all loggers in every test)."""
    text, logger = io.StringIO(), logging.getLogger("specinfer")
    logger.addHandler(handler := logging.StreamHandler(text))
    yield text
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def script() -> Iterator[Callable[[str], Any]]:
    """Import a script of `benchmarks`, whose modules import each other by name."""
    folder = Path(__file__).parent.parent / "benchmarks"
    sys.path.insert(0, str(folder))
    before = set(sys.modules)
    yield importlib.import_module
    sys.path.remove(str(folder))
    for name in set(sys.modules) - before:
        if (folder / f"{name}.py").is_file():
            del sys.modules[name]
