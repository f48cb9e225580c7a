"""Locks of objects that several threads use: one that may be copied, and one that tells of its releases.

Knows: threads.  Does not know: what they guard.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, RLock


class Lock:
    """A lock that its thread may take again; copied or pickled, it is a new one."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["Lock"], tuple[()]]:
        return Lock, ()


class Turns:
    """A lock, and news of its releases, for those who need not hold it themselves.

    Attributes:
        ended: how often it was released.
    """

    def __init__(self) -> None:
        self._lock, self._news, self.ended = RLock(), Condition(), 0

    @contextmanager
    def held(self, wait: bool = True) -> Iterator[bool]:
        """Hold the lock if it is free, or wait for it; yield whether it is held."""
        held = self._lock.acquire(wait)
        try:
            yield held
        finally:
            if held:
                self._lock.release()
                with self._news:
                    self.ended += 1
                    self._news.notify_all()

    def wait(self, ended: int) -> None:
        """Wait until it was released more often than that."""
        with self._news:
            self._news.wait_for(lambda: self.ended != ended)
