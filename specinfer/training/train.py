"""Training drafts on a target's own text: EAGLE-style heads and small causal language models, one after the other.

Knows: losses, optimisation.  Does not know: where texts come from, command lines, cards.

A draft learns the target's distribution (forward Kullback-Leibler divergence: cross entropy against the target's
probabilities), or the token that the target chose (SpecInfer, arXiv 2305.09781, section 3).  A head is unrolled: from
its second step on it reads its own states, as it will below the root of a tree (EAGLE-3, arXiv 2503.01840,
training-time test).  Boost-tuning (SpecInfer, section 3): tokens that an earlier draft proposes first weigh little for
the next draft, so that together they cover more.  A head whose training goes on ends at the mean of its weights before
and after (WiSE-FT, arXiv 2109.01903, section 3, alpha = 1/2).  Matrices are optimised by Muon (Jordan 2024; its step
has AdamW's root mean square, arXiv 2502.16982), the rest by AdamW.
"""

import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from math import cos, isfinite, pi
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from specinfer.common.files import storing, sync
from specinfer.drafts.head import HeadDraft, target_fingerprint
from specinfer.drafts.head_network import HeadNetwork, head_config
from specinfer.engine.gumbel import TRAINING, key
from specinfer.errors import NumericalError
from specinfer.training.data import Batch, Texts, endless
from specinfer.training.job import Checkpoint, ProgressCallback, TrainingJob, TrainingSettings, processes
from specinfer.training.logits import TargetLogits

RANKS = 5  # hit rates are measured for the 1, 2, ... RANKS first proposals
RATES = 1.0, 1 / 3  # learning rates of Muon and AdamW, as shares of the setting
INVERSE_TEMPERATURES = [1 + step / 20 for step in range(21)]  # tried for a head, see `fit_inverse_temperature`
CALIBRATION_BATCHES = 8  # of held-out text that they are tried on
LAYER_NUMBER = re.compile(r"(\.(?:layers|h|blocks)\.)(\d+)")  # in the names of a model's weights


# ---- losses ----


class DistillationLoss(nn.Module):
    """A draft's loss over a batch, as one ``forward``, so that any wrapper may distribute it.

    Args:
        target: the target model.
        settings: how the draft is trained.
        token_ids: (V',) ascending, the tokens that the draft may propose; None = all.
    """

    def __init__(self, target: Any, settings: TrainingSettings, token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.settings, self.token_ids = settings, token_ids
        self.target_logits = TargetLogits(target, token_ids)

    def draft_logits(self, ids: Tensor, states: Tensor, keep: Tensor) -> Iterator[Tensor]:
        """Yield the draft's logits (N, V') of the N tokens to learn, one draft step after the other."""
        raise NotImplementedError

    def forward(self, ids: Tensor, states: Tensor, learn: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and int64 (steps, RANKS) how often the target's choice was the proposal of each rank.

        Args:
            ids: (B, T).
            states: (B, T, K, H), the last layer being the target's output.
            learn: (B, T - 1) bool, tokens i + 1 to learn.
            weights: (N,) of those tokens.
        """
        keep = learn.flatten().nonzero()[:, 0]
        tokens, distribution = self.goal(ids[:, 1:].flatten()[keep], states[:, 1:, -1].flatten(0, 1)[keep])
        loss, hits = states.new_zeros((), dtype=torch.float32), []
        for step, logits in enumerate(self.draft_logits(ids, states, keep)):
            if distribution is None:
                losses = functional.cross_entropy(logits.float(), tokens, ignore_index=-1, reduction="none")
            else:
                losses = SoftCrossEntropy.apply(logits, distribution)
            loss = loss + self.settings.decay**step * (losses * weights).sum() / weights.sum()
            hits.append((logits.detach().topk(RANKS, -1).indices == tokens[:, None]).sum(0))
        return loss, torch.stack(hits)

    def goal(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the N tokens as indices in the draft's vocabulary, -1 = not in it, and the target's distribution.

        The distribution (N, V') is over the draft's vocabulary; None where the draft learns tokens.
        """
        if self.token_ids is not None:
            indices = torch.searchsorted(self.token_ids, tokens).clamp(max=len(self.token_ids) - 1)
            tokens = torch.where(self.token_ids[indices] == tokens, indices, -1)
        if self.settings.loss != "kl":
            return tokens, None
        with torch.no_grad():
            return tokens, self.target_logits(states).float().softmax(-1)


class HeadLoss(DistillationLoss):
    """A head's loss, unrolled over several draft steps."""

    def __init__(self, head: HeadNetwork, target: Any, settings: TrainingSettings) -> None:
        super().__init__(target, settings, head.token_ids)
        self.head = head

    def draft_logits(self, ids: Tensor, states: Tensor, keep: Tensor) -> Iterator[Tensor]:
        """See `unrolled_logits`."""
        return unrolled_logits(self.head, ids, states, keep, self.settings.unroll)


class CausalLMLoss(DistillationLoss):
    """A causal language model's loss: one draft step."""

    def __init__(self, model: Any, target: Any, settings: TrainingSettings) -> None:
        super().__init__(target, settings)
        self.model, self.model_logits = model, TargetLogits(model)

    def draft_logits(self, ids: Tensor, states: Tensor, keep: Tensor) -> Iterator[Tensor]:
        """Yield once; the target's states are not read."""
        hidden = self.model.base_model(ids[:, :-1], use_cache=False).last_hidden_state
        yield self.model_logits(hidden.flatten(0, 1)[keep])


def unrolled_logits(head: HeadNetwork, ids: Tensor, states: Tensor, keep: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield a head's logits (N, V') of the N kept tokens in each of several chained draft steps.

    In step s the input at token i is (state, token i).  In step 1 the state is the target's, later the head's own of
    step s - 1 at token i - 1.  It attends to what a tree's node would: tokens with the target's states up to i - s + 1,
    then its own chain.

    Args:
        head: bound to the target.
        ids: (B, T).
        states: (B, T, K, H) the target's.
        keep: (N,) which of the B (T - 1) flattened columns.
        steps: how many.
    """
    columns = torch.arange(ids.shape[1] - 1, device=ids.device)
    position_ids = columns.expand(len(ids), -1)
    cache, draft_states = DynamicCache(), None
    for step in range(steps):
        mask = _chained_mask(columns, step)[None, None]
        output = head(ids[:, :-1], mask, position_ids, cache, states[:, :-1], draft_states, logits_to_keep=columns[:0])
        (hidden,) = output.hidden_states
        yield head.logits(hidden.flatten(0, 1)[keep])
        draft_states = functional.pad(hidden[:, :-1], (0, 0, 1, 0))


def _first_logits(head: HeadNetwork, batch: Batch) -> Tensor:
    """Return a head's logits (N, V') of the N tokens to learn in its first draft step."""
    return next(unrolled_logits(head, batch.ids, batch.states, batch.learn.flatten().nonzero()[:, 0], 1))


def _chained_mask(columns: Tensor, step: int) -> Tensor:
    """Return (T, (step + 1) T) bool: what each token attends to in a chained step, 0 = the first."""
    lag = columns[:, None] - columns  # (T, T) how far a key lies behind the query
    return torch.cat([lag >= step, *(lag == step - earlier for earlier in range(1, step + 1))], 1)


class SoftCrossEntropy(torch.autograd.Function):
    """Cross entropy (N,) of logits (N, V) against distributions (N, V).

    ``forward`` already makes the gradient, softmax(logits) - distribution.  This takes a third of autograd's memory
    traffic, on which the training of a small head with a large vocabulary spends its time.
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


@torch.no_grad()
def boost_weights(earlier: Sequence[HeadNetwork], batch: Batch, boost: float) -> Tensor:
    """Return the weight (N,) of every token to learn: ``boost`` where an earlier head proposes it first, else 1."""
    tokens = batch.ids[:, 1:][batch.learn]
    weights = torch.ones(len(tokens), device=tokens.device)
    for head in earlier:
        weights[head.token_ids[_first_logits(head, batch).argmax(-1)] == tokens] = boost
    return weights


# ---- heads ----


def train_head(
    target: Any, tokenizer: Any, shards: Sequence[Path], job: TrainingJob, progress: ProgressCallback
) -> dict[str, Any]:
    """Train one EAGLE-style head, or go on with its training; write it to the job's folder; return its figures.

    Args:
        target: the target model.
        tokenizer: its tokenizer.
        shards: texts with states (`data`); the last of the states must be the target's output.
        job: what to train.
        progress: called after every step.

    Raises:
        NumericalError: the loss is not a number; the last good checkpoint stays.
    """
    settings = job.settings
    torch.manual_seed(key(settings.seed, TRAINING))
    texts = Texts(shards, settings.held_out, settings.seed)
    counts = texts.counts(target.get_input_embeddings().weight.shape[0])
    if job.start:
        head = HeadDraft.load(job.start).head
    else:
        token_ids = counts.argsort(descending=True, stable=True)[: settings.vocabulary].sort().values
        head = new_head(target, job.aux_layers, settings.layers, token_ids, job.earlier)
    earlier = [HeadDraft.load(folder).head.to(target.dtype).bind(target) for folder in job.earlier]
    loss = HeadLoss(head.bind(target), target, settings)
    figures = _optimise(loss, texts, earlier, job, progress)
    if job.start:
        _average_with_start(head, job.start)
        figures["hits"] = evaluate(loss, texts)
    figures["coverage"] = counts[head.token_ids.cpu()].sum().item() / counts.sum().item()
    figures["inverse_temperature"] = fit_inverse_temperature(loss, texts)
    if processes(target.device).is_main_process:
        fingerprint = target_fingerprint(target, tokenizer)
        HeadDraft(head, fingerprint, job.folder.name, figures["inverse_temperature"]).save(job.folder)
    return figures


def new_head(
    target: Any, aux_layers: Sequence[int], layers: int, token_ids: Tensor, earlier: Sequence[Path] = ()
) -> HeadNetwork:
    """Return a head with layers of the target's size.

    It starts from the first draft's weights; layers that the first draft does not have start as the identity.  The
    first draft itself starts from the target's last layers.
    """
    config = target.config.get_text_config(decoder=True)
    size, heads = config.hidden_size, config.num_attention_heads
    defaults = {"intermediate_size": 4 * size, "num_key_value_heads": heads, "max_position_embeddings": 4096}
    sizes = {name: getattr(config, name, None) or default for name, default in defaults.items()}
    sizes |= {"hidden_size": size, "num_attention_heads": heads}
    sizes |= {"num_hidden_layers": layers, "vocab_size": len(token_ids)}
    head = HeadNetwork(head_config(**sizes, rms_norm_eps=1e-6, aux_layers=list(aux_layers)), token_ids)
    if earlier:
        weights = load_file(earlier[0] / "model.safetensors")
        del weights["token_ids"]
        head.load_state_dict(weights, strict=False)
        for index, layer in enumerate(head.layers):
            if f"layers.{index}.mlp.down_proj.weight" not in weights:
                nn.init.zeros_(layer.get_parameter("self_attn.o_proj.weight"))
                nn.init.zeros_(layer.get_parameter("mlp.down_proj.weight"))
        return head
    target_layers = getattr(getattr(target, "model", None), "layers", None)
    for source, layer in zip(reversed(target_layers or ()), reversed(head.layers), strict=False):
        shapes = {name: weight.shape for name, weight in layer.state_dict().items()}
        weights = {name: w for name, w in source.state_dict().items() if shapes.get(name) == w.shape}
        layer.load_state_dict(weights, strict=False)
    return head


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
        with torch.autocast(device.type, torch.bfloat16):
            q, p = _first_logits(head, batch).float(), loss.target_logits(batch.states[:, 1:, -1][batch.learn]).float()
        noise = -torch.empty_like(p).exponential_(generator=generator).log()
        choices = (p + noise).argmax(-1)
        hits += torch.stack([((s * q + noise).argmax(-1) == choices).sum() for s in inverse_temperatures])
    return round(float(inverse_temperatures[hits.argmax()]), 2)


# ---- small language models ----


def train_causal_lm(
    target: Any, tokenizer: Any, shards: Sequence[Path], job: TrainingJob, progress: ProgressCallback
) -> dict[str, Any]:
    """Train a small causal language model, the target's first and last layers, and write it as transformers does.

    Its embedding and output matrices are the target's and are not trained.  Arguments and errors as for `train_head`.
    """
    settings, out = job.settings, job.folder
    torch.manual_seed(key(settings.seed, TRAINING))
    texts = Texts(shards, settings.held_out, settings.seed)
    model = _outer_layers(target, settings.layers)
    figures = _optimise(CausalLMLoss(model, target, settings), texts, (), job, progress)
    if processes(target.device).is_main_process:
        with storing(out):
            model.to(torch.bfloat16).save_pretrained(out)
            tokenizer.save_pretrained(out)
            sync(*out.iterdir(), out)
    return figures


def _outer_layers(target: Any, layers: int) -> Any:
    """Return a copy of the target, in float32, with its first ``layers // 2`` layers and its last ones."""
    config = deepcopy(target.config)
    kept = [*range(layers // 2), *range(config.num_hidden_layers - layers + layers // 2, config.num_hidden_layers)]
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]
    model = type(target)(config).to(target.device)
    weights = target.state_dict()
    names = {name: LAYER_NUMBER.sub(lambda m: f"{m[1]}{kept[int(m[2])]}", name, count=1) for name in model.state_dict()}
    model.load_state_dict({name: weights[source] for name, source in names.items()})
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        part.requires_grad_(False)
    return model


# ---- optimisation ----


def _optimise(
    loss: DistillationLoss, texts: Texts, earlier: Sequence[HeadNetwork], job: TrainingJob, progress: ProgressCallback
) -> dict[str, Any]:
    """Run the training loop from the newest checkpoint to the end; return losses and held-out hit rates."""
    from accelerate import Accelerator

    settings = job.settings
    accelerator = Accelerator(mixed_precision="bf16", cpu=next(loss.parameters()).device.type == "cpu")
    optimizers = _optimizers(loss)
    processes = accelerator.num_processes
    batches_per_epoch = len(texts.batches(texts.train, settings.tokens_per_batch, None))
    steps = max(1, round(settings.epochs * batches_per_epoch / processes))
    checkpoint = Checkpoint(job.folder)
    done, history = checkpoint.load(loss, optimizers)
    wrapped, *optimizers = accelerator.prepare(loss, *optimizers)
    batches = endless(texts, settings.tokens_per_batch, settings.seed, done * processes)
    losses: list[float] = []  # since the last checkpoint
    for step in range(done, steps):
        chosen = [next(batches) for _ in range(processes)][accelerator.process_index]
        rate = settings.learning_rate * _schedule(step, steps, settings.warmup)
        for optimizer, share in zip(optimizers, RATES, strict=True):
            optimizer.param_groups[0]["lr"] = rate * share
        batch = texts.load(chosen, accelerator.device)
        with accelerator.autocast():
            weights = boost_weights(earlier, batch, settings.boost)
        figures = _step(accelerator, wrapped, optimizers, batch, weights)
        if not isfinite(figures["loss"]):
            raise NumericalError(
                f"the loss is {figures['loss']} in step {step + 1}: the last good checkpoint stays in "
                f"{checkpoint.folder}; go on from there with a smaller learning rate than {settings.learning_rate:g}"
            )
        losses.append(figures["loss"])
        if step + 1 == steps or (step + 1) % settings.checkpoint_every == 0:
            figures |= {"loss": sum(losses) / len(losses), "held_out": evaluate(loss, texts)}
            history.append({"step": step + 1, **figures})
            losses.clear()
            if accelerator.is_main_process:
                checkpoint.save(loss, optimizers, step + 1, history)
        progress(f"draft {job.folder.name}", step + 1, steps, figures)
    return {"steps": steps, "history": history, "hits": history[-1]["held_out"]}


def _optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices that are trained and AdamW for the rest; learning rates are set step by step."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    matrices, rest = [w for w in weights if w.ndim == 2], [w for w in weights if w.ndim != 2]
    return [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def _schedule(step: int, steps: int, warmup: float) -> float:
    """Return the share of the learning rate: linear warm-up, then a cosine down to a fiftieth."""
    first = max(1, round(warmup * steps))
    if step < first:
        return (step + 1) / first
    return 0.02 + 0.98 * (1 + cos(pi * (step - first) / max(1, steps - first))) / 2


def _step(
    accelerator: Any, module: nn.Module, optimizers: Sequence[Any], batch: Batch, weights: Tensor
) -> dict[str, Any]:
    with accelerator.autocast():
        loss, hits = module(*batch, weights)
    if torch.isfinite(loss):
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"loss": loss.item(), "top1": (hits[0, 0] / batch.learn.sum()).item()}


@torch.no_grad()
def evaluate(loss: DistillationLoss, texts: Texts) -> list[list[float]]:
    """Return held-out hit rates [draft step][k - 1]: how often the target's token was among the k first proposals."""
    device = next(loss.parameters()).device
    hits, count = torch.zeros(()), 0
    for chosen in texts.batches(texts.held_out, loss.settings.tokens_per_batch, None):
        batch = texts.load(chosen, device)
        number = int(batch.learn.sum())
        with torch.autocast(device.type, torch.bfloat16):
            hits = hits + loss(*batch, torch.ones(number, device=device))[1].cpu()
        count += number
    return [[round(rate, 4) for rate in row] for row in (hits.cumsum(-1) / count).tolist()]
