"""What passes, steps and texts cost on a device: milliseconds, kernels, host waits, tokens a second, memory.

Host waits are the operations that `torch.cuda.set_sync_debug_mode` reports; kernels are those that `torch.profiler`
sees, in other steps.  Where there is no GPU these figures are None.

Knows: decoders, sessions, transformers' generate, clocks.  Does not know: what is compared, files.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from device import CUDA, kernels, timed
from report import Row, free

from specinfer import SpeculativeDecoder
from specinfer.attention import TreeModel, TreeSession, lay_out_chains, running
from specinfer.common.tensors import padded_width
from specinfer.drafts.language_model import HeadDraftSession
from specinfer.engine import loop, sequence

Ids = list[list[int]]
WARM = 6  # steps or passes before those that are measured: kernels are chosen, graphs captured
WATCHED = 3  # steps whose host waits are counted, and as many whose kernels are
TIMED = 5  # passes of one size
PARTS = {  # of a step, and the functions that are them
    "propose": [(loop, "propose")],
    "score": [(TreeSession, "score")],  # until it is launched
    "choose": [(sequence, "_choices")],  # waits for the pass
    "commit": [(TreeSession, "commit"), (HeadDraftSession, "commit")],
}


def weight_bytes(model: Any) -> int:
    """Return the bytes of the weights that a pass reads; of an embedding matrix of its own, a few rows."""
    looked_up = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.nbytes
    return sum(weight.nbytes for weight in model.parameters()) - looked_up


def pass_rows(target: TreeModel, graphs: bool, context: int, sizes: Sequence[int], rate: float) -> list[Row]:
    """Measure passes of one row over different numbers of nodes.

    Args:
        target: compiled or not.
        graphs: whether passes are replayed.
        context: tokens before the nodes.
        sizes: numbers of nodes.
        rate: bytes a second.

    Returns:
        by number of nodes the median milliseconds until a pass is launched and until it is done; the share of the
        latter that reading the weights takes; kernels of a pass, and their milliseconds.
    """
    rows, bound = [], weight_bytes(target.model) / rate
    with running(target):
        session = target.session(1, context + padded_width(max(sizes)), graphs=graphs)
        session.prefill([[1] * context])
        for nodes in sizes:
            run, seconds = partial(session.append, lay_out_chains([[1] * nodes], target.device)), []
            for _ in range(WARM + TIMED):
                seconds.append(timed(run))
                session.commit([()])
            launched, done = (median(times) for times in zip(*seconds[WARM:], strict=True))
            rows.append({"nodes": nodes, "launch_ms": 1e3 * launched, "ms": 1e3 * done, "of_bound": bound / done})
            rows[-1] |= _kernels(run, 1)
            session.commit([()])
    return rows


def _kernels(run: Callable[[], Any], times: int) -> Row:
    """Return how many kernels something launches each time that it is done, and their milliseconds."""
    found = kernels(lambda: [run() for _ in range(times)])
    if found is None:
        return {"kernels": None, "kernel_ms": None}
    return {"kernels": len(found) / times, "kernel_ms": sum(milliseconds for _, milliseconds in found) / times}


def step_row(decoder: SpeculativeDecoder, prompts: Ids, steps: int) -> Row:
    """Measure the steps of a greedy call: where the milliseconds of one go, its kernels, and its host waits by line.

    Args:
        decoder: of a target whose texts do not end.
        prompts: token ids of each row.
        steps: how many are measured.
    """
    warm = 3 * WARM if decoder.graphs else WARM  # trees of different sizes are captured one by one
    most = (warm + steps + 2 * WATCHED) * (decoder.policy.max_depth + 1) + 1
    run = decoder.open(prompts, max_new_tokens=most, do_sample=False, seed=list(range(len(prompts))))
    advance = partial(next, iter(run))
    for _ in range(warm):
        advance()
    emitted: list[Any] = []
    with clocked(PARTS) as spent:
        seconds = timed(lambda: emitted.extend(advance() for _ in range(steps)))[1]
    every = [step for rows in emitted for _, step in rows]
    row = {
        "ms": 1e3 * seconds / steps,
        **{f"{part}_ms": 1e3 * spent[part] / steps for part in PARTS},
        "rest_ms": 1e3 * (seconds - sum(spent.values())) / steps,
        "tokens_per_step": sum(len(step.tokens) for step in every) / len(every),
        "drafted": sum(step.tree.num_drafted for step in every) / len(every),
        **_kernels(advance, WATCHED),
        "waits": host_waits(advance) if CUDA else None,
    }
    run.close()
    return row


@contextmanager
def clocked(parts: Mapping[str, Sequence[tuple[Any, str]]]) -> Iterator[Counter[str]]:
    """Count the seconds that functions take, by part; one that another one calls counts as that one's.

    Args:
        parts: their functions, each as a class or module and a name in it.
    """
    spent: Counter[str] = Counter()
    active: list[str] = []

    def clock(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if active:
                return function(*args, **kwargs)
            active.append(part)
            started = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[part] += perf_counter() - started
                active.clear()

        return call

    with ExitStack() as stack:
        for part, functions in parts.items():
            for owner, name in functions:
                stack.enter_context(patch.object(owner, name, clock(part, getattr(owner, name))))
        yield spent


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


def text_row(write: Callable[[], Ids]) -> tuple[Row, Ids]:
    """Measure a text the second time that it is written, prompts included; return the figures and its new ids."""
    free()  # else memory of earlier models would count
    write()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    found: Ids = []
    seconds = timed(lambda: found.extend(write()))[1]
    row = {"tokens_per_second": sum(map(len, found)) / seconds, "seconds": seconds}
    peaks = (torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9) if CUDA else (None, None)
    return row | dict(zip(("peak_gb", "reserved_gb"), peaks, strict=True)), found


def generated(model: Any, prompts: Ids, new: int, **extra: Any) -> Ids:
    """Return the new ids of transformers' greedy generate for prompts of one length."""
    ids = torch.tensor(prompts, device=model.device)
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, **extra}
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[:, ids.shape[1] :].tolist()
