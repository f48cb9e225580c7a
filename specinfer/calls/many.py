"""Many prompts through one scheduler: results as they finish, a few rows at a time.

Knows: where prompts come from, which request is whose, what to do with a bad prompt.
Does not know: how requests join others, how they are decoded.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple, TypeAlias

from specinfer.engine.requests import Request
from specinfer.engine.scheduler import Scheduler
from specinfer.errors import NoTokenLeft, SpecinferError
from specinfer.results import Result

PATIENCE = 0.01  # seconds for which rows under way wait for a prompt that was asked for


Numbered: TypeAlias = tuple[int, object]  # a prompt and its number, from 0
Found: TypeAlias = tuple[Numbered | None, BaseException | None]


class Finished(NamedTuple):
    """One prompt of many: its result, or why it has none."""

    number: int  # of the prompt, from 0
    result: Result | None
    error: SpecinferError | None

    def to_dict(self) -> dict[str, object]:
        """Return what files and datasets keep of it, JSON-ready: the text and figures of it, or else the error."""
        if self.result is None:
            return {"error": str(self.error)}
        return {
            "text": self.result.text,
            "token_ids": self.result.token_ids,
            "finish_reason": self.result.finish_reason,
            "seed": self.result.seed,
            "prompt_tokens": len(self.result.prompt_ids),
            "new_tokens": len(self.result.token_ids),
            "target_passes": self.result.stats.target_passes,
        }


def finished(
    scheduler: Scheduler, prompts: Iterable[object], request_of: Callable[[object, int], Request]
) -> Generator[Finished]:
    """Decode prompts and yield them as they finish.

    Args:
        scheduler: that nobody else uses.
        prompts: any number; the next ones are asked for when there is room for them.  A thread of its own asks
            for them, so that rows under way do not wait for an iterator.
        request_of: makes a request of a prompt and its number, or raises a `SpecinferError`: the others go on.

    Raises:
        NumericalError: the target's logits, or a draft's, are not numbers; ``partial`` holds the rows under way.
    """
    alone = isinstance(prompts, list | tuple) or scheduler.decoder.target.ranks.size > 1  # ranks decode in lockstep
    source, numbers = Source(prompts, patient=alone), dict[Request, int]()
    try:
        while not (source.ended and scheduler.idle):
            while len(numbers) < (scheduler.max_rows or 1) and (found := source.next(wait=not numbers)):
                number, prompt = found
                try:
                    numbers[scheduler.add(request_of(prompt, number))] = number
                except SpecinferError as error:
                    yield Finished(number, None, error)
            for request, _ in scheduler.step():
                failed = request.row.error
                if failed is not None and not isinstance(failed, NoTokenLeft):
                    raise failed
                if request.done:
                    yield Finished(numbers.pop(request), None if failed else request.result, failed)
    except SpecinferError as error:
        error.partial = tuple(request.result for request in numbers)
        raise
    finally:
        scheduler.close()


class Source:
    """Prompts of an iterator that may take its time: a thread asks it for one, when one is wanted.

    Args:
        prompts: any number.
        patient: whether to wait for each of them, which takes no thread.

    Attributes:
        ended: whether there are no more.
    """

    def __init__(self, prompts: Iterable[object], patient: bool) -> None:
        self._wanted, self._found = SimpleQueue[bool](), SimpleQueue[Found]()
        self._prompts, self._patient, self._asked, self.ended = enumerate(prompts), patient, False, False
        if not patient:
            Thread(target=_serve, args=(self._prompts, self._wanted, self._found), daemon=True).start()

    def next(self, wait: bool) -> Numbered | None:
        """Return the next prompt and its number; None if there is none, or none yet and nobody is to wait for it."""
        if self.ended or self._patient:
            found = None if self.ended else next(self._prompts, None)
            self.ended = found is None
            return found
        fresh, self._asked = not self._asked, True
        if fresh:
            self._wanted.put(True)
        try:
            found, error = self._found.get(timeout=None if wait else PATIENCE * fresh)
        except Empty:
            return None
        self._asked, self.ended = False, found is None
        if error:
            raise error
        return found

    def __del__(self) -> None:
        self._wanted.put(False)


def _serve(prompts: Iterator[Numbered], wanted: SimpleQueue[bool], found: SimpleQueue[Found]) -> None:
    """Ask for a prompt whenever one is wanted, until there is none."""
    while wanted.get():
        try:
            each, error = next(prompts, None), None
        except BaseException as raised:
            each, error = None, raised
        found.put((each, error))
        if each is None:
            return
