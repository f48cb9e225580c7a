"""Training drafts on a target's own text: EAGLE-style heads and small causal language models, one after the other.

Knows: losses, optimisation, checkpoints.  Does not know: where texts come from, command lines, cards.

A draft learns the target's distribution (Kullback-Leibler divergence, forward: cross entropy against the target's
probabilities), or the token that the target chose (SpecInfer, arXiv 2305.09781, section 3).  A head is unrolled: from
its second step on it reads its own states, as it will below the root of a tree (EAGLE-3, arXiv 2503.01840,
training-time test).  Boost-tuning (SpecInfer, section 3): to the next draft, tokens that an earlier one proposes first
count little, so that together they cover more.  A head that is trained on ends half way: at the mean of its weights
before and after (WiSE-FT, arXiv 2109.01903, section 3, alpha = 1/2).  Matrices are optimised by Muon (Jordan 2024; its
step at AdamW's root mean square, arXiv 2502.16982), the rest by AdamW.
"""

import re
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import cos, isfinite, pi
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig

from specinfer.common.files import read_json, storing, sync, write_json
from specinfer.drafts.head import HeadDraft, target_fingerprint
from specinfer.drafts.head_network import HeadNetwork, head_config
from specinfer.engine.gumbel import TRAINING, key
from specinfer.errors import InputError, NumericalError
from specinfer.training.data import Batch, Texts, endless
from specinfer.training.logits import TargetLogits

RANKS = 5  # hit rates are measured for the 1, 2, ... RANKS first proposals
RATES = 1.0, 1 / 3  # of the optimisers: shares of the learning rate
INVERSE_TEMPERATURES = [1 + step / 20 for step in range(21)]  # tried for a head, see `fit_inverse_temperature`
CALIBRATION_BATCHES = 8  # of held-out text that it is tried on
Progress = Callable[[int, int, dict[str, Any]], None]  # steps done, steps in all, figures


@dataclass(frozen=True)
class TrainingSettings:
    """How a draft is trained."""

    epochs: float = 3.0
    tokens_per_batch: int = 2048
    learning_rate: float = 4.5e-3  # of the matrices; a third of it for the rest
    warmup: float = 0.03  # share of the steps
    loss: str = "kl"  # or "token"
    unroll: int = 3  # chained draft steps of a head
    decay: float = 0.8  # weight of a step against the step before it
    boost: float = 0.2  # weight of tokens that an earlier draft proposes first
    vocabulary: int = 12_000  # tokens a head may propose
    layers: int = 1
    held_out: float = 0.02
    seed: int = 0
    checkpoint_every: int = 200  # steps


class Unrolled(nn.Module):
    """A head's loss over a batch, chained over several draft steps; in one forward, so that any wrapper may split it.

    In step s the input at token i is (state, token i): the target's state in step 1, later the head's own of step s - 1
    at token i - 1.  It attends to what a tree's node would: the target-fed tokens up to i - s + 1, then its own chain.
    """

    def __init__(self, head: HeadNetwork, target: Any, settings: TrainingSettings) -> None:
        super().__init__()
        self.head, self.settings = head, settings
        self.target_logits = TargetLogits(target, head.token_ids)

    def forward(self, ids: Tensor, states: Tensor, learn: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the hits, long (unroll, RANKS): proposals of rank k that were the target's choice.

        Args:
            ids: (B, T).
            states: (B, T, K, H), the last layer being the target's output.
            learn: (B, T - 1) bool, tokens i + 1 to learn.
            weights: (N,) of those tokens.
        """
        head, settings = self.head, self.settings
        columns = torch.arange(ids.shape[1] - 1, device=ids.device)
        position_ids = columns.expand(len(ids), -1)
        keep = learn.flatten().nonzero()[:, 0]
        goal = self._goal(ids[:, 1:].flatten()[keep], states[:, 1:, -1].flatten(0, 1)[keep])
        cache, own = DynamicCache(), None
        loss, hits = states.new_zeros((), dtype=torch.float32), []
        for step in range(settings.unroll):
            output = head(
                ids[:, :-1],
                _chained_mask(columns, step)[None, None],
                position_ids,
                cache,
                target_states=states[:, :-1] if own is None else None,
                draft_states=own,
                logits_to_keep=columns[:0],
            )
            (hidden,) = output.hidden_states
            logits = head.logits(hidden.flatten(0, 1)[keep])
            loss = loss + settings.decay**step * (_loss(logits, *goal) * weights).sum() / weights.sum()
            hits.append(_hits(logits, goal[0]))
            own = functional.pad(hidden[:, :-1], (0, 0, 1, 0))
        return loss, torch.stack(hits)

    def _goal(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return tokens (N,) in the head's vocabulary, -1 = not in it, and the target's distribution there, (N, V')."""
        ids = self.head.token_ids
        places = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
        known = torch.where(ids[places] == tokens, places, -1)
        if self.settings.loss != "kl":
            return known, None
        with torch.no_grad():
            return known, self.target_logits(states).float().softmax(-1)


class SoftCrossEntropy(torch.autograd.Function):
    """Cross entropy (N,) of logits (N, V) against distributions (N, V).

    The gradient, softmax(logits) - distribution, is made on the way forward: a third of autograd's memory traffic,
    which is what training a small head on a large vocabulary spends its time on.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, distribution: Tensor) -> Tensor:
        """Return the cross entropies, float32."""
        values = logits.float()
        total = values.logsumexp(-1, keepdim=True)
        expected = torch.linalg.vecdot(values, distribution)
        ctx.save_for_backward((values - total).exp_().sub_(distribution).to(logits.dtype))
        return total[:, 0] - expected

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits."""
        (difference,) = ctx.saved_tensors
        return difference * gradient.to(difference.dtype)[:, None], None


def _loss(logits: Tensor, tokens: Tensor, distribution: Tensor | None) -> Tensor:
    """Return the loss (N,) of logits (N, V): against distributions if given, else tokens, of which -1 is none."""
    if distribution is not None:
        return SoftCrossEntropy.apply(logits, distribution)
    return functional.cross_entropy(logits.float(), tokens, ignore_index=-1, reduction="none")


def _chained_mask(columns: Tensor, step: int) -> Tensor:
    """Return (T, (step + 1) T) bool: what each token attends to in a chained step, 0 = the first."""
    lag = columns[:, None] - columns  # (T, T) how far a key lies behind the query
    return torch.cat([lag >= step, *(lag == step - earlier for earlier in range(1, step + 1))], 1)


def _hits(logits: Tensor, tokens: Tensor) -> Tensor:
    top = logits.detach().topk(RANKS, -1).indices
    return (top == tokens[:, None]).sum(0)


class Plain(nn.Module):
    """A causal language model's loss over a batch; the arguments are those of `Unrolled`."""

    def __init__(self, model: Any, target: Any, settings: TrainingSettings) -> None:
        super().__init__()
        self.model, self.settings = model, settings
        self.target_logits, self.target_logits = TargetLogits(model), TargetLogits(target)

    def forward(self, ids: Tensor, states: Tensor, learn: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the hits, long (1, RANKS)."""
        keep = learn.flatten().nonzero()[:, 0]
        hidden = self.model.base_model(ids[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)[keep]
        logits = self.target_logits(hidden)
        tokens, distribution = ids[:, 1:].flatten()[keep], None
        if self.settings.loss == "kl":
            with torch.no_grad():
                distribution = self.target_logits(states[:, 1:, -1].flatten(0, 1)[keep]).float().softmax(-1)
        return (_loss(logits, tokens, distribution) * weights).sum() / weights.sum(), _hits(logits, tokens)[None]


class EarlierDrafts:
    """The heads trained before, as judges of what is hard."""

    def __init__(self, folders: Sequence[Path], target: Any, settings: TrainingSettings) -> None:
        self.heads = [HeadDraft.load(folder).head.to(target.dtype).bind(target) for folder in folders]
        self.settings = settings

    @torch.no_grad()
    def weights(self, batch: Batch) -> Tensor:
        """Return the weight (N,) of every token to learn: small where an earlier draft proposes it first."""
        tokens = batch.ids[:, 1:][batch.learn]
        weights = torch.ones(len(tokens), device=tokens.device)
        for head in self.heads:
            first = head.token_ids[_first_logits(head, batch).argmax(-1)]
            weights[first == tokens] = self.settings.boost
        return weights


def _first_logits(head: HeadNetwork, batch: Batch) -> Tensor:
    """Return a head's logits (N, V') of the N tokens to learn, fed with the target's states."""
    columns = torch.arange(batch.ids.shape[1] - 1, device=batch.ids.device)
    output = head(
        batch.ids[:, :-1],
        (columns[:, None] >= columns)[None, None],
        columns.expand(len(batch.ids), -1),
        target_states=batch.states[:, :-1],
        logits_to_keep=columns[:0],
    )
    return head.logits(output.hidden_states[0][batch.learn])


def train_head(
    target: Any,
    tokenizer: Any,
    shards: Sequence[Path],
    aux_layers: Sequence[int],
    out: Path,
    settings: TrainingSettings,
    earlier: Sequence[Path] = (),
    start: Path | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Train one EAGLE-style head, or go on with its training; write it to ``out``; return its figures.

    Args:
        target: the target model.
        tokenizer: its tokenizer.
        shards: texts with states (`data`).
        aux_layers: which hidden states those are; the last must be the target's output.
        out: folder for the head; its checkpoints go beside it.
        settings: how.
        earlier: folders of heads that this one shall complement.
        start: folder of a head that is trained on, and whose sizes and vocabulary this one has; None begins anew.
        progress: called after every step.

    Raises:
        NumericalError: the loss is not a number; the last good checkpoint stays.
    """
    torch.manual_seed(key(settings.seed, TRAINING))
    texts = Texts(shards, settings.held_out, settings.seed)
    counts = texts.counts(target.get_input_embeddings().weight.shape[0])
    head = HeadDraft.load(start).head if start else _new_head(target, aux_layers, settings, counts, earlier)
    judges, model = EarlierDrafts(earlier, target, settings), Unrolled(head.bind(target), target, settings)
    figures = _optimise(model, texts, judges, out, settings, progress)
    if start:
        _average_with_start(head, start)
        figures["hits"] = evaluate(model, texts, settings)
    figures["coverage"] = counts[head.token_ids.cpu()].sum().item() / counts.sum().item()
    figures["inverse_temperature"] = fit_inverse_temperature(model, texts)
    if _writes():
        HeadDraft(head, target_fingerprint(target, tokenizer), out.name, figures["inverse_temperature"]).save(out)
    return figures


@torch.no_grad()
def fit_inverse_temperature(model: Unrolled, texts: Texts) -> float:
    """Return the inverse_temperature under which a head best foretells choices by noise that it shares.

    At held-out places, tokens are chosen anew by the target's distribution and Gumbel noise.  Of
    `INVERSE_TEMPERATURES`, that one is returned with which the head's first candidate is right most often (see
    `ModelDraftSession.top`).
    """
    head, settings = model.head, model.settings
    device = head.mix.weight.device
    chance = torch.Generator(device).manual_seed(key(settings.seed, TRAINING))
    inverse_temperature = torch.tensor(INVERSE_TEMPERATURES, device=device)
    hits = torch.zeros_like(inverse_temperature)
    for chosen in texts.batches(texts.held_out, settings.tokens_per_batch, Random(settings.seed))[:CALIBRATION_BATCHES]:
        batch = Batch(*(column.to(device) for column in texts.load(chosen)))
        with torch.autocast(device.type, torch.bfloat16):
            q, p = _first_logits(head, batch).float(), model.target_logits(batch.states[:, 1:, -1][batch.learn]).float()
        noise = -torch.empty_like(p).exponential_(generator=chance).log()
        right = (p + noise).argmax(-1)
        hits += torch.stack([((s * q + noise).argmax(-1) == right).sum() for s in inverse_temperature])
    return round(float(inverse_temperature[hits.argmax()]), 2)


def train_causal_lm(
    target: Any,
    tokenizer: Any,
    shards: Sequence[Path],
    out: Path,
    settings: TrainingSettings,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Train a small causal language model, the target's first and last layers, and write it as transformers does.

    Its embedding and output matrices are the target's and stay as they are.  Arguments and errors as `train_head`.
    """
    torch.manual_seed(key(settings.seed, TRAINING))
    texts = Texts(shards, settings.held_out, settings.seed)
    model = _cut(target, settings.layers)
    judges = EarlierDrafts((), target, settings)
    figures = _optimise(Plain(model, target, settings), texts, judges, out, settings, progress)
    if _writes():
        with storing(out):
            model.to(torch.bfloat16).save_pretrained(out)
            tokenizer.save_pretrained(out)
            sync(*out.iterdir(), out)
    return figures


def _cut(target: Any, layers: int) -> Any:
    """Return a copy of the target, in float32, of its first ``layers // 2`` layers and its last ones."""
    config = deepcopy(target.config)
    kept = [*range(layers // 2), *range(config.num_hidden_layers - layers + layers // 2, config.num_hidden_layers)]
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]
    model = type(target)(config).to(target.device)
    prefix = re.compile(r"^(.*?\.(?:layers|h|blocks)\.)(\d+)(\..*)$")
    weights = {}
    for name, weight in target.state_dict().items():
        match = prefix.match(name)
        if match and int(match[2]) not in kept:
            continue
        weights[f"{match[1]}{kept.index(int(match[2]))}{match[3]}" if match else name] = weight.float()
    model.load_state_dict(weights, strict=False)
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        part.requires_grad_(False)
    return model


def _new_head(
    target: Any, aux_layers: Sequence[int], settings: TrainingSettings, counts: Tensor, earlier: Sequence[Path]
) -> HeadNetwork:
    """Return a head that may propose the most frequent tokens; counts are of all, (V,)."""
    token_ids = counts.argsort(descending=True, stable=True)[: settings.vocabulary].sort().values
    head = HeadNetwork(_head_config(target, aux_layers, settings.layers, len(token_ids)), token_ids)
    _start_from(head, target, earlier)
    return head


@torch.no_grad()
def _average_with_start(head: HeadNetwork, start: Path) -> None:
    """Give a head the mean of its weights and of those it was trained on from."""
    before = load_file(start / "model.safetensors")
    for name, weight in head.named_parameters():
        if name in before:  # borrowed weights are not
            weight.lerp_(before[name].to(weight), 0.5)


def _head_config(target: Any, aux_layers: Sequence[int], layers: int, vocabulary: int) -> LlamaConfig:
    """Return the configuration of a head with layers of the target's size."""
    config = target.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    return head_config(
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        num_hidden_layers=layers,
        max_position_embeddings=getattr(config, "max_position_embeddings", None) or 4096,
        vocab_size=vocabulary,
        rms_norm_eps=1e-6,
        aux_layers=list(aux_layers),
    )


def _start_from(head: HeadNetwork, target: Any, earlier: Sequence[Path]) -> None:
    """Start from the first draft's weights, layers that it lacks as the identity; the first from the target's last."""
    if earlier:
        weights = load_file(earlier[0] / "model.safetensors")
        head.load_state_dict({name: w.float() for name, w in weights.items() if name != "token_ids"}, strict=False)
        for index, layer in enumerate(head.layers):
            if f"layers.{index}.mlp.down_proj.weight" not in weights:
                for name in ("self_attn.o_proj", "mlp.down_proj"):
                    nn.init.zeros_(layer.get_parameter(f"{name}.weight"))
        return
    layers = getattr(getattr(target, "model", None), "layers", None)
    for layer, own in zip(reversed(layers or ()), reversed(head.layers), strict=False):
        shapes = {name: weight.shape for name, weight in own.state_dict().items()}
        weights = {n: w.float() for n, w in layer.state_dict().items() if shapes.get(n) == w.shape}
        own.load_state_dict(weights, strict=False)


def _optimise(
    model: nn.Module, texts: Texts, judges: Any, out: Path, settings: TrainingSettings, progress: Progress
) -> dict[str, Any]:
    """Run the training loop from the newest checkpoint to the end; return losses and held-out hit rates."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=next(model.parameters()).device.type == "cpu")
    optimizers = _optimizers(model)
    per_epoch = len(texts.batches(texts.train, settings.tokens_per_batch, None))
    share = accelerator.num_processes
    steps = max(1, round(settings.epochs * per_epoch / share))
    checkpoint = Checkpoint(out)
    done, history = checkpoint.load(model, optimizers)
    wrapped, *optimizers = accelerator.prepare(model, *optimizers)
    batches = endless(texts, settings.tokens_per_batch, settings.seed, done * share)
    losses: list[float] = []  # since the last checkpoint
    for step in range(done, steps):
        batch = [next(batches) for _ in range(share)][accelerator.process_index]
        rate = settings.learning_rate * _schedule(step, steps, settings.warmup)
        for optimizer, part in zip(optimizers, RATES, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * part
        figures = _step(accelerator, wrapped, optimizers, texts.load(batch), judges)
        if not isfinite(figures["loss"]):
            raise NumericalError(
                f"the loss is {figures['loss']} in step {step + 1}: the last good checkpoint stays in "
                f"{checkpoint.folder}; go on from there with a smaller learning rate than {settings.learning_rate:g}"
            )
        losses.append(figures["loss"])
        if step + 1 == steps or (step + 1) % settings.checkpoint_every == 0:
            figures |= {"loss": sum(losses) / len(losses), "held_out": evaluate(model, texts, settings)}
            history.append({"step": step + 1, **figures})
            losses.clear()
            if accelerator.is_main_process:
                with storing(checkpoint.folder):
                    checkpoint.save(model, optimizers, step + 1, history)
        progress(step + 1, steps, figures)
    return {"steps": steps, "history": history, "hits": history[-1]["held_out"]}


def _optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices that are trained and AdamW for the rest; learning rates are set step by step."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    matrices, rest = [w for w in weights if w.ndim == 2], [w for w in weights if w.ndim != 2]
    return [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def _writes() -> bool:
    """Whether this process is the one of all that writes."""
    from accelerate import PartialState

    return bool(PartialState().is_main_process)


def _step(accelerator: Any, model: nn.Module, optimizers: Sequence[Any], batch: Batch, judges: Any) -> dict[str, Any]:
    batch = Batch(*(column.to(accelerator.device) for column in batch))
    with accelerator.autocast():
        loss, hits = model(*batch, judges.weights(batch))
    if torch.isfinite(loss):
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"loss": loss.item(), "top1": (hits[0, 0] / batch.learn.sum()).item()}


@torch.no_grad()
def evaluate(model: nn.Module, texts: Texts, settings: TrainingSettings) -> list[list[float]]:
    """Return held-out hit rates [draft step][k - 1]: how often the target's token was among the k first proposals."""
    device = next(model.parameters()).device
    hits, count = torch.zeros(()), 0
    for chosen in texts.batches(texts.held_out, settings.tokens_per_batch, None):
        batch = Batch(*(column.to(device) for column in texts.load(chosen)))
        number = int(batch.learn.sum())
        with torch.autocast(device.type, torch.bfloat16):
            hits = hits + model(*batch, torch.ones(number, device=device))[1].cpu()
        count += number
    return [[round(rate, 4) for rate in row] for row in (hits.cumsum(-1) / count).tolist()]


def _schedule(step: int, steps: int, warmup: float) -> float:
    """Return the share of the learning rate: linear warm-up, then a cosine down to a fiftieth."""
    first = max(1, round(warmup * steps))
    if step < first:
        return (step + 1) / first
    return 0.02 + 0.98 * (1 + cos(pi * (step - first) / max(1, steps - first))) / 2


class Checkpoint:
    """Weights, optimisers and history of a training under way, in safetensors and JSON; replaced as a whole."""

    def __init__(self, out: Path) -> None:
        self.folder = out.parent / f"{out.name}.checkpoint"

    def save(self, model: nn.Module, optimizers: Sequence[Any], step: int, history: list[Any]) -> None:
        """Write beside, then swap."""
        fresh = self.folder.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        tensors = {f"model.{name}": weight for name, weight in model.state_dict().items()}
        for place, optimizer in enumerate(optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{place}.{index}.{name}": value for name, value in state.items()}
        apart = {name: value.detach().clone().contiguous() for name, value in tensors.items()}  # tied ones, too
        save_file(apart, fresh / "state.safetensors")
        sync(fresh / "state.safetensors")
        write_json(fresh / "state.json", {"step": step, "history": history})  # last, and whole: what is here is good
        shutil.rmtree(self.folder, ignore_errors=True)
        fresh.rename(self.folder)

    def load(self, model: nn.Module, optimizers: Sequence[Any]) -> tuple[int, list[Any]]:
        """Return the steps done and the history, (0, []) where nothing was saved.

        Raises:
            InputError: what was saved is damaged.
        """
        fresh = self.folder.with_suffix(".new")
        if not self.folder.exists() and (fresh / "state.json").exists():
            fresh.rename(self.folder)  # killed between the two halves of the swap
        if not (self.folder / "state.json").exists():
            return 0, []
        try:
            return self._restored(model, optimizers)
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:120]
            raise InputError(f"{self.folder} is damaged ({reason}): remove it, and training begins anew") from error

    def _restored(self, model: nn.Module, optimizers: Sequence[Any]) -> tuple[int, list[Any]]:
        record = read_json(self.folder / "state.json")
        tensors = load_file(self.folder / "state.safetensors")
        model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, place, index, field = name.split(".", 3)
                states[int(place)].setdefault(int(index), {})[field] = tensor
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        return record["step"], record["history"]
