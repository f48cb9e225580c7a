"""What steps and passes cost on a device: tokens a second, milliseconds, kernels, host waits, memory.

A step is measured over many steps, after the first ones, between two synchronisations.  Host waits are the operations
that `torch.cuda.set_sync_debug_mode` reports; kernels are those that `torch.profiler` sees, in other steps.  Where
there is no GPU these figures are None.

Knows: decoders, sessions, transformers' generate, clocks.  Does not know: what is compared, files.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from specinfer import SpeculativeDecoder
from specinfer.attention import TreeModel, lay_out_chains, padded_width, running
from specinfer.loading import resolve_device
from specinfer.results import counts_by_depth

Row = dict[str, Any]
Ids = list[list[int]]
CUDA = torch.cuda.is_available()
WARM = 6  # steps or passes before those that are measured: kernels are chosen, graphs captured
WATCHED = 3  # steps whose host waits are counted, and as many whose kernels are
TIMED = 5  # passes of one size


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if CUDA:
        torch.cuda.synchronize()


def timed(run: Callable[[], Any]) -> float:
    """Return the seconds that something takes on host and device."""
    wait()
    started = perf_counter()
    run()
    wait()
    return perf_counter() - started


def bandwidth(size: int) -> float:
    """Return bytes a second, read and written, of a copy of so many bytes."""
    source = torch.ones(size, dtype=torch.uint8, device=resolve_device("auto"))
    target = torch.empty_like(source)
    return 2 * size / min(timed(lambda: target.copy_(source)) for _ in range(7))


def weight_bytes(model: Any) -> int:
    """Return the bytes of the weights that a pass reads; of an embedding matrix of its own, a few rows."""
    looked_up = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.nbytes
    return sum(weight.nbytes for weight in model.parameters()) - looked_up


def steps_row(
    decoder: SpeculativeDecoder, prompts: Ids, steps: int, prepared: AbstractContextManager[None]
) -> tuple[Row, Ids]:
    """Measure the steps of a greedy call.

    Args:
        decoder: of a target whose texts do not end.
        prompts: token ids of each row.
        steps: how many are measured.
        prepared: the context in which sessions read their prompts.

    Returns:
        the figures, and the new ids of each row.
    """
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    warm = 3 * WARM if decoder.graphs else WARM  # trees of different sizes are captured one by one
    most = (warm + steps + 2 * WATCHED) * (decoder.policy.max_depth + 1) + 1
    run = decoder.open(prompts, max_new_tokens=most, do_sample=False, seed=list(range(len(prompts))))
    advance = partial(next, iter(run))
    with prepared:
        for _ in range(warm):
            advance()
    emitted: list[Any] = []
    seconds = timed(lambda: emitted.extend(advance() for _ in range(steps)))
    every = [step for rows in emitted for _, step in rows]
    tokens, counts = sum(len(step.tokens) for step in every), counts_by_depth(every)
    row = {
        "tokens_per_second": tokens / seconds,
        "ms_per_step": 1e3 * seconds / steps,
        "tokens_per_pass": tokens / len(every),
        "acceptance": sum(own for own, _ in counts) / (sum(own for _, own in counts) or 1),
        **watched(advance, 1e3 * seconds / steps),
    }
    ids = [result.token_ids for result in run.results()]
    run.close()
    return row, ids


def watched(advance: Callable[[], Any], milliseconds: float) -> Row:
    """Return what a step of so many milliseconds asks of the GPU: see the module."""
    names = "host_waits_per_step", "waits", "kernel_ms_per_step", "no_kernel_share", "peak_bytes"
    if not CUDA:
        return dict.fromkeys(names)
    waits = host_waits(advance)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(WATCHED):
            advance()
        wait()
    busy = sum(event.time_range.elapsed_us() for event in profile.events() if event.device_type.name == "CUDA")
    kernels = busy / 1e3 / WATCHED
    share = max(0.0, 1 - kernels / milliseconds)
    figures = sum(waits.values()), waits, kernels, share, torch.cuda.max_memory_allocated()
    return dict(zip(names, figures, strict=True))


def host_waits(advance: Callable[[], Any]) -> dict[str, float]:
    """Return how often a step waits for the GPU, by line of the program."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(WATCHED):
                advance()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = [warned for warned in caught if "called a synchronizing" in str(warned.message)]
    found = Counter(f"{'/'.join(Path(line.filename).parts[-2:])}:{line.lineno}" for line in lines)
    return {where: count / WATCHED for where, count in found.most_common()}


def generate_row(model: Any, prompts: Ids, new: int, held: Callable[[], Any], **extra: Any) -> tuple[Row, Ids]:
    """Measure transformers' generate.

    Args:
        model: whose texts do not end.
        prompts: token ids of each row; shorter ones are padded on the left.
        new: tokens, after a run over a few.
        held: makes the cache to begin with, or None; then reading the prompts counts.
        **extra: more options.

    Returns:
        the figures, and the new ids of each row.
    """
    width, found = max(map(len, prompts)), []
    padded = [[(0, 0)] * (width - len(row)) + [(token, 1) for token in row] for row in prompts]
    ids, mask = torch.tensor(padded, device=model.device).unbind(-1)

    def run(count: int, cache: Any) -> None:
        cached = {} if cache is None else {"past_key_values": cache}
        options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, **cached, **extra}
        found[:] = model.generate(input_ids=ids, attention_mask=mask, **options)[:, width:].tolist()

    timed(partial(run, 4, held()))
    seconds = timed(partial(run, new, held()))
    return {"tokens_per_second": sum(map(len, found)) / seconds}, found


def pass_times(
    model: Any, batch: int, context: int, graphs: bool, sizes: Sequence[int], prepared: AbstractContextManager[None]
) -> dict[int, float]:
    """Return the median milliseconds of a target pass by its number of nodes."""
    target, times = TreeModel(model), {}
    with running(target), prepared:
        session = target.session(batch, context + padded_width(max(sizes)), graphs=graphs)
        session.prefill([[1] * context] * batch)
        for nodes in sizes:
            layout, seconds = lay_out_chains([[1] * nodes] * batch, target.device), []
            for _ in range(WARM + TIMED):
                seconds.append(timed(partial(session.append_last, layout)))
                session.commit([()] * batch)
            times[nodes] = 1e3 * median(seconds[WARM:])
    return times
