"""The training loop: batches, learning rates, checkpoints, held-out hit rates.

Knows: optimisation.  Does not know: what a loss is made of, what becomes of the trained weights.

Matrices are optimised by Muon (Jordan 2024; its step has AdamW's root mean square, arXiv 2502.16982), the rest by
AdamW.
"""

from collections.abc import Sequence
from math import cos, isfinite, pi
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import nn

from specinfer.common.progress import Figures, Progress
from specinfer.drafts.head_network import HeadNetwork
from specinfer.engine.gumbel import TRAINING, key
from specinfer.errors import NumericalError
from specinfer.loading import resolve_dtype
from specinfer.training.data import Batch, Texts, endless
from specinfer.training.job import Checkpoint, TrainingJob, TrainingSettings
from specinfer.training.losses import DistillationLoss, boost_weights
from specinfer.training.muon import Muon

if TYPE_CHECKING:
    from accelerate import Accelerator

REST_SHARE = 1 / 3  # AdamW's share of the learning rate
RATED = 10  # steps whose time says how many fit into the given minutes


def optimise(
    loss: DistillationLoss, texts: Texts, earlier: Sequence[HeadNetwork], job: TrainingJob, progress: Progress
) -> Figures:
    """Run the training loop from the newest checkpoint to the end.

    Args:
        loss: with the network that is trained.
        texts: to train on, and held out.
        earlier: heads whose first proposals weigh less.
        job: settings, and the folder beside which checkpoints are kept.
        progress: called after every step.

    Returns:
        ``steps``, ``history`` (dicts of step, loss, held_out) and ``hits``, the last held-out hit rates

    Raises:
        NumericalError: the loss is not a number; the last good checkpoint stays.
    """
    from accelerate import Accelerator

    settings = job.settings
    device = next(loss.parameters()).device
    accelerator = Accelerator(mixed_precision="bf16" if in_bfloat16(device) else "no", cpu=device.type == "cpu")
    optimizers = _optimizers(loss)
    checkpoint = Checkpoint(job.folder)
    step, history = checkpoint.load(loss, optimizers)
    plan = _Plan(texts, settings, accelerator, history)
    wrapped, *optimizers = accelerator.prepare(loss, *optimizers)
    batches = endless(texts, settings.tokens_per_batch, settings.seed, step * accelerator.num_processes)
    losses: list[float] = []  # since the last checkpoint
    while step < plan.steps:
        chosen = [next(batches) for _ in range(accelerator.num_processes)][accelerator.process_index]
        _set_rates(optimizers, settings.learning_rate * _schedule(step, plan.steps, settings.warmup))
        torch.manual_seed(key(settings.seed, TRAINING, step))  # a language model may have dropout
        figures = _step(accelerator, wrapped, optimizers, texts.load(chosen, accelerator.device), earlier, settings)
        if not isfinite(figures["loss"]):
            raise NumericalError(
                f"the loss is {figures['loss']} in step {step + 1}: the last good checkpoint stays in "
                f"{checkpoint.path}; go on from there with a smaller learning rate than {settings.learning_rate:g}"
            )
        losses.append(figures["loss"])
        step += 1
        plan.count(step)
        if step == plan.steps or step % settings.checkpoint_every == 0:
            figures |= {"loss": sum(losses) / len(losses), "held_out": evaluate(loss, texts)}
            history.append({"step": step, "planned": 0 if plan.minutes else plan.steps, **figures})
            losses.clear()
            if accelerator.is_main_process:
                checkpoint.save(loss, optimizers, step, history)
        progress(f"draft {job.folder.name}", step, plan.steps, figures)
    return {"steps": step, "history": history, "hits": history[-1]["held_out"]}


def in_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 natively; others are slower in it than in float32."""
    return resolve_dtype("auto", device) is torch.bfloat16


class _Plan:
    """How many steps there will be: as many as the epochs take, or as fit into the given minutes.

    The latter follows from the time of the first `RATED` steps, and stays: the learning rate is to end with the steps.
    """

    def __init__(
        self, texts: Texts, settings: TrainingSettings, accelerator: "Accelerator", history: Sequence[Figures]
    ) -> None:
        self.accelerator, self.minutes = accelerator, settings.minutes
        size = settings.tokens_per_batch
        train, held_out = (len(texts.batches(part, size, None)) for part in (texts.train, texts.held_out))
        self.steps = max(1, round(settings.epochs * train / accelerator.num_processes))
        self.measuring = held_out / settings.checkpoint_every  # held-out batches for each step
        self.begun = self.first = perf_counter()
        self.rated = 0  # steps since then
        if self.minutes and history and (planned := history[-1]["planned"]):
            self.steps, self.minutes = planned, None

    def count(self, done: int) -> None:
        """Take note of a step, given how many were done."""
        if self.minutes is None:
            return
        self.rated, self.steps = self.rated + 1, max(self.steps, done + 1)
        if self.rated == 1:  # it takes longer than others
            self.first = perf_counter()
        if self.rated == RATED:
            now = perf_counter()
            rate = (now - self.first) / (RATED - 1) * (1 + self.measuring)
            left = torch.tensor((60 * self.minutes - now + self.begun) / rate, device=self.accelerator.device)
            self.steps = done + max(0, round(self.accelerator.reduce(left, "mean").item()))  # the same everywhere
            self.minutes = None


def _optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices that are trained and AdamW for the rest; learning rates are set step by step."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    matrices = {"params": [weight for weight in weights if weight.ndim == 2], "share": 1.0}
    rest = {"params": [weight for weight in weights if weight.ndim != 2], "share": REST_SHARE}
    kind = torch.optim.Muon if in_bfloat16(weights[0].device) else Muon
    return [
        kind([matrices], weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([rest], betas=(0.9, 0.95), weight_decay=0.01),
    ]


def _set_rates(optimizers: Sequence[torch.optim.Optimizer], rate: float) -> None:
    """Give every group of weights its share of the learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["share"]


def _schedule(step: int, steps: int, warmup: float) -> float:
    """Return the share of the learning rate: linear warm-up, then a cosine down to a fiftieth."""
    first = max(1, round(warmup * steps))
    if step < first:
        return (step + 1) / first
    return 0.02 + 0.98 * (1 + cos(pi * (step - first) / max(1, steps - first))) / 2


def _step(
    accelerator: "Accelerator",
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Batch,
    earlier: Sequence[HeadNetwork],
    settings: TrainingSettings,
) -> Figures:
    """Make one step; return its loss, and how often the first proposal of the first draft step was right."""
    with accelerator.autocast():
        loss, hits = module(*batch, boost_weights(earlier, batch, settings.boost))
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
        weights = torch.ones(int(batch.learn.sum()), device=device)
        with torch.autocast(device.type, torch.bfloat16, in_bfloat16(device)):
            _, found = loss(*batch, weights)
        hits, count = hits + found.cpu(), count + len(weights)
    rates = hits.cumsum(-1) / count
    return [[round(rate, 4) for rate in row] for row in rates.tolist()]
