"""Files of trained drafts in the formats that others publish and serve.

Knows: names of weights, fields of configurations.  Does not know: training, how drafts run.

EAGLE-3 heads are kept under SafeAILab's names, which SpecForge and SGLang read (``midlayer``), or under those of vLLM's
speculators (``layers.0``); block heads (DFlash, DSpark) under the latter; Medusa heads under Medusa's.  Weights are
bfloat16.  ``specinfer.json`` says what was trained, and for which target; who loads a draft does not need it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from specinfer.common.files import read_json, storing, write_json, write_whole
from specinfer.drafts.published import eagle3
from specinfer.drafts.published.checkpoint import Checkpoint
from specinfer.drafts.published.dflash_network import DFlashNetwork
from specinfer.drafts.published.eagle3 import Eagle3Network
from specinfer.errors import InputError

FORMATS = ("eagle3", "speculators")
RECORD = "specinfer.json"
LAYER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_hidden_layers", "max_position_embeddings", "rms_norm_eps", "hidden_act", "attention_bias", "vocab_size"),
)
SPECULATORS_VERSION = "0.6.0"  # whose fields these are
TOKENS = 5  # proposed at once by servers that read it of the configuration

RECORDED = {"arch", "target", "architecture", "aux_layers"}  # the third is the target's class
Record = Mapping[str, Any]  # of these
Files = tuple[dict[str, Any], dict[str, Tensor]]  # configuration and weights


def export_draft(folder: Path, form: str, out: Path) -> None:
    """Write a trained EAGLE-3 head in one of `FORMATS`.

    Args:
        folder: of the head, as `distill` made it.
        form: "eagle3" (SafeAILab, SpecForge, SGLang) or "speculators" (vLLM).
        out: a folder that is empty, or not there.

    Raises:
        InputError: an unknown format, a draft of another architecture, or a folder that cannot be written.
        ModelError: there is no draft, or it is damaged.
    """
    if form not in FORMATS:
        raise InputError(f"format {form!r} is unknown: choose {' or '.join(FORMATS)}")
    record = read_json(folder / RECORD)
    if not isinstance(record, dict) or not record.keys() >= RECORDED:
        record = {}
    if record.get("arch") != "eagle3":
        found = f"arch {record['arch']!r}" if record else f"type {Checkpoint.find(folder).config.get('model_type')!r}"
        raise InputError(
            f"{folder} holds a draft of {found}, and only EAGLE-3 heads that were trained here are exported: train one "
            "with `specinfer distill --arch eagle3`"
        )
    with storing(out):
        if out.exists() and any(out.iterdir()):
            raise InputError(f"{out} is not empty: choose another folder for --out")
    network, _ = eagle3.load(Checkpoint.find(folder))
    write_draft(out, eagle3_files(network, record, form), record)


def write_draft(folder: Path, files: Files, record: Record, name: str = "model.safetensors") -> None:
    """Write a draft's weights, in bfloat16, its record and its configuration.

    Raises:
        SpecinferError, InputError: the disk is full, or the folder cannot be written.
    """
    config, weights = files
    kept = {key: w.detach().to(torch.bfloat16 if w.is_floating_point() else w.dtype) for key, w in weights.items()}
    write_whole(folder / name, save({key: w.cpu().contiguous() for key, w in kept.items()}, {"format": "pt"}))
    write_json(folder / RECORD, dict(record))
    write_json(folder / "config.json", config)


def eagle3_files(network: Eagle3Network, record: Record, form: str = "eagle3") -> Files:
    """Return an EAGLE-3 head's files in one of `FORMATS`."""
    config = network.config
    weights = _weights(network)
    sizes = {"draft_vocab_size": len(weights["d2t"]), "norm_before_residual": network.norm_before_residual}
    if form == "speculators":
        more = {"eagle_aux_hidden_state_layer_ids": list(record["aux_layers"]), "norm_output": network.norm_output}
        fields = {**sizes, **more, "norm_before_fc": False, "fc_norm": False, "target_hidden_size": None}
        return _speculators("Eagle3Speculator", "eagle3", network, record, TOKENS, fields), weights
    # no ids: everybody reads the layers 2, N / 2 and N - 3 then, while the same ids mean other layers to some
    config = {"architectures": ["LlamaForCausalLMEagle3"], **_layer_fields(network, "llama"), **sizes}
    return config, {_midlayer(name): weight for name, weight in weights.items()}


def block_files(network: DFlashNetwork, record: Record, fields: Mapping[str, Any]) -> Files:
    """Return a block head's files; fields are those of its kind."""
    config, arch, weights = network.config, record["arch"], _weights(network)
    fields = {
        "draft_vocab_size": len(weights["d2t"]),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": list(record["aux_layers"]),
        "sample_from_anchor": network.from_anchor,
        "target_hidden_size": None,
        **fields,
    }
    name = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}[arch]
    return _speculators(name, arch, network, record, network.depth, fields), weights


def medusa_files(blocks: Any, output: Tensor, record: Record) -> Files:
    """Return the files of Medusa heads of one residual block each, which all have the same output matrix (V, H)."""
    weights = {f"{i}.0.{name}": weight for i, block in enumerate(blocks) for name, weight in block.state_dict().items()}
    weights |= {f"{i}.1.weight": output.clone() for i in range(len(blocks))}
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": record["target"],
        "medusa_num_heads": len(blocks),
        "medusa_num_layers": 1,
        "hidden_size": output.shape[1],
        "vocab_size": output.shape[0],
    }
    return config, weights


def _speculators(
    name: str, kind: str, network: Any, record: Record, tokens: int, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a configuration of vLLM's speculators."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": tokens}
    return {
        "architectures": [name],
        "model_type": "speculator_model",
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "dtype": "bfloat16",
        "transformer_layer_config": _layer_fields(network, "llama" if kind == "eagle3" else "qwen3"),
        **fields,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": record["target"], "architectures": [record["architecture"]]},
        },
    }


def _layer_fields(network: Any, kind: str) -> dict[str, Any]:
    config = network.config
    fields = {name: getattr(config, name) for name in LAYER_FIELDS}
    rope = {"rope_theta": config.rope_parameters["rope_theta"]}
    return {"model_type": kind, **fields, **rope, "tie_word_embeddings": False, "dtype": "bfloat16"}


def _weights(network: Any) -> dict[str, Tensor]:
    """Return the weights; the reduced vocabulary as offsets and as a mask of the target's, as all these formats do."""
    weights = network.state_dict()
    token_ids = weights.pop("token_ids").cpu()
    used = torch.zeros(network.config.vocab_size, dtype=torch.bool)
    used[token_ids] = True
    return {**weights, "d2t": token_ids - torch.arange(len(token_ids)), "t2d": used}


def _midlayer(name: str) -> str:
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
