"""A lock for objects that several threads use and that may be copied.

Knows: threads.  Does not know: what it guards.
"""

from threading import RLock


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
