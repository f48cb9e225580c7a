"""Who may ask: keys, and names of the host where there are none.

Knows: headers.  Does not know: what is asked.
"""

from collections.abc import Sequence
from hashlib import sha256
from secrets import compare_digest

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from specinfer.serve.protocol import ApiError

OPEN = "/health"


class Guard:
    """Lets requests through that have a key.

    Without keys, those that come to one of a host's names.  A page in a browser can make a name of its own lead to a
    server on the same machine (DNS rebinding), but it cannot send another name than its own.

    Args:
        app: behind it.
        keys: one of them is to be sent as a bearer token; none are needed if there are none.
        hosts: names of the host; empty for any.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str] = (), hosts: Sequence[str] = ()) -> None:
        self.app, self.keys, self.hosts = app, [_digest(key) for key in keys], hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        error = self._error(Headers(scope=scope)) if scope["type"] == "http" and scope["path"] != OPEN else None
        if error is None:
            return await self.app(scope, receive, send)
        answer = JSONResponse(error.body, error.status, error.headers)
        return await answer(scope, receive, send)

    def _error(self, headers: Headers) -> ApiError | None:
        """Return why a request is not let through."""
        if self.keys:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            matches = [compare_digest(_digest(key.strip()), known) for known in self.keys]  # all, in equal time
            if scheme.lower() == "bearer" and any(matches):
                return None
            message, asked = "a key is needed: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"}
            return ApiError(401, message, code="invalid_api_key", headers=asked)
        host = headers.get("host", "").lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if self.hosts and name not in self.hosts:
            return ApiError(400, f"the host {name!r:.60} is not this server's: ask {self.hosts[0]}, or use keys")
        return None


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
