"""Giving a model without memory its weights: what checkpoints of all formats have in common.

Knows: which weights a model has, which modules take the places of dense ones.
Does not know: files, formats, the packed layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specinfer.attention.packed.formats import Quantised
from specinfer.attention.packed.layout import pack
from specinfer.attention.packed.modules import Experts, PackedEmbedding, PackedLinear, are_experts
from specinfer.common.memory import LargePages, free_bytes
from specinfer.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"


class Filling:
    """A model of transformers that gets its weights from a file.

    Args:
        config: the model's.
        tensors: names of the file's.  Where they are those of single experts, these have linear layers of their own.
        refusal: makes an error of what is wrong, and of what to do.
        **options: of the model's `from_config`.

    Raises:
        ModelError: the configuration has more experts than the file could hold.

    Attributes:
        model: in float32, without memory for the weights that it does not have yet.
    """

    def __init__(
        self, config: PreTrainedConfig, tensors: Iterable[str], refusal: Callable[..., ModelError], **options: Any
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.refusal, self.pages = refusal, LargePages()
        layers = {name.rpartition(".")[0] for name in tensors}
        with torch.device("meta"):
            self.model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
            for path, module in list(self.model.named_modules()):
                if are_experts(module) and f"{path}.0.gate_proj" in layers:
                    if (count := len(module.down_proj)) > len(layers):  # more than anybody could wait for
                        raise refusal(f"{path} should have {count} experts, and the file has {len(layers)} layers")
                    self.model.set_submodule(path, Experts(module))

    def wanted(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights that the model has, without a head that is its embeddings."""
        wanted = {name: tuple(weight.shape) for name, weight in self.model.named_parameters(remove_duplicate=False)}
        if self.model.config.tie_word_embeddings:
            del wanted[f"{HEAD}.weight"]
        return wanted

    def can_finish(self) -> bool:
        """Whether the head, embeddings and tables are those that `finish` knows, and matrices stand alone."""
        modules = dict(self.model.named_modules())
        tables = {type(module) for module in modules.values() if any(True for _ in module.buffers(recurse=False))}
        alone = all(weight.dim() <= 2 for weight in self.model.parameters())  # or else experts have none of their own
        of_config = all("config" in inspect.signature(kind).parameters for kind in tables)
        return {HEAD, EMBEDDING} <= modules.keys() and alone and of_config

    def check_shapes(self, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `ModelError` unless the file has the tensors that are wanted."""
        if others := sorted(found.keys() - wanted.keys()):
            advice = "they may change the model: use another file"
            raise self.refusal(f"{len(others)} of its tensors are not known ({', '.join(others[:3])})", advice)
        if missing := sorted(wanted.keys() - found.keys()):
            raise self.refusal(f"it lacks {len(missing)} tensors ({', '.join(missing[:3])})")
        for name, shape in wanted.items():
            if found[name] != shape:
                raise self.refusal(f"{name} has shape {found[name]}, and should have {shape}")

    def check_memory(self, needed: int) -> None:
        """Raise `ModelError` if weights do not fit into memory, by the bytes that they need."""
        if needed > (free := free_bytes()):
            what = f"its weights need {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
            raise self.refusal(f"{what}: end other programs, or take a file of fewer bits")

    def compute_in(self, dtype: torch.dtype) -> None:
        """Let weights that are not packed have a dtype."""
        self.model.config.dtype = dtype
        nn.Module.to(self.model, dtype)

    def set(self, name: str, weight: Tensor) -> None:
        """Give the model a weight, in its dtype."""
        path, _, leaf = name.rpartition(".")
        given = nn.Parameter(weight.to(self.model.dtype), requires_grad=False)
        setattr(self.model.get_submodule(path), leaf, given)

    def set_packed(
        self, path: str, module: PackedLinear | PackedEmbedding, rows: Iterable[Quantised], shape: tuple[int, ...]
    ) -> None:
        """Give the model a packed module, and this one its matrix (N, K), whose rows come in parts."""
        outputs, inputs = shape
        module.packed = pack(rows, outputs, inputs, self.pages)
        self.model.set_submodule(path, module)

    def finish(self) -> PreTrainedModel:
        """Return the model, when its weights are there, with what no file holds: a tied head, rotary frequencies."""
        head = self.model.get_submodule(HEAD)
        if any(held.is_meta for held in (*head.parameters(), *head.buffers())):
            self._tie(head)
        for path, module in list(self.model.named_modules()):  # what a module computes of its configuration
            if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
                self.model.set_submodule(path, type(module)(config=self.model.config))
        return self.model.eval()

    def _tie(self, head: nn.Module) -> None:
        """Let the head have the weights of the embeddings."""
        embedding = self.model.get_submodule(EMBEDDING)
        if isinstance(embedding, PackedEmbedding):
            new = packed_like(head)
            new.packed = embedding.packed
            self.model.set_submodule(HEAD, new)
        else:
            head.weight = embedding.weight


def packed_like(module: nn.Module) -> PackedLinear | PackedEmbedding:
    """Return a module, still without weights, that takes the place of a dense one.

    Raises:
        ModelError: it is neither a linear layer nor embeddings.
    """
    if type(module) is nn.Linear:
        return PackedLinear(module.in_features, module.out_features, module.bias is not None)
    if type(module) is nn.Embedding:
        return PackedEmbedding(module.num_embeddings, module.embedding_dim)
    raise ModelError("it is quantised, and should be dense: the file was converted by another program")
