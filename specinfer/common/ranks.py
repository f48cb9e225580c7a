"""Processes that run one call together, because a model's weights are spread over them: they start, agree and end.

Knows: torch.distributed, launchers' variables, which processes share a model.
Does not know: models' passes, trees, what is agreed on.

Every process (rank) makes the same calls and runs the same passes.  What may differ between them is made the same
before anything is decided by it: measured seconds, seeds that nobody gave, a user's own wish to stop.  What must be the
same is compared before every pass, so that a difference is an error and neither a wrong text nor a wait without end.
"""

import atexit
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from specinfer.errors import RankError, UnsupportedModel, one_line

Value = TypeVar("Value", int, float)

PATIENCE = "SPECINFER_RANKS_TIMEOUT"  # variable: seconds that a process waits for others, instead of these two:
START_SECONDS = 60.0  # until all have started
STEP_SECONDS = 600.0  # until all are where one of them is, after loading for example
REPORT_SECONDS = 5.0  # how long a failing process waits for the first one to say the same
LOWEST = -(2**63)
LOST = "another of the processes that share the model ended, or did not answer in time"
ADVICE = "see what it printed; every process must make the same calls, with the same options, in the same order"


class Ranks:
    """The processes that run every pass of a model together; `ALONE` is the one process of a model that is whole.

    Args:
        group: which of them talk through the host's memory (gloo), whatever the model's device is.
        busy: the lock that a pass holds in this process.
        stages: parts of the layers; each process holds one of them (pipeline parallel).
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None, busy: "Lock | None" = None, stages: int = 1) -> None:
        self.group, self.busy, self.stages = group, busy or Lock(), stages
        self.size = 1 if group is None else dist.get_world_size(group)
        self.is_first = group is None or dist.get_rank(group) == 0

    @classmethod
    def of(cls, model: object) -> "Ranks":
        """Return the processes that a model's weights are spread over, from what transformers notes on the model.

        Raises:
            UnsupportedModel: they are sharded in a way by which processes are meant for different texts (FSDP).
        """
        mesh = getattr(model, "_device_mesh", None)
        if mesh is None:
            return ALONE
        names = mesh.mesh_dim_names or ["tp"]  # transformers 5.17 names no dimension if there is only this one
        sizes = dict(zip(names, mesh.shape, strict=True))
        if sizes.pop("fsdp", 1) > 1 or mesh.size() != dist.get_world_size():
            problem = f"{type(model).__name__} is sharded for different texts in each process (FSDP)"
            raise UnsupportedModel(f"{problem}, and passes over trees are not the same there: use tensor parallelism")
        with lost_ranks():
            if (shared := _shared.get(dist.group.WORLD)) is None:
                group = dist.new_group(backend="gloo", timeout=_patience(STEP_SECONDS))
                shared = _shared[dist.group.WORLD] = group, Lock()
        return cls(*shared, sizes.get("pp", 1))

    @contextmanager
    def together(self, *values: object) -> Iterator[None]:
        """Run a pass that all processes run, after a check that they are about to run the same one.

        Args:
            values: that must be the same: tensors, and values that print alike.

        Raises:
            RankError: the processes disagree, another one is lost, or two threads of this one run passes at once.
        """
        if self.group is None:
            yield
            return
        if not self.busy.acquire(blocking=False):
            problem = "two threads run passes of one model that several processes share, each in an order of its own"
            raise RankError(f"{problem}: use one thread, or a batch")
        try:
            self.check(*values)
            with lost_ranks():
                yield
        finally:
            self.busy.release()

    def check(self, *values: object) -> None:
        """Raise `RankError` unless all processes have the same values here."""
        if self.group is not None:
            number = int.from_bytes(blake2b(b"|".join(map(_bytes, values)), digest_size=7).digest())
            most, least = self.largest([number, -number])
            if most != -least:
                raise RankError(f"the processes that share the model disagree on what to run next: {ADVICE}")

    def largest(self, values: Sequence[Value]) -> list[Value]:
        """Return the largest values of all processes, number by number.

        Raises:
            RankError: another process is lost.
        """
        if self.group is None:
            return list(values)
        kind = torch.float64 if any(isinstance(value, float) for value in values) else torch.int64
        shared = torch.tensor(values, dtype=kind, device="cpu")
        with lost_ranks():
            dist.all_reduce(shared, dist.ReduceOp.MAX, self.group)
        return shared.tolist()

    def first(self, values: Sequence[int]) -> list[int]:
        """Return the first process's values, as numbers of 64 bits with a sign.

        Raises:
            RankError: another process is lost, or has more or fewer.
        """
        self.check(len(values))
        return self.largest(list(values) if self.is_first else [LOWEST] * len(values))


ALONE = Ranks()
# by world: its group for agreements, and the lock that its passes hold
_shared: WeakKeyDictionary[object, tuple["dist.ProcessGroup", Lock]] = WeakKeyDictionary()


def _bytes(value: object) -> bytes:
    return value.cpu().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Turn torch's errors about another process that ended or does not answer into `RankError`."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)):
            raise
        raise RankError(f"{LOST} ({one_line(error)}): {ADVICE}") from error


def whole(weight: Tensor) -> Tensor:
    """Return a weight whose parts are on several processes as a whole; all of them call this alike.

    Raises:
        RankError: another process is lost.
    """
    if not hasattr(weight, "full_tensor"):
        return weight
    with lost_ranks():
        return weight.full_tensor()


def join(count: int, device: torch.device) -> None:
    """Start or find the group of processes that will share a model.

    Args:
        count: of processes.
        device: of this process.

    Raises:
        RankError: there are more or fewer, they do not find each other in time, or one does not start.
    """
    started = dist.is_initialized()
    found = dist.get_world_size() if started else int(os.environ.get("WORLD_SIZE") or 1)
    if found != count:
        processes = "this is the only one" if found == 1 else f"there are {found}"
        raise RankError(f"tensor_parallel={count} takes {count} processes, and {processes}: run `{_command(count)}`")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif torch.cuda.is_available():  # transformers takes GPUs then, whatever it is told
        raise RankError(f"tensor_parallel={count} on {device} where there are GPUs: set CUDA_VISIBLE_DEVICES= (empty)")
    if not started:
        _start(count, device)


def _start(count: int, device: torch.device) -> None:
    """Find the other processes by the launcher's variables.  NCCL was not run in tests."""
    patience = _patience(START_SECONDS)
    try:
        store, rank, _ = next(dist.rendezvous("env://", timeout=patience))
        names = [f"started/{index}" for index in range(count)]
        store.set(names[rank], "yes")
        store.wait(names, patience)
        fast = {"backend": "nccl", "device_id": device} if device.type == "cuda" else {"backend": "gloo"}
        waits = _patience(STEP_SECONDS)
        dist.init_process_group(store=store, rank=rank, world_size=count, timeout=waits, **fast)
        atexit.register(_leave)
    except (RuntimeError, ValueError) as error:
        problem = f"the {count} processes do not find each other ({one_line(error)})"
        raise RankError(f"{problem}: start all of them") from error


def _leave() -> None:
    """End the group that `_start` began: its threads would abort a process that ends with them."""
    _shared.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _patience(default: float) -> timedelta:
    """Return how long to wait for other processes."""
    given = os.environ.get(PATIENCE) or default
    try:
        return timedelta(seconds=max(float(given), 1.0))
    except (ValueError, OverflowError) as error:
        raise RankError(f"{PATIENCE}={given!r:.40} is not a number of seconds") from error


def _command(count: int) -> str:
    """Return the command that starts this program in several processes."""
    script, *arguments = sys.argv
    program = ["-m", "specinfer"] if Path(script).name in ("specinfer", "__main__.py") else [script]
    return shlex.join(["torchrun", "--nproc-per-node", str(count), *program, *arguments])


# ---- messages of one process of several ----


def rank() -> int:
    """Return the number that a launcher gave this process, 0 without one."""
    return int(os.environ.get("RANK") or 0)


def repeats(message: str) -> bool:
    """Return whether the first process ends with the same message as this one; it prints it then.

    The store of ``torchrun`` carries the message, so this also works before the processes have joined.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    key, wait = "specinfer/message", timedelta(seconds=REPORT_SECONDS)
    try:
        store = dist.TCPStore(host, int(port), is_master=False, timeout=wait, wait_for_workers=False)
        if not rank():
            store.set(key, message)
            return False
        store.wait([key], wait)
        return store.get(key) == message.encode()
    except (RuntimeError, ValueError):  # no store, or the first process has nothing to say
        return False
