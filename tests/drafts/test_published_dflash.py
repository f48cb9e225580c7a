"""Published block heads: every format against its formulas in plain torch, identity of ids, what cannot be loaded."""

import json
from math import prod
from random import Random

import pytest
import torch
from conftest import PROMPTS, VOCAB, tiny_llama
from safetensors.torch import save_file
from torch.nn import functional

from specinfer import BestFirst, Chain, Expansion, Sampled, SpeculativeDecoder
from specinfer.attention import TreeModel
from specinfer.attention.compiler.making import make
from specinfer.drafts.lookup.ngram import NGramDraft
from specinfer.drafts.published import dflash
from specinfer.drafts.published.checkpoint import Checkpoint
from specinfer.drafts.published.conventions import Convention
from specinfer.drafts.published.dflash_network import DFlashNetwork
from specinfer.drafts.published.formats import PublishedDraft, load_published
from specinfer.drafts.published.layers import network_config
from specinfer.engine.draft import DraftContext
from specinfer.engine.processors import Processors
from specinfer.errors import ModelError, NotCompiled

LAYERS, SIZE = 4, 32  # of the target
PLAIN = {  # the configuration of a head with nothing special
    "layer_types": ["full_attention"],
    "causal_types": (),
    "target_size": SIZE,
    "layer_offset": 1,
    "from_anchor": False,
    "measured_anchor": False,
    "input_scale": 1.0,
    "output_scale": 1.0,
    "softcap": None,
    "qkv_bias": False,
    "qk_norm": True,
}
LONG = [(7 * i) % 250 for i in range(70)]  # more than is fed with a block
KINDS = (
    "z-lab",
    "z-lab sliding",
    "jetspec",
    "speculators",
    "dflash2",
    "dspark vanilla",
    "dspark gated",
    "dspark rnn",
    "dspark none",
    "speculators dspark",
    "domino",
)


@pytest.fixture(scope="module")
def target():
    return tiny_llama(3, num_hidden_layers=LAYERS)


# ---- random checkpoints ----


def random_config(kind, rng):
    """A configuration as its trainers write it, and what follows from it: states read, causal types, first slot."""
    layers, ids = rng.choice([1, 2]), sorted(rng.sample(range(LAYERS), rng.choice([1, 2, 3])))
    sizes = {
        "hidden_size": SIZE,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": rng.choice([1, 2, 4]),
        "head_dim": rng.choice([6, 8]),
        "max_position_embeddings": 256,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "attention_bias": rng.random() < 0.3,
        "rope_theta": rng.choice([100.0, 10000.0]),
        "model_type": "qwen3",
    }
    special = {"mask_token_id": rng.randrange(VOCAB), "target_layer_ids": ids}
    block, states = rng.choice([3, 4, 5]), [i + 1 for i in ids]
    fact = {"states": states, "causal": ["sliding_attention"], "anchor": False, "block": block, "layers": layers}
    config = {"architectures": ["DFlashDraftModel"], "block_size": block, **sizes, "dflash_config": special}
    if "sliding" in kind or (kind == "dflash2" and rng.random() < 0.5):
        types = [rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
        types[0] = "sliding_attention"
        config |= {"use_sliding_window": True, "sliding_window": rng.choice([5, 9]), "layer_types": types}
        if rng.random() < 0.3:
            config["is_causal"] = rng.random() < 0.5
            fact["causal"] = ["sliding_attention", "full_attention"] if config["is_causal"] else []
    if kind == "z-lab":
        if rng.random() < 0.4:  # the layers follow from the target's depth
            del special["target_layer_ids"]
            config["num_target_layers"] = LAYERS
            fact["states"] = [3] if layers == 1 else [2, 2]
        if rng.random() < 0.5:
            special |= {"input_embedding_scale": 1.5, "output_multiplier": 0.7, "final_logit_softcapping": 9.0}
    elif kind == "jetspec":
        special[rng.choice(["causal", "causal_head"])] = True
        fact["causal"] = ["sliding_attention", "full_attention"]
    elif kind == "dflash2":
        special |= {"conv_kernel_size": rng.choice([2, 3]), "conv_group_size": rng.choice([8, 16])}
        special |= {"selector_rank": 6, "selector_top_k": rng.choice([4, 16]), "block_size": block}
        config["architectures"] = ["DFlash2DraftModel"]
    elif kind == "domino":
        shift = rng.random() < 0.5
        special |= {"projector_type": "domino", "emb_dim": 6, "gru_hidden_dim": 7, "shift_label": shift}
        special["pure_draft_prefix_len"] = rng.choice([0, 1, 2])
        config["architectures"] = ["DominoDraftModel"]
        fact["anchor"] = shift
    elif kind.startswith("dspark"):  # as DeepSpec writes it: no dflash_config
        rank = 0 if kind.endswith("none") else 6
        markov = {
            "markov_rank": rank,
            "markov_head_type": kind.split()[1],
            "enable_confidence_head": rng.random() < 0.5,
        }
        markov = markov if rank else {"markov_rank": 0, "enable_confidence_head": False}
        config = {**sizes, **special, **markov, "architectures": ["Qwen3DSparkModel"], "block_size": block}
        config["confidence_head_with_markov"] = bool(rank) and rng.random() < 0.5
        if rng.random() < 0.5:  # SpecForge's form
            config["dflash_config"] = {name: config.pop(name) for name in (*special, *markov)}
            config["dflash_config"] |= {"projector_type": "dspark", "sample_from_anchor": True}
        fact["anchor"] = True
    elif kind.startswith("speculators"):
        special = {"mask_token_id": special["mask_token_id"], "aux_hidden_state_layer_ids": ids}
        config = {"speculators_model_type": "dflash", "transformer_layer_config": sizes, "block_size": block, **special}
        fact["states"] = ids
        if kind.endswith("dspark"):
            config |= {"speculators_model_type": "dspark", "markov_rank": 5}
            fact["anchor"] = True
            if rng.random() < 0.3:
                config["sample_from_anchor"] = fact["anchor"] = False
    return config, fact


def option(config, name, default=None):
    return config.get("dflash_config", {}).get(name, config.get(name, default))


def random_weights(config, fact, rng):
    """Weights under the names that their trainers give them."""
    sizes = config.get("transformer_layer_config", config)
    heads, keys, dim = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    shapes = {"fc.weight": (SIZE, len(fact["states"]) * SIZE), "hidden_norm.weight": (SIZE,), "norm.weight": (SIZE,)}
    for i in range(fact["layers"]):
        one = {
            **{f"self_attn.{n}_proj.weight": (r * dim, SIZE) for n, r in (("q", heads), ("k", keys), ("v", keys))},
            **{f"self_attn.{n}_norm.weight": (dim,) for n in "qk"},
            "self_attn.o_proj.weight": (SIZE, heads * dim),
            **{f"{n}_layernorm.weight": (SIZE,) for n in ("input", "post_attention")},
            **{f"mlp.{n}_proj.weight": (40, SIZE) for n in ("gate", "up")},
            "mlp.down_proj.weight": (SIZE, 40),
        }
        if sizes["attention_bias"]:
            rows = {"q": heads * dim, "k": keys * dim, "v": keys * dim, "o": SIZE}
            one |= {f"self_attn.{n}_proj.bias": (r,) for n, r in rows.items()}
        if taps := option(config, "conv_kernel_size"):
            for name in ("attention_conv", "mlp_conv"):
                one[f"{name}.base_kernel"] = (2, taps, SIZE)
                one[f"{name}.kernel_projection.weight"] = (2 * taps * SIZE // option(config, "conv_group_size"), SIZE)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in one.items()}
    words = VOCAB
    if config.get("speculators_model_type"):
        words = rng.choice([VOCAB, 50])
        shapes |= {"embed_tokens.weight": (VOCAB, SIZE), "lm_head.weight": (words, SIZE)}
    elif "Qwen3DSparkModel" in config["architectures"] and rng.random() < 0.7:
        shapes |= {"embed_tokens.weight": (VOCAB, SIZE), "lm_head.weight": (VOCAB, SIZE)}
    shapes |= special_shapes(config, words, rng)
    weights = {
        name: torch.randn(shape) * (0.5 if prod(shape) == max(shape) else prod(shape) ** -0.25)
        for name, shape in shapes.items()
    }
    weights |= {name: 1 + 0.2 * w for name, w in weights.items() if name.endswith("norm.weight")}
    if words != VOCAB:
        ids = torch.randperm(VOCAB)[:words].sort().values
        weights |= {"d2t": ids - torch.arange(words), "t2d": torch.isin(torch.arange(VOCAB), ids)}
    return weights


def special_shapes(config, words, rng):
    """The shapes of what is not DFlash's."""
    speculators = "speculators_model_type" in config
    dspark = config.get("speculators_model_type") == "dspark" or "Qwen3DSparkModel" in config.get("architectures", "")
    shapes = {}
    if rank := option(config, "selector_rank"):
        suffix = rng.choice(["", ".weight"])
        shapes["candidate_selector.hidden_projection.weight"] = (rank, SIZE)
        shapes |= {f"candidate_selector.{n}_codebook{suffix}": (VOCAB, rank) for n in ("predecessor", "successor")}
    if size := option(config, "gru_hidden_dim"):
        prefix = rng.choice(["", "logit_head."])
        shapes |= {f"{prefix}prefix_gru.weight_ih_l0": (3 * size, SIZE), "prefix_gru.weight_hh_l0": (3 * size, size)}
        shapes |= {"embed_proj.0.weight": (6, SIZE + size), "embed_proj.2.weight": (VOCAB, 6)}
    if dspark and (rank := option(config, "markov_rank")):
        kind = option(config, "markov_head_type", "vanilla")
        head = {"markov_w1.weight": (VOCAB, rank), "markov_w2.weight": (words, rank)}
        if kind == "gated":
            head |= {"gate_proj.weight": (rank, SIZE + rank), "gate_proj.bias": (rank,)}
        if kind == "rnn":
            head |= {"joint_proj.weight": (3 * rank, 2 * rank + SIZE), "joint_proj.bias": (3 * rank,)}
        shapes |= {f"markov_head.{name}": shape for name, shape in head.items()}
    if dspark and option(config, "enable_confidence_head", speculators):
        width = SIZE + (rank if option(config, "confidence_head_with_markov", speculators) else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def write(folder, config, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def random_head(folder, kind, seed):
    rng = Random(f"{kind} {seed}")
    torch.manual_seed(seed)
    config, fact = random_config(kind, rng)
    weights = random_weights(config, fact, rng)
    return write(folder, config, weights), config, fact, weights


def load(folder):
    """A head as its format reads it: the first convention."""
    draft = load_published(folder)
    assert isinstance(draft.network, DFlashNetwork)
    draft.convention = draft.network.conventions(LAYERS)[0]
    return draft


# ---- the formulas ----


class Formulas:
    """A head written out in plain torch, in float64, without caches and batches."""

    def __init__(self, config, fact, weights, target):
        self.config, self.fact = config, fact
        self.sizes = config.get("transformer_layer_config", config)
        self.w = {
            name.removeprefix("logit_head.").replace("codebook.weight", "codebook"): weight.double()
            for name, weight in weights.items()
        }
        self.ids = torch.arange(len(weights["d2t"])) + weights["d2t"] if "d2t" in weights else torch.arange(VOCAB)
        self.embedding = self.w.get("embed_tokens.weight", target.get_input_embeddings().weight.detach().double())
        self.output = self.w.get("lm_head.weight", target.get_output_embeddings().weight.detach().double())

    def block(self, states, root):
        """The block after states (n, K, H): base logits (D, V') and slot states (D, H) by depth."""
        size = self.fact["block"]
        tokens = [root, *[option(self.config, "mask_token_id")] * (size - 1)]
        context = rms(states.double().flatten(1) @ self.w["fc.weight"].T, self.w["hidden_norm.weight"])
        z = self.embedding[tokens] * option(self.config, "input_embedding_scale", 1)
        for i in range(self.fact["layers"]):
            w = {n.removeprefix(f"layers.{i}."): v for n, v in self.w.items() if n.startswith(f"layers.{i}.")}
            x = rms(z, w["input_layernorm.weight"])
            kind = (self.sizes.get("layer_types") or ["full_attention"] * 9)[i]
            z = z + self.around(w, "attention_conv", x, lambda x, w=w, kind=kind: self.attention(w, kind, x, context))
            x = rms(z, w["post_attention_layernorm.weight"])
            z = z + self.around(w, "mlp_conv", x, lambda x, w=w: mlp(w, x))
        z = rms(z, self.w["norm.weight"])[0 if self.fact["anchor"] else 1 :]
        logits = z @ self.output.T * option(self.config, "output_multiplier", 1)
        cap = option(self.config, "final_logit_softcapping")
        return (cap * torch.tanh(logits / cap) if cap else logits), z

    def attention(self, w, kind, x, context):
        """What slots read."""
        n, size, dim = len(context), len(x), self.sizes["head_dim"]
        both = torch.cat([context, x])

        def heads(states, name, turned):
            found = states @ w[f"self_attn.{name}_proj.weight"].T + w.get(f"self_attn.{name}_proj.bias", 0)
            found = found.view(len(states), -1, dim)
            if turned is None:
                return found
            return rotated(rms(found, w[f"self_attn.{name}_norm.weight"]), turned, self.sizes["rope_theta"])

        queries = heads(x, "q", torch.arange(n, n + size))
        keys, values = heads(both, "k", torch.arange(n + size)), heads(both, "v", None)
        shared = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / dim**0.5
        position, other = torch.arange(n, n + size)[:, None], torch.arange(n + size)
        if kind == "sliding_attention":
            scores = scores.masked_fill(position - other >= self.sizes["sliding_window"], -torch.inf)
        if kind in self.fact["causal"]:
            scores = scores.masked_fill(other > position, -torch.inf)
        read = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)
        return read @ w["self_attn.o_proj.weight"].T + w.get("self_attn.o_proj.bias", 0)

    def around(self, w, name, x, sublayer):
        """A sublayer between its two convolutions, if there are any."""
        if f"{name}.base_kernel" not in w:
            return sublayer(x)
        base, taps = w[f"{name}.base_kernel"], w[f"{name}.base_kernel"].shape[1]
        group = option(self.config, "conv_group_size")
        dynamic = (x @ w[f"{name}.kernel_projection.weight"].T).view(len(x), 2, taps, SIZE // group)

        def convolved(x, s):
            out = torch.zeros_like(x)
            for i in range(len(x)):
                for t in range(min(taps, i + 1)):
                    out[i] += (base[s, t] + dynamic[i, s, t, torch.arange(SIZE) // group]) * x[i - t]
            return out

        return convolved(sublayer(convolved(x, 0)), 1)

    def children(self, base, slots, path):
        """The log-probabilities of the children of a path (root first), as a dict by token."""
        w, depth = self.w, len(path) - 1
        logits, slot, parent = base[depth], slots[depth], path[-1]
        if "candidate_selector.hidden_projection.weight" in w:
            left = w["candidate_selector.predecessor_codebook"][parent]
            left = left * (w["candidate_selector.hidden_projection.weight"] @ slot)
            return self.among(
                logits, w["candidate_selector.successor_codebook"] @ left, option(self.config, "selector_top_k")
            )
        if "prefix_gru.weight_hh_l0" in w:
            if depth >= option(self.config, "pure_draft_prefix_len"):
                hidden = torch.cat([slot, gru(w, self.embedding[path])])
                logits = logits + w["embed_proj.2.weight"] @ functional.silu(w["embed_proj.0.weight"] @ hidden)
        elif "markov_head.joint_proj.weight" in w:
            state = torch.zeros(w["markov_head.markov_w1.weight"].shape[1]).double()
            for token, z in zip(path, slots, strict=False):
                joint = torch.cat([state, w["markov_head.markov_w1.weight"][token], z])
                joint = w["markov_head.joint_proj.weight"] @ joint + w["markov_head.joint_proj.bias"]
                gate, candidate, out = joint.chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            logits = logits + w["markov_head.markov_w2.weight"] @ out.tanh()
        elif "markov_head.markov_w1.weight" in w:
            vector = w["markov_head.markov_w1.weight"][parent]
            if "markov_head.gate_proj.weight" in w:
                gate = w["markov_head.gate_proj.weight"] @ torch.cat([slot, vector]) + w["markov_head.gate_proj.bias"]
                vector = vector * gate.sigmoid()
            return self.among(logits, w["markov_head.markov_w2.weight"] @ vector, 16)
        return dict(zip(self.ids.tolist(), logits.log_softmax(-1).tolist(), strict=True))

    def among(self, logits, gained, k):
        """The best k by their logits alone share what they have, by logits and scores of the pair."""
        best = logits.topk(k).indices
        share = logits.log_softmax(-1)[best].logsumexp(-1)
        log_probs = (logits + gained)[best].log_softmax(-1) + share
        return dict(zip(self.ids[best].tolist(), log_probs.tolist(), strict=True))


def rms(x, weight):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def mlp(w, x):
    up = functional.silu(x @ w["mlp.gate_proj.weight"].T) * (x @ w["mlp.up_proj.weight"].T)
    return up @ w["mlp.down_proj.weight"].T


def rotated(x, positions, theta):
    """Heads (n, heads, d) turned by their positions: pairs are (j, j + d / 2)."""
    half = x.shape[2] // 2
    angles = positions[:, None].double() / theta ** (torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def gru(w, inputs):
    """The state of a gated recurrent unit after inputs (n, H), from its definition."""
    state = torch.zeros(w["prefix_gru.weight_hh_l0"].shape[1]).double()
    for x in inputs:
        reset, update, new = (w["prefix_gru.weight_ih_l0"] @ x).chunk(3)
        old_reset, old_update, old_new = (w["prefix_gru.weight_hh_l0"] @ state).chunk(3)
        update = (update + old_update).sigmoid()
        state = (1 - update) * (new + (reset + old_reset).sigmoid() * old_new).tanh() + update * state
    return state


def states_of(target, ids, layers):
    with torch.no_grad():
        hidden = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.stack([hidden[layer][0] for layer in layers], 1)


@pytest.fixture(scope="module")
def texts(target):
    """Texts that begin with the prompts, and the target's hidden states at their tokens, (n, layers + 1, H)."""
    rows = [[*PROMPTS[0], 8, 15, 90, 4], [40, 11, 12, 40, 7], [*LONG, 3, 5, 8, 13], [*PROMPTS[3], 21, 34, 55, 89]]
    return [(row, states_of(target, row, range(LAYERS + 1))) for row in rows]


def opened(draft, target, texts, lengths):
    """A session of a draft that is attached to the target, for the first tokens of texts."""
    draft = draft.attach(TreeModel(target))
    context = DraftContext(
        prompts=[ids[:length] for (ids, _), length in zip(texts, lengths, strict=True)],
        capacity=16,
        max_capacity=256,
        vocab_size=VOCAB,
        draft=0,
        processors=Processors([]),
        seeds=[1] * len(texts),
        aux_layers=range(LAYERS + 1),
        states=[states[: n - 1] if n > 1 else None for (_, states), n in zip(texts, lengths, strict=True)],
    )
    return draft.open(context)


def edges(tree):
    """Each node's tokens above it, the root's first, its token, and its log-probability."""
    for node in range(1, len(tree)):
        path, parent = tree.path(node), int(tree.parents[node])
        yield [int(tree.tokens[0]), *path[:-1]], path[-1], float(tree.scores[node] - tree.scores[parent])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_random_heads_agree_with_the_formulas(target, texts, tmp_path, kind, seed):
    """At every node of the trees of ragged rows, before and after commits; prompts of one token, and long ones."""
    folder, config, fact, weights = random_head(tmp_path / "head", kind, seed)
    draft, formulas = load(folder), Formulas(config, fact, weights, target)
    assert draft.convention.aux_layers == tuple(fact["states"])
    rows, lengths, checked = list(texts), [len(PROMPTS[0]), 1, len(LONG), len(PROMPTS[3])], 0
    with torch.inference_mode():
        session = opened(draft, target, rows, lengths)
        for step in range(3):
            trees = session.propose(BestFirst(6, 5), [ids[n - 1] for (ids, _), n in zip(rows, lengths, strict=True)], 5)
            for (ids, states), length, tree in zip(rows, lengths, trees, strict=True):
                base, slots = formulas.block(states[: length - 1, fact["states"]], ids[length - 1])
                for above, token, log_prob in edges(tree):
                    assert log_prob == pytest.approx(formulas.children(base, slots, above)[token], abs=1e-5)
                    checked += 1
            new = [1 + (seed + step + row) % 2 for row in range(len(rows))]
            kept = [row for row in range(len(rows)) if row != 3 - step]  # one retires
            tokens = [ids[n : n + m] for (ids, _), n, m in zip(rows, lengths, new, strict=True)]
            chose = [states[n - 1 : n - 1 + m] for (_, states), n, m in zip(rows, lengths, new, strict=True)]
            session.commit([row if i in kept else None for i, row in enumerate(tokens)], chose)
            rows, lengths = [rows[i] for i in kept], [lengths[i] + new[i] for i in kept]
    assert checked == 6 * (4 + 3 + 2)


# ---- at work ----


@pytest.fixture(scope="module", params=[0, 1])
def wanted(target, request):
    """Options, and the ids of the target alone."""
    options = {"max_new_tokens": [5, 8, 2, 6], "temperature": request.param, "seed": [3, 4, 5, 6]}
    results = SpeculativeDecoder(target, None, [], None).generate(PROMPTS, **options)
    return options, [row.token_ids for row in results]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_do_not_depend_on_block_heads(target, tmp_path, wanted, kind):
    """Alone and merged, two ways to grow the tree greedily and two others sampled; rows end in different steps."""
    options, ids = wanted
    draft = load(random_head(tmp_path / "head", kind, 0)[0])
    ways = [
        ("auto", [draft]),
        (BestFirst(9, 6), [draft, NGramDraft()]),
        (Expansion((3, 2, 1)), [draft]),
        (Chain(4), [NGramDraft(), draft]),
    ]
    for tree, drafts in ways[(KINDS.index(kind) + bool(options["temperature"])) % 2 :: 2]:
        decoder = SpeculativeDecoder(target, None, drafts, tree, compile=False)
        assert [row.token_ids for row in decoder.generate(PROMPTS, **options)] == ids
    alone = {name: value if name == "temperature" else value[1] for name, value in options.items()}
    assert decoder.generate(PROMPTS[1], **alone).token_ids == ids[1]


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_trees_hold_what_they_were_drawn_from(target, texts, tmp_path, kind):
    """Draws come from the distribution in the tree; with scored pairs from the candidates alone."""
    folder, config, fact, weights = random_head(tmp_path / "head", kind, 1)
    draft, formulas = load(folder), Formulas(config, fact, weights, target)
    with torch.inference_mode():
        tree = opened(draft, target, texts[:1], [7]).propose(Sampled((2, 2)), [texts[0][0][6]], 4)[0]
    ids, states = texts[0]
    base, slots = formulas.block(states[:6, fact["states"]], ids[6])
    assert tree.distributions
    for (node, _), distribution in tree.distributions.items():
        path = [ids[6], *tree.path(node)]
        log_probs = formulas.children(base, slots, path)
        wanted = torch.zeros(VOCAB).double()
        wanted[list(log_probs)] = torch.tensor(list(log_probs.values())).double().softmax(0)
        assert torch.tensor(distribution).tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


def test_long_prompts_are_read_once(target, tmp_path):
    """A long prompt costs no pass of the block's layers, and a step one pass."""
    draft = load(random_head(tmp_path / "head", "z-lab", 0)[0])
    run = SpeculativeDecoder(target, None, [draft], BestFirst(4, 3)).generate(LONG, max_new_tokens=5)
    assert run.stats.draft_passes == sum(len(step.tree) > 1 for step in run.steps) > 1


# ---- conventions ----


def trained_head(target, states, from_anchor, ids):
    """A head that learnt the target's continuations of single tokens, from these states."""
    torch.manual_seed(0)
    count, block = 28, 4
    with torch.no_grad():
        text = target.generate(torch.arange(1, 5)[:, None], max_new_tokens=count + 9, do_sample=False, pad_token_id=0)
        hidden = target(text, output_hidden_states=True).hidden_states
    given = torch.stack([hidden[layer] for layer in states], 2)
    sizes = {"hidden_size": SIZE, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"head_dim": 8, "num_hidden_layers": 1, "max_position_embeddings": 256, "vocab_size": VOCAB}
    config = network_config(**PLAIN, **sizes, **more, target_layer_ids=ids, block_size=block, mask_token_id=258)
    network = DFlashNetwork(config).double().bind(target)
    optimiser = torch.optim.Adam((w for w in network.parameters() if w.requires_grad), 1e-2)
    anchors = torch.arange(1, count)
    shift = torch.arange(block)[from_anchor ^ 1 :] + from_anchor  # of what the predicting slots predict
    slots = functional.pad(text[:, anchors, None], (0, block - 1), value=258).flatten(1)
    fed = torch.cat([slots, text[:, :count]], 1)
    positions = torch.cat([(anchors[:, None] + torch.arange(block)).flatten(), torch.arange(count)]).expand(4, -1)
    seen = torch.cat([torch.eye(len(anchors)).repeat_interleave(block, 1), torch.arange(count) < anchors[:, None]], 1)
    mask = torch.zeros(4, 1, fed.shape[1], fed.shape[1]).double()
    mask[:, :, : slots.shape[1]] = torch.where(seen.repeat_interleave(block, 0) > 0, 0.0, -1e9)
    goal = text[:, anchors[:, None] + shift].flatten()
    network.config.block_size = slots.shape[1]  # one pass is fed all blocks of a text
    states = torch.cat([given.new_zeros(len(given), slots.shape[1], *given.shape[2:]), given[:, :count]], 1)
    for _ in range(80):
        logits = network(fed, mask, positions, block_states=states).logits.unflatten(1, (-1, block))
        loss = functional.cross_entropy(logits[:, :, from_anchor ^ 1 :].flatten(0, 2), goal)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    config = {"block_size": block, **sizes, **more, "rms_norm_eps": 1e-6, "architectures": ["DFlashDraftModel"]}
    config["dflash_config"] = {"target_layer_ids": ids, "mask_token_id": 258}
    return config, {name: w for name, w in network.state_dict().items() if not name.startswith("output.")}


@pytest.mark.parametrize(("offset", "from_anchor"), [(0, False), (1, True)])
def test_the_convention_that_a_head_was_trained_under_is_found(target, tmp_path, offset, from_anchor):
    ids = [0, 2]
    config, weights = trained_head(target, [i + offset for i in ids], from_anchor, ids)
    network, session = dflash.load(Checkpoint.find(write(tmp_path / "head", config, weights)))
    draft = PublishedDraft("head", network, session).attach(TreeModel(target))
    assert draft.convention == Convention((offset, 2 + offset), (("from_anchor", from_anchor),))
    (_, best), *others = draft.agreements
    assert best[0] > 0.5
    assert all(rates[0] < best[0] - 0.1 for _, rates in others)


def test_a_head_for_another_target_is_refused(target, tmp_path):
    network, session = dflash.load(Checkpoint.find(random_head(tmp_path / "head", "z-lab", 0)[0]))
    with pytest.raises(ModelError, match="does not fit this target"):
        PublishedDraft("head", network, session).attach(TreeModel(target))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"layer_offset": 1, "from_anchor": True}, [((1, 4), ()), ((0, 3), ())]),
        ({"layer_offset": 0}, [((0, 3), ()), ((1, 4), ())]),
        ({"measured_anchor": True, "target_layer_ids": [-1]}, [((0,), False), ((0,), True)]),
    ],
)
def test_conventions_that_are_measured(config, wanted):
    """The format's first; states that no layer has are left out."""
    sizes = {"hidden_size": SIZE, "num_attention_heads": 4, "head_dim": 8, "num_hidden_layers": 1, "vocab_size": VOCAB}
    head = {"target_layer_ids": [0, 3], "block_size": 4, "mask_token_id": 1}
    rules = DFlashNetwork(network_config(**{**PLAIN, **sizes, **head, **config})).conventions(LAYERS)
    options = [(states, () if anchor == () else (("from_anchor", anchor),)) for states, anchor in wanted]
    assert [(rule.aux_layers, rule.options) for rule in rules] == options


# ---- what cannot be loaded ----


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("z-lab", {"block_size": None}, "block_size is None"),
        ("z-lab", {"mask_token_id": 999}, "mask_token_id is 999"),
        ("z-lab", {"target_layer_ids": "all"}, "target's layers that it reads are 'all'"),
        ("z-lab", {"model_type": "gemma4"}, "layers are of type 'gemma4'"),
        ("z-lab", {"quantization_config": {}}, "quantised"),
        ("z-lab", {"layer_types": ["chunked_attention"] * 2}, "damaged|not known"),
        ("z-lab", {"layer_types": ["sliding_attention"] * 2}, "how long"),
        ("z-lab", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("z-lab", {"hidden_size": "big"}, "damaged"),
        ("z-lab", {"hidden_size": 48}, "of another shape .fc.weight is"),
        ("z-lab", {"dflash_config": []}, "dflash_config is not"),
        ("dflash2", {"selector_rank": None}, "selector_rank is None"),
        ("dflash2", {"conv_group_size": 7}, "does not divide"),
        ("domino", {"gru_hidden_dim": 0}, "gru_hidden_dim is 0"),
        ("dspark vanilla", {"markov_head_type": "tree"}, "Markov head is 'tree'"),
    ],
)
def test_what_cannot_be_honoured_is_one_line(tmp_path, kind, change, message):
    folder, config, _, weights = random_head(tmp_path / "head", kind, 2)
    special = config.get("dflash_config", config)
    for name, value in change.items():
        config[name] = value
        if name != "dflash_config" and name in special:
            special[name] = value
    with pytest.raises(ModelError, match=message) as caught:
        dflash.load(Checkpoint.find(write(folder, config, weights)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("z-lab", "layers.0.mlp.up_proj.weight", "1 missing .layers.0.mlp.up_proj.weight"),
        ("dflash2", "layers.0.attention_conv.base_kernel", "1 missing"),
        ("dspark gated", "markov_head.gate_proj.bias", "1 missing"),
        ("domino", "embed_proj.0.weight", "1 missing"),
    ],
)
def test_missing_and_unknown_weights_are_listed(tmp_path, kind, name, message):
    folder, config, _, weights = random_head(tmp_path / "head", kind, 2)
    missing = {key: weight for key, weight in weights.items() if key != name}
    with pytest.raises(ModelError, match=message):
        dflash.load(Checkpoint.find(write(folder, config, missing)))
    with pytest.raises(ModelError, match="1 unknown"):
        dflash.load(
            Checkpoint.find(write(folder, config, {**weights, "layers.0.self_attn.gate.weight": torch.ones(1)}))
        )


def test_a_mask_embedding_beside_the_weights_is_refused(tmp_path):
    folder = random_head(tmp_path / "head", "z-lab", 0)[0]
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ModelError, match=r"mask_embedding\.pt, which"):
        dflash.load(Checkpoint.find(folder))


def test_passes_of_block_heads_are_not_compiled(target, tmp_path):
    draft = load(random_head(tmp_path / "head", "z-lab", 0)[0]).attach(TreeModel(target))
    with torch.inference_mode(), pytest.raises(NotCompiled, match="never compiled"):
        make(draft.model, "packed", [], tmp_path, draft.model.model)
    assert SpeculativeDecoder(target, drafts=[draft]).passes.endswith("plain (block heads run as they are)")


def test_a_language_model_is_no_block_head(tmp_path):
    for config in ({"architectures": ["Qwen3ForCausalLM"]}, {"speculators_model_type": "eagle3"}):
        assert not dflash.recognises(Checkpoint("x", tmp_path, config))
