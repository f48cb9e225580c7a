"""Training drafts on a target's own text: EAGLE-style heads and small causal language models, one after the other.

Knows: what each starts from, and how it is kept.  Does not know: losses, optimisation, where texts come from, cards.

A head whose training goes on ends at the mean of its weights before and after (WiSE-FT, arXiv 2109.01903, section 3,
alpha = 1/2).
"""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specinfer.common.files import storing, sync
from specinfer.common.progress import Figures, Progress
from specinfer.drafts.head import HeadDraft, target_fingerprint
from specinfer.drafts.head_network import HeadNetwork
from specinfer.drafts.published.layers import network_config
from specinfer.engine.gumbel import TRAINING, key
from specinfer.errors import UnsupportedModel
from specinfer.training.data import Texts
from specinfer.training.job import TrainingJob, processes
from specinfer.training.losses import CausalLMLoss, HeadLoss, first_logits
from specinfer.training.optimise import evaluate, in_bfloat16, optimise

INVERSE_TEMPERATURES = [1 + step / 20 for step in range(21)]  # tried for a head, see `fit_inverse_temperature`
CALIBRATION_BATCHES = 8  # of held-out text that they are tried on
LAYER_KINDS = "layer_types", "mlp_layer_types", "no_rope_layers"  # a configuration's lists of an entry for each layer
LAYER_NUMBER = re.compile(r"(\.(?:layers|h|blocks)\.)(\d+)")  # in the names of a model's weights


# ---- heads ----


def train_head(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    shards: Sequence[Path],
    job: TrainingJob,
    progress: Progress,
) -> Figures:
    """Train one EAGLE-style head, or go on with its training; write it to the job's folder; return its figures.

    Args:
        target: the target model.
        tokenizer: its tokenizer.
        shards: texts with states (`data`); the last of the states must be the target's output.
        job: of the training.
        progress: called after every step.

    Raises:
        NumericalError: the loss is not a number; the last good checkpoint stays.
    """
    settings = job.settings
    torch.manual_seed(key(settings.seed, TRAINING))
    texts = Texts(shards, settings.held_out, settings.seed)
    counts = texts.counts(target.get_input_embeddings().get_parameter("weight").shape[0])
    if job.start:
        head = HeadDraft.load(job.start).head
    else:
        token_ids = counts.argsort(descending=True, stable=True)[: settings.vocabulary].sort().values  # most frequent
        head = new_head(target, job.aux_layers, settings.layers, token_ids, job.earlier)
    head.config.sliding_window = max(texts.window, getattr(head.config, "sliding_window", None) or 0)
    earlier = [HeadDraft.load(folder).head.to(target.dtype).bind(target) for folder in job.earlier]
    loss = HeadLoss(head.bind(target), target, settings)
    figures = optimise(loss, texts, earlier, job, progress)
    if job.start:
        _average_with_start(head, job.start)
        figures["hits"] = evaluate(loss, texts)
    figures["window"] = head.config.sliding_window
    figures["coverage"] = counts[head.token_ids.cpu()].sum().item() / counts.sum().item()
    figures["inverse_temperature"] = fit_inverse_temperature(loss, texts)
    if processes(target.device).is_main_process:
        fingerprint = target_fingerprint(target, tokenizer)
        HeadDraft(head, fingerprint, job.folder.name, figures["inverse_temperature"]).save(job.folder)
    return figures


def new_head(
    target: PreTrainedModel, aux_layers: Sequence[int], layers: int, token_ids: Tensor, earlier: Sequence[Path] = ()
) -> HeadNetwork:
    """Return a head with layers of the target's size.

    It starts from the first draft's weights; layers that the first draft does not have start as the identity.  The
    first draft itself starts from the target's last layers.
    """
    sizes = {**_layer_sizes(target), "num_hidden_layers": layers, "vocab_size": len(token_ids)}
    head = HeadNetwork(network_config(**sizes, rms_norm_eps=1e-6, aux_layers=list(aux_layers)), token_ids)
    if earlier:
        weights = load_file(earlier[0] / "model.safetensors")
        del weights["token_ids"]
        head.load_state_dict(weights, strict=False)
        for index, layer in enumerate(head.layers):
            if f"layers.{index}.mlp.down_proj.weight" not in weights:
                nn.init.zeros_(layer.get_parameter("self_attn.o_proj.weight"))
                nn.init.zeros_(layer.get_parameter("mlp.down_proj.weight"))
        return head
    target_layers = getattr(getattr(target, "model", None), "layers", None) or ()
    for source, layer in zip(reversed(target_layers), reversed(head.layers), strict=False):
        _load_fitting(layer, source.state_dict())
    return head


def _layer_sizes(target: PreTrainedModel) -> dict[str, int]:
    """Return the sizes of a target's layers, as transformers names them."""
    config = target.config.get_text_config(decoder=True)
    size, heads = config.hidden_size, config.num_attention_heads
    defaults = {"intermediate_size": 4 * size, "num_key_value_heads": heads, "max_position_embeddings": 4096}
    sizes = {name: getattr(config, name, None) or default for name, default in defaults.items()}
    return {**sizes, "hidden_size": size, "num_attention_heads": heads}


def _load_fitting(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a module those of some weights that it has a place for, in name and shape."""
    shapes = {name: weight.shape for name, weight in module.state_dict().items()}
    fitting = {name: weight for name, weight in weights.items() if shapes.get(name) == weight.shape}
    module.load_state_dict(fitting, strict=False)


@torch.no_grad()
def _average_with_start(head: HeadNetwork, start: Path) -> None:
    """Give a head the mean of its weights and of those that its training started from."""
    for name, weight in load_file(start / "model.safetensors").items():
        if name != "token_ids":
            trained = head.get_parameter(name)
            trained.lerp_(weight.to(trained), 0.5)


@torch.no_grad()
def fit_inverse_temperature(loss: HeadLoss, texts: Texts) -> float:
    """Return the inverse draft temperature with which a head best predicts the target's coupled choices.

    At held-out positions, tokens are chosen anew by the target's distribution and Gumbel noise.  Of
    `INVERSE_TEMPERATURES`, the one is returned with which the head's first candidate under the same noise is right most
    often (see `DraftRows.ranked`).
    """
    head, settings = loss.head, loss.settings
    device = head.mix.weight.device
    generator = torch.Generator(device).manual_seed(key(settings.seed, TRAINING))
    inverse_temperatures = torch.tensor(INVERSE_TEMPERATURES, device=device)
    hits = torch.zeros_like(inverse_temperatures)
    for chosen in texts.batches(texts.held_out, settings.tokens_per_batch, Random(settings.seed))[:CALIBRATION_BATCHES]:
        batch = texts.load(chosen, device)
        with torch.autocast(device.type, torch.bfloat16, in_bfloat16(device)):
            q, p = first_logits(head, batch).float(), loss.target_logits(batch.states[:, 1:, -1][batch.learn]).float()
        noise = -torch.empty_like(p).exponential_(generator=generator).log()
        choices = (p + noise).argmax(-1)
        hits += torch.stack([((s * q + noise).argmax(-1) == choices).sum() for s in inverse_temperatures])
    return round(float(inverse_temperatures[hits.argmax()]), 2)


# ---- small language models ----


def train_causal_lm(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    shards: Sequence[Path],
    job: TrainingJob,
    progress: Progress,
) -> Figures:
    """Train a small causal language model, the target's first and last layers, and write it as transformers does.

    Its embedding and output matrices are the target's and are not trained.  Arguments and errors as for `train_head`.
    """
    settings, out = job.settings, job.folder
    torch.manual_seed(key(settings.seed, TRAINING))
    texts = Texts(shards, settings.held_out, settings.seed)
    model = outer_layers(target, settings.layers)
    figures = optimise(CausalLMLoss(model, target, settings), texts, (), job, progress)
    if processes(target.device).is_main_process:
        with storing(out):
            model.bfloat16().save_pretrained(out)
            tokenizer.save_pretrained(out)
            sync(*out.iterdir(), out)
    return figures


def outer_layers(target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return a copy of the target, in float32, with its first ``layers // 2`` layers and its last ones.

    Raises:
        UnsupportedModel: they are of other kinds than such a model has in their places.
    """
    config = deepcopy(target.config)
    kept = [*range(layers // 2), *range(config.num_hidden_layers - layers + layers // 2, config.num_hidden_layers)]
    config.num_hidden_layers = layers
    for kinds in LAYER_KINDS:
        if getattr(config, kinds, None):
            setattr(config, kinds, [getattr(config, kinds)[i] for i in kept])
    model: Any = type(target)(config)
    model.to(target.device)
    weights, wanted = target.state_dict(), model.state_dict()
    names = {name: LAYER_NUMBER.sub(lambda m: f"{m[1]}{kept[int(m[2])]}", name, count=1) for name in wanted}
    if any(source not in weights or weights[source].shape != wanted[name].shape for name, source in names.items()):
        raise UnsupportedModel(
            f"{type(target).__name__} has layers of several kinds, and its layers {kept} make no model of {layers}: "
            "give another number of layers, or train a head"
        )
    model.load_state_dict({name: weights[source] for name, source in names.items()})
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        part.requires_grad_(False)
    return model
