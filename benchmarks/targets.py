"""What `gpu.py` and `growth.py` measure: a pair, and targets of real shapes with random weights, whose text is known.

A draft can agree with a text that is known, as often as asked.  Weights are made in memory; nothing is downloaded, and
what a pass costs does not depend on the numbers in it.  The output matrix is the embedding matrix, moved down by one
row, and the layers add little: so token t is followed by t + 1, in any dtype, with a margin that rounding does not
bridge.  Where the two matrices are one (tied), t is followed by t.

Knows: configurations, models, drafts, prompts.  Does not know: clocks.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import log
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from specinfer import ModelDraft, SpeculativeDecoder
from specinfer.decoder import WORDS, load_draft
from specinfer.drafts.head import HeadDraft, target_fingerprint
from specinfer.drafts.head_network import HeadNetwork
from specinfer.drafts.published.layers import network_config
from specinfer.drafts.rows import DraftRows
from specinfer.engine.draft import Draft, DraftContext, DraftSession, Scored
from specinfer.engine.gumbel import DRAFT, key, uniform
from specinfer.errors import ModelError
from specinfer.loading import load, resolve_device
from specinfer.tree import Frontier, Source

CANDIDATES = 8  # of every node
PROMPTS = [
    "Write a long story about a lighthouse keeper and the sea.",
    "Explain in detail how a compiler turns a program into machine code.",
    "Write a Python class for a binary search tree with insert, delete and search, with docstrings.",
    "List the planets of the solar system and describe each of them in a paragraph.",
]


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        name, model, tokenizer: of the target; its texts do not end.
        drafts: of our decoder.
        prompts: rows, and tokens of each; those of the pair are as long as they are.
        text: the ids that must follow a prompt; None where they are not known.
    """

    name: str
    model: Any
    tokenizer: Any
    drafts: list[Any]
    prompts: Callable[[int, int], list[list[int]]]
    text: Callable[[list[int], int], list[int]] | None = None


# ---- the default pair ----


def pair(target: str | None, drafts: Sequence[str], dtype: str, tiny: bool) -> Subject:
    """Load a target and its drafts; where the default target is not at hand, make something of its shape.

    Raises:
        ModelError: another target or a draft cannot be loaded.
    """
    try:
        loaded = None if tiny else load(target, dtype)
    except ModelError:
        if target is not None:
            raise
        loaded = None
    if loaded is None:
        return stand_in(deepcopy(TINY["tiny"] if tiny else SHAPES["SmolLM2-135M"]), dtype)
    loaded.model.generation_config.eos_token_id = None
    named = [name if name in WORDS else load_draft(name, dtype, "auto") for name in drafts or ("auto",)]
    decoder = SpeculativeDecoder(loaded.model, loaded.tokenizer, [], None)
    prompts = [decoder.open(prompt, max_new_tokens=1).rows[0].ids for prompt in PROMPTS]
    return Subject(target or "default", loaded.model, loaded.tokenizer, named, _repeated(prompts))


def stand_in(config: PreTrainedConfig, dtype: str) -> Subject:
    """Return a random model and a noisy copy as its draft, in place of a pair."""
    model = random_model(config, dtype, 2 / config.hidden_size**0.5)
    near = deepcopy(model)
    with torch.no_grad():
        for weight in near.parameters():
            weight += 0.03 * (weight.std() if weight.ndim > 1 else 0) * torch.randn_like(weight)
    prompts = [[byte % config.vocab_size for byte in prompt.encode()] for prompt in PROMPTS]
    return Subject("stand-in", model, None, [ModelDraft(near, name="noisy copy")], _repeated(prompts))


def _repeated(prompts: list[list[int]]) -> Callable[[int, int], list[list[int]]]:
    return lambda rows, tokens: [prompts[row % len(prompts)] for row in range(rows)]


# ---- real shapes ----


def _llama(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv: int, tied: bool) -> dict[str, Any]:
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": kv, "tie_word_embeddings": tied}


# of the models' config.json files
SHAPES: dict[str, PreTrainedConfig] = {
    "SmolLM2-135M": LlamaConfig(**_llama(49152, 576, 1536, 30, 9, 3, True)),
    "Llama-3.2-1B": LlamaConfig(**_llama(128256, 2048, 8192, 16, 32, 8, True)),
    "Llama-3.1-8B": LlamaConfig(**_llama(128256, 4096, 14336, 32, 32, 8, False)),
}
TINY: dict[str, PreTrainedConfig] = {
    "tiny": LlamaConfig(**_llama(128, 32, 48, 2, 4, 2, False)),
}


def random_model(config: PreTrainedConfig, dtype: str, spread: float) -> Any:
    """Return a model of random weights with this standard deviation, made on its device; its texts never end."""
    torch.manual_seed(0)
    config.initializer_range, config.max_position_embeddings = spread, 1 << 15
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    with resolve_device("auto"):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def shape(name: str, config: PreTrainedConfig, dtype: str, acceptance: float) -> Subject:
    """Return a target of a real shape, and the draft that agrees."""
    model = counting(config, dtype)

    def prompts(rows: int, tokens: int) -> list[list[int]]:
        return [[(row + i) % config.vocab_size for i in range(tokens)] for row in range(rows)]

    def text(prompt: list[int], new: int) -> list[int]:
        return [following(config, prompt[-1], step + 1) for step in range(new)]

    return Subject(name, model, None, [Agreeing(config, acceptance)], prompts, text)


@torch.no_grad()
def counting(config: PreTrainedConfig, dtype: str) -> Any:
    """Return a random model that counts: `following` says which token it writes after one."""
    model = random_model(config, dtype, spread=1e-3)
    embedding = model.get_input_embeddings().weight.normal_()
    if not config.tie_word_embeddings:
        model.get_output_embeddings().weight.copy_(embedding.roll(1, 0))
    return model


def following(config: PreTrainedConfig, tokens: Any, steps: int = 1) -> Any:
    """Return what a counting model writes some steps after tokens."""
    return tokens if config.tie_word_embeddings else (tokens + steps) % config.vocab_size


@torch.no_grad()
def counting_head(model: Any) -> HeadDraft:
    """Return an EAGLE-style head of one layer that says what a counting model says: its trees have all their levels."""
    sizes = "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"
    fields = {name: getattr(model.config, name) for name in (*sizes, "max_position_embeddings", "rms_norm_eps")}
    layers = model.config.num_hidden_layers
    config = network_config(**fields, num_hidden_layers=1, aux_layers=[layers // 4, layers // 2, layers])
    with model.device:
        head = HeadNetwork(config, torch.arange(config.vocab_size)).to(model.dtype)
        for weight in head.layers.parameters():
            weight.normal_(std=1e-3) if weight.ndim > 1 else weight.fill_(1)
        head.mix.weight.copy_(torch.eye(*head.mix.weight.shape))  # the embedding alone
    return HeadDraft(head, target_fingerprint(model, SimpleNamespace(get_vocab=dict)))


class Agreeing(Draft):
    """A draft without weights whose q is right about itself.

    The candidate of rank r has the probability q(r) = a (1 - a) ** r, and the target's token has rank r just as often:
    the same rank at all nodes of a depth, by lot.

    Args:
        config: of the counting target.
        acceptance: a, how often the first candidate is the target's token.
    """

    name = "agreeing"

    def __init__(self, config: PreTrainedConfig, acceptance: float) -> None:
        self.config, self.acceptance = config, acceptance

    def open(self, context: DraftContext) -> "AgreeingSession":
        """Start drafting for a batch of rows."""
        return AgreeingSession(context, self)

    def rank(self, chance: float) -> int:
        """Return the rank of the target's token for a number in [0, 1); from `CANDIDATES` on it is no candidate."""
        return int(log(1 - chance) / log(1 - self.acceptance)) if self.acceptance < 1 else 0


class AgreeingSession(DraftRows, DraftSession):
    """The draft at work: a `Source` on the CPU."""

    device = torch.device("cpu")
    roots: Sequence[int]  # per row, its last committed token in this step

    def __init__(self, context: DraftContext, agreeing: Agreeing) -> None:
        super().__init__(context)
        self.agreeing = agreeing

    def source(self, roots: Sequence[int]) -> Source:
        """Return the session itself."""
        self.roots = roots
        return self

    def commit(
        self,
        tokens: Sequence[Sequence[int] | None],
        states: Sequence[Tensor | None] = (),
        scored: Sequence[Scored] = (),
    ) -> None:
        """Take note of what each row committed; None retires the row."""
        self.advance(tokens)

    def top(self, frontier: Frontier, k: int) -> tuple[Tensor, Tensor]:
        """Return each node's candidates and their log-probabilities, both (B, W, k or fewer)."""
        config, a = self.agreeing.config, self.agreeing.acceptance
        above = torch.tensor(self.roots)[:, None] if frontier.depth == 0 else frontier.tokens
        others = torch.arange(1, CANDIDATES + 1)
        ranks = [self._rank(row, frontier.depth) for row in range(self.batch)]
        offsets = torch.stack([torch.cat((others[:rank], others[:1] * 0, others[rank:])) for rank in ranks])
        tokens = (following(config, above)[..., None] + offsets[:, None, :CANDIDATES]) % config.vocab_size
        q = torch.tensor([max(a * (1 - a) ** rank, 1e-9) for rank in range(CANDIDATES)]).expand_as(tokens)
        return tokens[..., :k], q.log()[..., :k]

    def _rank(self, row: int, depth: int) -> int:
        """Return the rank of the target's token after the nodes of a depth."""
        return self.agreeing.rank(uniform(key(self.seeds[row], DRAFT, self.lengths[row] + depth), 0))
