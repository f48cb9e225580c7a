"""Training networks of published formats on a target's own text: EAGLE-3, Medusa, DFlash, DSpark.

Knows: what each starts from, and in which format it is kept.
Does not know: losses (`published`), optimisation, names of weights (`export`).

All four learn from the states of the same layers, so that one folder of texts serves them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.drafts.published.dflash_network import DFlashNetwork, block_config
from specinfer.drafts.published.dspark import DSparkNetwork
from specinfer.drafts.published.eagle3 import Eagle3Network, eagle3_config
from specinfer.engine.gumbel import TRAINING, key
from specinfer.errors import InputError
from specinfer.training.data import Texts
from specinfer.training.export import Record, block_files, eagle3_files, medusa_files, write_draft
from specinfer.training.job import ProgressCallback, TrainingJob, processes
from specinfer.training.losses import DistillationLoss
from specinfer.training.optimise import optimise
from specinfer.training.published import BlockLoss, DSparkLoss, Eagle3Loss, MedusaLoss, typical_sizes
from specinfer.training.train import last_layers, layer_sizes, load_fitting, most_frequent

PUBLISHED = ("eagle3", "medusa", "dflash", "dspark")
LEAST_LAYERS = 7  # of a target, so that the layers 2, N / 2 and N - 3 are three
# a first-order Markov head, and no confidence head
DSPARK: dict[str, Any] = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
STATE_MATRICES = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")  # of a layer, that read states


def published_aux_layers(model: Any) -> tuple[int, ...]:
    """Return the hidden states that are kept: EAGLE-3's three (arXiv 2503.01840, its code's default), and the output.

    Raises:
        InputError: the target has too few layers.
    """
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if layers < LEAST_LAYERS:
        raise InputError(
            f"heads of published formats read the layers 2, N / 2 and N - 3 of their target, and this one has {layers} "
            f"layers, not {LEAST_LAYERS} or more: train arch 'head'"
        )
    return 2, layers // 2, layers - 3, layers


def train_published(
    target: Any, tokenizer: Any, shards: Sequence[Path], job: TrainingJob, progress: ProgressCallback
) -> dict[str, Any]:
    """Train one draft of a published format; write it to the job's folder; return its figures.

    Arguments and errors as for `train.train_head`; the tokenizer is not used.
    """
    settings = job.settings
    torch.manual_seed(key(settings.seed, TRAINING))
    texts = Texts(shards, settings.held_out, settings.seed, skip=1)
    counts = texts.counts(target.get_input_embeddings().weight.shape[0])
    token_ids = most_frequent(counts, settings.vocabulary)
    loss = _new_loss(target, job, texts, token_ids, unused_token(target, counts))
    figures = optimise(loss, texts, (), job, progress)
    figures["coverage"] = counts[token_ids].sum().item() / counts.sum().item()
    if processes(target.device).is_main_process:
        _save(loss, target, job)
    return figures


def _new_loss(target: Any, job: TrainingJob, texts: Texts, token_ids: Tensor, mask: int) -> DistillationLoss:
    """Return the loss of a new network."""
    settings = job.settings
    if job.arch == "medusa":
        return MedusaLoss(target, settings, token_ids.to(target.device))
    scales = typical_sizes(texts, settings).to(target.device)
    if job.arch == "eagle3":
        return Eagle3Loss(new_eagle3(target, token_ids).bind(target), target, settings, scales)
    kind = {"dflash": BlockLoss, "dspark": DSparkLoss}[job.arch]
    return kind(new_block_head(target, job, token_ids, mask).bind(target), target, settings, scales)


def new_eagle3(target: Any, token_ids: Tensor) -> Eagle3Network:
    """Return an EAGLE-3 head of one layer, which starts as the target's last one, like its output matrix."""
    fields = {**_fields(target, 1), "norm_before_residual": False, "norm_output": False}
    network = Eagle3Network(eagle3_config(**fields), token_ids, outputs=True)
    for weights, layer in last_layers(target, network.layers):
        if "input_layernorm.weight" in weights:
            weights["hidden_norm.weight"] = weights.pop("input_layernorm.weight")
        for name in STATE_MATRICES:
            if (weight := weights.get(name)) is not None:  # of states; the columns before are embeddings'
                before = layer.get_parameter(name).detach()[:, : -weight.shape[1]]
                weights[name] = torch.cat([before, weight.to(before)], 1)
        load_fitting(layer, weights)
    return _with_outputs(network, target)


def new_block_head(target: Any, job: TrainingJob, token_ids: Tensor, mask: int) -> DFlashNetwork:
    """Return a block head whose layers start as the target's last ones; its output matrix is and stays the target's.

    Args:
        target: the target.
        job: ``arch`` "dflash" or "dspark".
        token_ids: (V',) what it may propose.
        mask: the token of slots that are to be filled.
    """
    fields = _fields(target, job.settings.layers) | {"block_size": job.settings.block, "mask_token_id": mask}
    fields |= {"target_layer_ids": list(job.aux_layers[:-1]), "layer_offset": 0}
    if job.arch == "dspark":
        config = block_config(**fields, **DSPARK, from_anchor=True)
        network: DFlashNetwork = DSparkNetwork(config, token_ids, outputs=True)
        nn.init.normal_(network.get_parameter("markov_head.markov_w1.weight"), std=0.25)
        nn.init.zeros_(network.get_parameter("markov_head.markov_w2.weight"))
    else:
        network = DFlashNetwork(block_config(**fields), token_ids, outputs=True)
    for weights, layer in last_layers(target, network.layers):
        load_fitting(layer, weights)
    _with_outputs(network, target).lm_head.requires_grad_(False)
    return network


def unused_token(target: Any, counts: Tensor) -> int:
    """Return the rarest token of a text (counts (V,)) whose embedding is not zero."""
    sizes = target.get_input_embeddings().weight.detach().abs().sum(1).cpu()
    return int(counts.masked_fill(sizes == 0, int(counts.max()) + 1).argmin())


def _fields(target: Any, layers: int) -> dict[str, Any]:
    """Return the fields of a configuration whose layers are of the target's size and rotate as its do."""
    config = target.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", 10_000.0)  # of models whose layers differ in it, a dict for each type
    sizes = layer_sizes(target)
    head_dim = getattr(config, "head_dim", None) or sizes["hidden_size"] // sizes["num_attention_heads"]
    more = {"head_dim": head_dim, "num_hidden_layers": layers, "vocab_size": _vocab_size(target), "rope_theta": theta}
    return {**sizes, **more, "rms_norm_eps": 1e-6}


@torch.no_grad()
def _with_outputs(network: Any, target: Any) -> Any:
    """Return a network with the target's rows as its output matrix.

    Its final norm stays one: with the target's, it would begin sure of itself, and wrong.
    """
    rows = target.get_output_embeddings().weight[network.token_ids.to(target.device)]
    network.lm_head.weight.copy_(rows)
    return network


def _vocab_size(target: Any) -> int:
    return int(target.get_input_embeddings().weight.shape[0])


def _save(loss: Any, target: Any, job: TrainingJob) -> None:
    """Write a trained draft in its public format."""
    record: Record = {
        "arch": job.arch,
        "target": job.target,
        "architecture": type(target).__name__,
        "aux_layers": list(job.aux_layers[-1:] if job.arch == "medusa" else job.aux_layers[:-1]),
    }
    if job.arch == "medusa":
        output = target.get_output_embeddings().weight.detach()
        write_draft(job.folder, medusa_files(loss.blocks, output, record), record, "medusa_lm_head.safetensors")
        return
    loss.fold_scales()
    if job.arch == "eagle3":
        write_draft(job.folder, eagle3_files(loss.network, record), record)
        return
    write_draft(job.folder, block_files(loss.network, record, DSPARK if job.arch == "dspark" else {}), record)
