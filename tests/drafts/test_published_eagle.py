"""Published EAGLE heads: every format against its formulas in plain torch, ids, conventions, what is refused."""

import json
import random
from functools import cache
from math import pi

import pytest
import torch
from conftest import PROMPTS, VOCAB, ends, tiny_llama
from safetensors.torch import save_file
from torch.nn import functional

from specinfer import BestFirst, Chain, Expansion, Sampled, SpeculativeDecoder, check_draft
from specinfer.attention import TreeModel, running
from specinfer.drafts.depths import LatticeSession
from specinfer.drafts.lookup.ngram import NGramDraft
from specinfer.drafts.published.conventions import Convention
from specinfer.drafts.published.eagle3 import Eagle3Network
from specinfer.drafts.published.formats import load_published, may_be_head
from specinfer.drafts.published.layers import network_config
from specinfer.drafts.unrolled import unrolled_logits
from specinfer.engine.draft import DraftContext
from specinfer.engine.processors import Processors
from specinfer.errors import ModelError
from specinfer.evaluation.doctor import pass_costs
from specinfer.tree import Chain as Bare
from specinfer.tree import Frontier, Kind, Policy

LAYERS, SIZE = 6, 32  # of the target
FORMATS = ("eagle3", "speculators", "eagle", "peagle")
PLAIN = {  # the configuration of a head with nothing special
    "target_hidden_size": SIZE,
    "num_aux_layers": 3,
    "layer_ids": None,
    "layer_shift": 0,
    "fc": True,
    "fc_bias": False,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_before_residual": None,
    "norm_output": None,
    "qkv_bias": False,
    "qk_norm": False,
}


@pytest.fixture(scope="module")
def target():
    return tiny_llama(num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def small(target):
    """The target in float32."""
    return tiny_llama(num_hidden_layers=LAYERS).float()


# ---- random checkpoints ----


def random_head(kind, seed):
    """A checkpoint's configuration, its weights under plain names, and what the formulas need to know of it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    eagle1, parallel = kind == "eagle", kind == "peagle"
    size = SIZE if eagle1 else rng.choice([SIZE, 24])
    heads, kv, head_dim, wide = 4, rng.choice([1, 2, 4]), rng.choice([size // 4, 12]), rng.choice([40, 48])
    states = 1 if eagle1 else rng.choice([3, 3, 3, 2] if parallel or kind == "speculators" else [3, 3, 2, 1])
    reduced = not eagle1 and (size != SIZE or rng.random() < 0.6)
    words = rng.choice([96, 132]) if reduced else VOCAB
    layers = rng.choice([1, 1, 2])
    config = {"hidden_size": size, "intermediate_size": wide, "num_attention_heads": heads, "num_key_value_heads": kv}
    config |= {"head_dim": head_dim, "num_hidden_layers": layers, "vocab_size": VOCAB, "rms_norm_eps": 1e-5}
    config |= {"max_position_embeddings": 256, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    config |= rng.choice(ROPES)
    top = {} if eagle1 else {"target_hidden_size": SIZE}
    if not eagle1 and (reduced or rng.random() < 0.5):
        top["draft_vocab_size"] = words if reduced or rng.random() < 0.5 else None

    def matrix(rows, columns):
        return torch.randn(rows, columns) * columns**-0.5

    def scale(width):
        return 1 + 0.3 * torch.randn(width)

    w = {"fc.weight": matrix(size, 2 * size if eagle1 else states * SIZE)}
    qk, bias = not eagle1 and rng.random() < 0.4, rng.choice(["none", "qkv", "all"])
    for i in range(layers):
        at, width = f"layers.{i}.", size if eagle1 or i else 2 * size
        for name, rows, columns in (
            *(("q", heads * head_dim, width), ("k", kv * head_dim, width), ("v", kv * head_dim, width)),
            ("o", size, heads * head_dim),
        ):
            w[f"{at}self_attn.{name}_proj.weight"] = matrix(rows, columns)
            if bias != "none" and (name != "o" or (bias == "all" and not eagle1)):
                w[f"{at}self_attn.{name}_proj.bias"] = 0.3 * torch.randn(rows)
        if qk:
            w |= {f"{at}self_attn.{name}_norm.weight": scale(head_dim) for name in "qk"}
        norms = ["post_attention_layernorm"] + ["input_layernorm"] * (not eagle1 or i > 0)
        norms += ["hidden_norm"] * (not eagle1 and i == 0)
        w |= {f"{at}{name}.weight": scale(size) for name in norms}
        for name, rows, columns in (("gate", wide, size), ("up", wide, size), ("down", size, wide)):
            w[f"{at}mlp.{name}_proj.weight"] = matrix(rows, columns)
    if size != SIZE or rng.random() < 0.4:
        w["embed_tokens.weight"] = torch.randn(VOCAB, size)
    if eagle1:
        if rng.random() < 0.5:
            config["bias"] = False
        else:
            w["fc.bias"] = torch.randn(size)
        return config, w
    w["norm.weight"] = scale(size)
    if size != SIZE or reduced or rng.random() < 0.5:
        w["lm_head.weight"] = matrix(words, size) * 3
    if reduced:
        ids = torch.tensor(sorted(rng.sample(range(VOCAB), words)))
        w["d2t"] = ids - torch.arange(words)
        w["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    if rng.random() < 0.3:
        w["fc.bias"] = torch.randn(size)
    if rng.random() < 0.4:
        w |= {f"fc_norm.{i}.weight": scale(SIZE) for i in range(states)}
        top |= {"fc_norm": True, "norm_output": rng.random() < 0.5}
    if rng.random() < 0.4:
        w["input_norm.weight"] = scale(states * SIZE)
        top["norm_before_fc"] = True
    if rng.random() < 0.5:
        top["norm_before_residual"] = rng.random() < 0.5
    if parallel:
        w["mask_hidden"] = torch.randn(*rng.choice([(1,), (1, 1)]), states * SIZE)
        top[rng.choice(["mask_token_id", "pard_token", "ptd_token_id"])] = rng.randrange(VOCAB)
    if states == 1:
        top["eagle_config"] = {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}
        if size == SIZE and "fc.bias" not in w and rng.random() < 0.5:
            del w["fc.weight"]
    else:
        ids = {"eagle_aux_hidden_state_layer_ids": sorted(rng.sample(range(1, 5), states))}
        top |= rng.choice([ids, {"eagle_config": ids}, {"target_layer_ids": ids["eagle_aux_hidden_state_layer_ids"]}])
    if kind == "speculators" or (parallel and rng.random() < 0.5):
        methods = [{"proposal_type": "greedy", "speculative_tokens": 5}]
        top |= {"speculators_model_type": "peagle" if parallel else "eagle3", "model_type": "speculator_model"}
        top |= {"speculators_config": {"proposal_methods": methods}, "architectures": ["Eagle3Speculator"]}
        config = {"transformer_layer_config": config | ({"model_type": "qwen3"} if qk else {})}
    return config | top, w


ROPES = (
    {},
    {"rope_theta": 5000.0, "rope_scaling": None},
    {"rope_theta": 20000, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 3000.0}},
    {
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
)


def write(folder, config, weights, seed=0):
    """Write a checkpoint under the names that writers use."""
    rng = random.Random(seed)
    first, prefix = rng.choice(["midlayer.", "layers.0."]), rng.choice(["", "model."])
    if "layers.0.hidden_norm.weight" not in weights:
        first = "layers.0."
    more = "additional_layers.0." if first == "midlayer." else "layers.1."
    kept = ("d2t", "t2d", "lm_head.weight")
    names = {n: n.replace("layers.0.", first).replace("layers.1.", more) for n in weights}
    named = {names[n] if n in kept else prefix + names[n]: value.contiguous() for n, value in weights.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if rng.random() < 0.3:
        torch.save(named, folder / "pytorch_model.bin")
    else:
        save_file(named, folder / "model.safetensors")
    return folder


# ---- the formulas, in plain torch ----


def rms(x, weight, eps=1e-5):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def frequencies(config, dim):
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta") or rope.get("rope_theta") or 10000.0
    found = theta ** (-torch.arange(0, dim, 2).double() / dim)
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "linear":
        return found / rope["factor"]
    if kind == "llama3":  # long waves are stretched, short ones are not, those between in part
        waves, length = 2 * pi / found, rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        part = ((length / waves - low) / (high - low)).clamp(0, 1)
        return part * found + (1 - part) * found / rope["factor"]
    return found


def attend(read, w, at, config):
    """Causal attention of (T, width) states, with rotary positions 0, 1, ..."""
    heads, kv, dim = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def project(name, x, count):
        flat = x @ w[f"{at}{name}_proj.weight"].T + w.get(f"{at}{name}_proj.bias", 0)
        split = flat.view(len(x), count, dim)
        scale = w.get(f"{at}{name}_norm.weight")
        return split if scale is None else rms(split, scale)

    angles = torch.arange(len(read))[:, None, None] * frequencies(config, dim)
    cos, sin = angles.cos().float(), angles.sin().float()

    def turned(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    q, k, v = turned(project("q", read, heads)), turned(project("k", read, kv)), project("v", read, kv)
    k, v = (x.repeat_interleave(heads // kv, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
    scores = scores.masked_fill(torch.ones(len(read), len(read)).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    return mixed @ w[f"{at}o_proj.weight"].T + w.get(f"{at}o_proj.bias", 0)


def gated(x, w, at):
    gate, up, down = (w[f"{at}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


class Formulas:
    """A head by its formulas: states that were fused, and what it makes of columns (state, token)."""

    def __init__(self, config, w, target, options=()):
        self.config = config.get("transformer_layer_config", config)
        self.w, self.options, self.eagle1 = w, dict(options), "norm.weight" not in w
        self.embedding = w.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
        self.output = w.get("lm_head.weight", target.get_output_embeddings().weight.detach())

    def fused(self, states):
        """One state of (n, K, Ht)."""
        w = self.w
        if self.eagle1:
            return states[:, 0]
        if "fc_norm.0.weight" in w:
            states = torch.stack([rms(states[:, i], w[f"fc_norm.{i}.weight"]) for i in range(states.shape[1])], 1)
        flat = states.flatten(1)
        flat = rms(flat, w["input_norm.weight"]) if "input_norm.weight" in w else flat
        return flat @ w["fc.weight"].T + w.get("fc.bias", 0) if "fc.weight" in w else flat

    def run(self, states, tokens):
        """The head's states (T, H) of columns: states (T, H), and tokens."""
        w, e = self.w, self.embedding[torch.tensor(tokens)]
        x = torch.cat((e, states), 1) @ w["fc.weight"].T + w.get("fc.bias", 0) if self.eagle1 else states
        for i in range(self.config["num_hidden_layers"]):
            at = f"layers.{i}."
            read = x if self.eagle1 and not i else rms(x if i else e, w[f"{at}input_layernorm.weight"])
            if not self.eagle1 and not i:
                normed = rms(x, w[f"{at}hidden_norm.weight"])
                read = torch.cat((read, normed), 1)
                x = normed if self.options["norm_before_residual"] else x
            x = x + attend(read, w, f"{at}self_attn.", self.config)
            x = x + gated(rms(x, w[f"{at}post_attention_layernorm.weight"]), w, f"{at}mlp.")
        return rms(x, w["norm.weight"]) if self.options.get("norm_output") else x

    def logits(self, state):
        """Logits of what follows the head's states (..., H)."""
        normed = self.eagle1 or self.options["norm_output"]
        return (state if normed else rms(state, self.w["norm.weight"])) @ self.output.T

    def after(self, states, text, paths):
        """Logits after paths (parents first) below a text; states (n - 1, K, Ht) chose all its tokens but the first."""
        columns, found = {(): (self.fused(states), [*text[1:]])}, []
        for path in map(tuple, paths):
            if path:
                above, tokens = columns[path[:-1]]
                columns[path] = above, [*tokens, path[-1]]
            given, tokens = columns[path]
            made = self.run(given, tokens)
            columns[path] = torch.cat((given, made[-1:])), tokens
            found.append(self.logits(made[-1]))
        return torch.stack(found)


def same(found, wanted):
    """Whether logits agree to 1e-5 of the largest of them, in float32."""
    return float((found - wanted).abs().max()) <= 1e-5 * max(1.0, float(wanted.abs().max()))


# ---- every node ----


class Asked(Policy):
    """A policy that asks for levels of made-up nodes, and keeps the logits: it grows bare roots."""

    kind, max_nodes, max_depth = Kind.RANKED, 16, 4
    parents = ([0, 0, 0], [1, 1, 3, 2], [5, 4, 7])  # by level; 0 = the root

    def __init__(self, seed):
        self.rng, self.paths, self.logits = random.Random(seed), [], []

    def grow(self, source, max_depth=None):
        """Ask about the root, then level by level."""
        rows = range(source.batch)
        one = torch.full((source.batch, 1), -1)
        self.logits = [source.logits_after(Frontier(one, one, one < 0, 0))]
        self.paths = [[[]] for _ in rows]
        for depth, parents in enumerate(self.parents, 1):
            tokens = [[self.rng.randrange(VOCAB) for _ in parents] for _ in rows]
            for paths, new in zip(self.paths, tokens, strict=True):
                paths += [[*paths[parent], token] for parent, token in zip(parents, new, strict=True)]
            above = torch.tensor([parents] * source.batch)
            self.logits.append(source.logits_after(Frontier(torch.tensor(tokens), above, above >= 0, depth)))
        return Bare(0).grow(source)


def context(target, prompts, layers, vocab=VOCAB):
    """What a session is told of prompts, with the states of more layers than the draft's."""
    every = sorted({0, *layers})
    states = [states_of(target, row, every)[:-1] if len(row) > 1 else None for row in prompts]
    seeds = [0] * len(prompts)
    return DraftContext(prompts, 300, 300, vocab, 0, Processors([]), seeds, aux_layers=every, states=states)


def states_of(target, ids, layers):
    """The target's states (n, K, Ht) of some layers at each token."""
    hidden = every_state(target, tuple(ids))
    return torch.stack([hidden[layer][0] for layer in layers], 1)


@cache
def every_state(target, ids):
    with torch.no_grad():
        return target(torch.tensor([ids]), output_hidden_states=True).hidden_states


def steps(draft, target, policy, texts):
    """Open a session, propose, commit tokens in ragged numbers, propose again: yields after each proposal."""
    told = context(target, [list(text) for text in texts], draft.aux_layers)
    session = draft.open(told)
    with running(draft.model):
        session.propose(policy, ends(told.prompts), 8)
        yield session
        new = [[7, 200], [3], [9, 9, 9, 1]]
        for text, more in zip(texts, new, strict=True):
            text += more
        chose = [
            states_of(target, text, told.aux_layers)[-len(more) - 1 : -1] for text, more in zip(texts, new, strict=True)
        ]
        session.commit(new, chose)
        session.propose(policy, ends(texts), 8)
        yield session


def loaded(kind, seed, folder, target):
    """A random checkpoint as an attached draft under one of its conventions, and its formulas."""
    config, weights = random_head(kind, seed)
    path = write(folder / "head", config, weights, seed)
    rules = load_published(path).network.conventions(LAYERS)
    rule = random.Random(seed).choice(rules)
    draft = load_published(path, rule).attach(TreeModel(target))
    return draft, Formulas(config, weights, target, rule.options)


TEXTS = ([5, 9, 17, 5, 9], [100, 7], list(range(40, 76)))  # the last is prefilled


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["eagle3", "speculators", "eagle"])
def test_every_node_of_a_tree_is_what_the_formulas_say(small, tmp_path, kind, seed):
    """Root, siblings, grandchildren; ragged rows; again after a commit."""
    draft, formulas = loaded(kind, seed, tmp_path, small)
    ids = draft.network.token_ids
    assert (ids is None) == ("d2t" not in formulas.w)
    texts, policy = [list(text) for text in TEXTS], Asked(seed)
    for _ in steps(draft, small, policy, texts):
        for row, text in enumerate(texts):
            found = torch.cat([level[row] for level in policy.logits])
            states = states_of(small, text, draft.aux_layers)[:-1]
            assert same(found, formulas.after(states, text, policy.paths[row]))


@pytest.mark.parametrize("seed", range(20))
def test_all_depths_of_p_eagle_are_what_the_formulas_say(small, tmp_path, seed):
    draft, formulas = loaded("peagle", seed, tmp_path, small)
    texts, w = [list(text) for text in TEXTS], formulas.w
    mask, depth = draft.network.mask_token_id, draft.network.depth
    for session in steps(draft, small, BestFirst(8, 8), texts):
        assert isinstance(session, LatticeSession)
        for logits, text in zip(session.logits, texts, strict=True):
            states = states_of(small, text, draft.aux_layers)[:-1]
            masked = w["mask_hidden"].view(1, -1, SIZE).expand(depth - 1, -1, -1)
            hidden = formulas.run(formulas.fused(torch.cat((states, masked))), [*text[1:], *[mask] * (depth - 1)])
            assert same(logits, formulas.logits(hidden[-depth:]))
        assert session.passes in (1, 2)


@pytest.mark.parametrize("kind", FORMATS)
def test_trees_hold_tokens_of_the_heads_vocabulary(small, tmp_path, kind):
    """Offsets of d2t count; the whole tree's scores are the formulas'."""
    seed = next(seed for seed in range(20) if kind == "eagle" or "d2t" in random_head(kind, seed)[1])
    draft, formulas = loaded(kind, seed, tmp_path, small)
    ids = torch.arange(VOCAB) if kind == "eagle" else formulas.w["d2t"] + torch.arange(len(formulas.w["d2t"]))
    with running(draft.model):
        (tree,) = draft.open(context(small, [[5, 9, 17]], draft.aux_layers)).propose(Expansion((4,)), [17], 1)
    wanted = formulas.after(states_of(small, [5, 9], draft.aux_layers), [5, 9, 17], [[]])[0].log_softmax(-1)
    assert set(tree.tokens[1:].tolist()) == set(ids[wanted.topk(4).indices].tolist())
    for token, score in zip(tree.tokens[1:].tolist(), tree.scores[1:].tolist(), strict=True):
        assert score == pytest.approx(float(wanted[ids == token]), abs=1e-4)


# ---- ids do not depend on drafts ----


@pytest.fixture(scope="module")
def alone(target):
    """Texts without drafts, greedy and sampled."""
    plain = SpeculativeDecoder(target, None, [], None)
    return [[row.token_ids for row in plain.generate(PROMPTS, temperature=t, **WRITTEN)] for t in (0, 1)]


WRITTEN = {"max_new_tokens": 10, "seed": [3, 4, 5, 6]}


@pytest.mark.parametrize("tree", [BestFirst(12, 4), Sampled((3, 2)), "auto"], ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_ids_do_not_depend_on_published_heads(target, alone, tmp_path, kind, tree):
    config, weights = random_head(kind, 3)
    path = write(tmp_path / "head", config, weights)
    rule = load_published(path).network.conventions(LAYERS)[0]
    decoder = SpeculativeDecoder(target, None, [load_published(path, rule), NGramDraft()], tree)
    for temperature in (0,) if isinstance(tree, Sampled) else (0, 1):
        batch = decoder.generate(PROMPTS, temperature=temperature, **WRITTEN)
        assert [row.token_ids for row in batch] == alone[temperature]
        row = decoder.generate(PROMPTS[2], max_new_tokens=10, temperature=temperature, seed=5)
        assert row.token_ids == alone[temperature][2]


# ---- conventions ----


def corpus(target):
    """What a target writes by itself after every token, and the states that chose its tokens: all layers'."""
    ids = target.generate(torch.arange(1, 6)[:, None], max_new_tokens=40, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        hidden = target(ids, output_hidden_states=True).hidden_states
    return ids, torch.stack(hidden, 2)


def taught(target, text, rule, count=60, **fields):
    """A head trained a little on a target's own text, under a convention."""
    sizes = {"hidden_size": SIZE, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    more = {"num_hidden_layers": 1, "vocab_size": VOCAB, "max_position_embeddings": 256}
    config = network_config(**{**PLAIN, **sizes, **more, **fields})
    head = Eagle3Network(config, outputs=True).bind(target).requires_grad_(True)
    for name, value in rule.options:
        setattr(head, name, value)
    for name, weight in head.named_parameters():
        if "norm" in name:  # where all are 1, a norm after a norm changes nothing
            weight.data += torch.rand_like(weight) * 2 - 0.5
    ids, states = text[0][:, 1:], text[1][:, :-1, list(rule.aux_layers)]
    optimizer = torch.optim.AdamW([w for w in head.parameters() if w.requires_grad], lr=4e-3)
    wanted = ids[:, 1:].flatten()
    every = torch.arange(len(wanted))
    for _ in range(count):
        made = unrolled_logits(head, ids, states, every, 3)
        losses = [functional.cross_entropy(logits, wanted) for logits in made]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
    return head.requires_grad_(False)


@pytest.fixture(scope="module")
def text(small):
    return corpus(small)


IDS = [1, 2, 4]


def checkpoint(head):
    """The configuration, which does not name layers, and the weights of a head."""
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    config = {name: getattr(head.config, name) for name in sizes} | {"max_position_embeddings": 256}
    config |= {"rms_norm_eps": head.config.rms_norm_eps}
    return config, {name: w for name, w in head.state_dict().items() if not name.startswith("output.")}


@pytest.mark.parametrize(("shift", "before", "output"), [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_the_measured_convention_is_the_one_a_head_was_trained_under(small, text, tmp_path, shift, before, output):
    """Of eight; the checkpoint says nothing but its layers, in SGLang's and in vLLM's way."""
    layers = tuple(i + shift for i in IDS)
    rule = Convention(layers, (("norm_before_residual", bool(before)), ("norm_output", bool(output))))
    config, weights = checkpoint(taught(small, text, rule))
    config |= {"eagle_aux_hidden_state_layer_ids": IDS} if before else {"target_layer_ids": IDS}
    draft = load_published(write(tmp_path / "head", config, weights)).attach(TreeModel(small))
    assert draft.convention == rule
    assert len(draft.agreements) == 8
    assert draft.agreements[0][1][0] > 0.5
    decoder = SpeculativeDecoder(small, None, [draft], Chain(3))
    result = decoder.generate([3], max_new_tokens=30, temperature=0)
    assert result.token_ids == text[0][2, 1:31].tolist()
    assert len(result.steps) < 20


@pytest.fixture(scope="module")
def fitting(small, text):
    """A head that knows the text, under the usual convention."""
    return taught(small, text, Convention((2, 3, 5), ()))


@pytest.mark.parametrize("damaged", [False, True])
def test_the_check_of_drafts_says_how_a_head_fits(small, fitting, tmp_path, monkeypatch, damaged):
    """Its convention comes first; a head whose last norm is lost is bad, and refused where nobody checks it."""
    for name in ("STEPS", "ROUNDS"):  # no test reads times
        monkeypatch.setattr(pass_costs, name, 1)
    config, weights = checkpoint(fitting)
    if damaged:
        weights["norm.weight"] = weights["norm.weight"] * torch.linspace(-2, 2, SIZE)
    path = write(tmp_path / "head", config | {"target_layer_ids": IDS}, weights)
    draft = load_published(path)
    draft.least = 0.0
    decoder = SpeculativeDecoder(small, drafts=[draft])
    (check,) = check_draft(decoder, [[3], [4], [5]], max_new_tokens=16).drafts
    assert (check.grade == "bad") == ("does not fit this target" in check.words) == damaged
    assert len(check.agreements) == 8
    if damaged:
        with pytest.raises(ModelError, match="does not fit this target"):
            SpeculativeDecoder(small, drafts=[load_published(path)])
    else:
        assert check.agreements[0][0].startswith("states 2, 3, 5")


def test_a_head_that_fits_under_no_convention_is_refused_with_numbers(small, tmp_path):
    config, weights = random_head("eagle3", 0)
    with pytest.raises(ModelError, match=r"does not fit this target.*(\d+ %.*){5}") as refused:
        load_published(write(tmp_path / "head", config, weights)).attach(TreeModel(small))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("more", "first", "last"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, (2, 3, 5), (1, 2, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}}, (0, 2, 3), (1, 3, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, (1, 2, 4), (2, 3, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, (1, 2, 5), (1, 2, 5)),  # the sixth is after the final norm
        ({"target_layer_ids": [1, 2, 4]}, (2, 3, 5), (1, 2, 4)),
        ({"dflash_config": {"target_layer_ids": [1, 2, 4]}}, (2, 3, 5), (1, 2, 4)),
        ({}, (2, 3, 3), (2, 3, 3)),
    ],
)
def test_layers_are_read_as_each_format_counts_them(tmp_path, more, first, last):
    found = load_published(write(tmp_path / "head", plain_head()[0] | more, plain_head()[1]))
    rules = found.network.conventions(LAYERS)
    assert (rules[0].aux_layers, rules[-1].aux_layers) == (first, last)
    assert rules[0].options == (("norm_before_residual", False), ("norm_output", False))


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({}, {(False, False), (False, True), (True, False), (True, True)}),
        ({"norm_before_residual": True}, {(True, False), (True, True)}),
        ({"norm_output": False}, {(False, False), (True, False)}),
        ({"norm_output": True}, {(False, False), (False, True), (True, False), (True, True)}),  # SpecForge's default
    ],
)
def test_conventions_that_a_checkpoint_states_are_not_measured(tmp_path, more, options):
    config, weights = plain_head()
    rules = load_published(write(tmp_path / "head", config | more, weights)).network.conventions(LAYERS)
    assert {tuple(value for _, value in rule.options) for rule in rules} == options


# ---- what is refused ----


def plain_head():
    """An EAGLE-3 head whose vocabulary is reduced, and nothing special."""
    config = network_config(
        **PLAIN,
        hidden_size=SIZE,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        vocab_size=VOCAB,
        max_position_embeddings=256,
    )
    ids = torch.arange(0, VOCAB, 2)
    weights = {n: w for n, w in Eagle3Network(config, ids, outputs=True).state_dict().items() if n != "token_ids"}
    weights |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.arange(VOCAB) % 2 == 0}
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    fields = {name: getattr(config, name) for name in names}
    return fields | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(ids)}, weights


def without(*names):
    return lambda config, weights: [weights.pop(name) for name in names]


def cast(name, dtype):
    return lambda config, weights: weights.update({name: weights[name].to(dtype)})


def saying(**fields):
    return lambda config, weights: config.update(fields)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (without("norm.weight", "fc.weight"), r"2 missing \(fc.weight; norm.weight\)"),
        (without("d2t", "t2d"), "draft_vocab_size is 132, but its d2t does not name as many"),
        (without("d2t"), "t2d, a reduced vocabulary, but no d2t"),
        (lambda config, weights: weights.update(extra=torch.ones(1)), r"1 unknown \(extra\)"),
        (lambda config, weights: weights["d2t"].add_(200), "d2t does not give different ids below 264"),
        (lambda config, weights: weights["t2d"].logical_not_(), "d2t and t2d name different tokens"),
        (lambda config, weights: weights["fc.weight"].fill_(torch.nan), "fc.weight holds numbers that are not finite"),
        (saying(intermediate_size=41), "3 of another shape"),
        (saying(hidden_size=None), "hidden_size is None"),
        (saying(num_attention_heads="four"), "num_attention_heads is 'four'"),
        (saying(rope_scaling={"rope_type": "longrope"}), "'longrope'"),
        (saying(layer_types=["sliding_attention"]), "do not attend to all tokens"),
        (saying(norm_before_residual="yes"), "norm_before_residual is 'yes'"),
        (saying(eagle_config={"eagle_aux_hidden_state_layer_ids": "1,2"}), "layers that it reads are '1,2'"),
        (saying(transformer_layer_config={"model_type": "mixtral"}), "layers are not those of llama or qwen3"),
        (saying(fc_norm=True), r"3 missing \(fc_norm.0.weight"),
        (saying(speculators_model_type="peagle"), r"mask_hidden"),
        *(
            (saying(**{name: value}), "it is damaged")  # whatever reads a value of a wrong type
            for name, value in {
                "eagle_config": [1],
                "rope_scaling": 4,
                "rope_parameters": {"rope_type": []},
                "layer_types": 1,
                "rms_norm_eps": "x",
                "num_attention_heads": 3,
                "intermediate_size": 1 << 63,
            }.items()
        ),
        (cast("fc.weight", torch.int32), r"1 of another type \(fc.weight is torch.int32\)"),
        (cast("norm.weight", torch.float8_e4m3fn), r"1 of another type \(norm.weight is torch.float8_e4m3fn\)"),
    ],
)
def test_what_does_not_fit_the_format_is_one_line_that_names_it(tmp_path, damage, match):
    config, weights = plain_head()
    damage(config, weights)
    refuses(lambda: load_published(write(tmp_path / "head", config, weights)), match)


@pytest.mark.parametrize("rope", [{"rope_theta": "x"}, {"rope_scaling": {"rope_type": "linear", "factor": []}}])
def test_rotary_embeddings_that_cannot_be_computed_are_one_line(small, tmp_path, rope):
    config, weights = plain_head()
    head = load_published(write(tmp_path / "head", config | rope, weights))
    refuses(lambda: head.attach(TreeModel(small)), "rotary embeddings cannot be computed")


@pytest.mark.parametrize("architectures", [1, "LlamaForCausalLM", [None], {}])
def test_architectures_that_are_no_list_name_no_other_format(tmp_path, architectures):
    config, weights = plain_head()
    config["architectures"] = architectures
    folder = write(tmp_path / "head", config, weights)
    assert isinstance(load_published(folder).network, Eagle3Network)
    assert may_be_head(config)


def refuses(load, match):
    with pytest.raises(ModelError, match=match) as refused:
        load()
    assert "\n" not in str(refused.value)


def test_damaged_files_and_code_in_pickles_are_one_line(tmp_path):
    config, weights = plain_head()
    folder = write(tmp_path / "head", config, weights)
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.bin")):
        file.write_bytes(file.read_bytes()[:-100])
    refuses(lambda: load_published(folder), "cannot read the weights in")
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.bin")):
        file.unlink()
    torch.save({"fc.weight": Harmful()}, folder / "pytorch_model.bin")
    refuses(lambda: load_published(folder), "cannot read the weights in .*pytorch_model.bin")
    assert not Harmful.ran


class Harmful:
    """What a pickle with code would run."""

    ran = False

    def __reduce__(self):
        return (harm, ())


def harm():
    Harmful.ran = True


def test_heads_of_another_target_are_refused(small, tmp_path):
    config, weights = plain_head()
    draft = load_published(write(tmp_path / "head", config, weights))
    refuses(lambda: draft.attach(TreeModel(tiny_llama(hidden_size=64))), "hidden_size 32, not 64")
    refuses(lambda: draft.attach(TreeModel(tiny_llama(vocab=300))), "vocab_size 264, not 300")
    config["eagle_aux_hidden_state_layer_ids"] = [2, 4, 6]
    draft = load_published(write(tmp_path / "head", config, weights))
    refuses(lambda: draft.attach(TreeModel(small)), "2, 4, 6 of a target with 6.*before the final norm")


@pytest.mark.parametrize("token", [None, VOCAB, "<mask>"])
def test_p_eagle_without_a_masked_token_is_refused(tmp_path, token):
    config, weights = plain_head()
    weights["mask_hidden"] = torch.zeros(1, 1, 3 * SIZE)
    folder = write(tmp_path / "head", config | {"mask_token_id": token}, weights)
    refuses(lambda: load_published(folder), "mask_token_id is .* not the id of a token")


def test_a_norm_in_an_eagle_head_is_refused(tmp_path):
    """Some writers add norms that EAGLE does not have; left out, they would draft badly and say nothing."""
    config, weights = random_head("eagle", 0)
    weights["layers.0.input_layernorm.weight"] = torch.ones(SIZE)
    refuses(lambda: load_published(write(tmp_path / "head", config, weights)), "1 unknown .*input_layernorm")
