"""``/v1/responses``: input in, a message out, without a memory: the newer form of a conversation, over `Chat`.

Thoughts are not told: the answer is one message.

Knows: objects and events of the protocol's newer form.  Does not know: HTTP, prompts, when steps are taken.
"""

from collections.abc import Iterator
from uuid import uuid4

from msgspec.json import encode

from specinfer.serve.answer import Served
from specinfer.serve.chat import Chat
from specinfer.serve.choice import News
from specinfer.serve.protocol import ApiError, ResponseBody


class Reply(Chat):
    """The answer to a request for a response."""

    prefix, end = "resp", b""
    source = "input"

    def __init__(self, given: ResponseBody, served: Served, client: str = "") -> None:
        super().__init__(given.chat, served, client)
        self.given, self.text, self.told = given, "", 0
        self.where = {"item_id": f"msg_{uuid4().hex}", "output_index": 0}

    def event(self, chunk: dict[str, object]) -> bytes:
        """Return the lines of an event, which has a name and a number."""
        numbered = {**chunk, "sequence_number": self.told}
        self.told += 1
        return b"event: %b\ndata: %b\n\n" % (str(chunk["type"]).encode(), encode(numbered))

    def failure(self, error: ApiError) -> dict[str, object]:
        """Return the event of an error."""
        return {"type": "error", "code": error.code, "message": error.message, "param": error.param}

    def first_chunks(self) -> Iterator[dict[str, object]]:
        """Yield the events before the first step."""
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self._response("in_progress", [])}
        item = self._item("in_progress", [])
        yield {"type": "response.output_item.added", "output_index": 0, "item": item}
        yield self._of_text("response.content_part.added", part=self._part())

    def chunks_of(self, index: int, news: News) -> Iterator[dict[str, object]]:
        """Yield the events of new text, and of its end."""
        for delta in self._contents(news):
            yield self._of_text("response.output_text.delta", delta=delta, logprobs=[])
        if news.reason:
            status = "incomplete" if news.reason == "length" else "completed"
            item = self._item(status, [self._part()])
            yield self._of_text("response.output_text.done", text=self.text, logprobs=[])
            yield self._of_text("response.content_part.done", part=self._part())
            yield {"type": "response.output_item.done", "output_index": 0, "item": item}
            yield {"type": f"response.{status}", "response": self._response(status, [item])}

    def whole(self) -> dict[str, object]:
        """Return the answer in one piece, once its request is done: the last event holds it."""
        *_, last = self.chunks()
        return last["response"]

    def _contents(self, news: News) -> Iterator[str]:
        """Yield the new parts of the message, and add them to the text."""
        for delta in self.deltas[0].of(news.text, news.reason is not None):
            if content := delta.get("content"):
                self.text += content
                yield content

    def _of_text(self, kind: str, **more: object) -> dict[str, object]:
        return {"type": kind, **self.where, "content_index": 0, **more}

    def _part(self) -> dict[str, object]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def _item(self, status: str, content: list[dict[str, object]]) -> dict[str, object]:
        name = self.where["item_id"]
        return {"id": name, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[dict[str, object]]) -> dict[str, object]:
        """Return the response as it is."""
        given, reason = self.given, {"reason": "max_output_tokens"} if status == "incomplete" else None
        asked = {name: getattr(given, name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")}
        return {
            "id": self.head["id"],
            "object": "response",
            "created_at": self.head["created"],
            "model": self.served.name,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            **asked,
            "metadata": given.metadata or {},
            "output": output,
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "text": {"format": given.form or {"type": "text"}},
            "seed": self.choices[0].seed,
            "usage": self._used() if output else None,
        }

    def _used(self) -> dict[str, object]:
        """Return the tokens used, by the newer names."""
        used = self.usage()
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {**used["completion_tokens_details"], "reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        }
