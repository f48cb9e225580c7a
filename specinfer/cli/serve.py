"""``specinfer serve``: a server with the protocol of OpenAI's API.

Knows: options, uvicorn.  Does not know: the protocol, what a request is answered with.
"""

import logging
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from pathlib import Path
from socket import AF_INET, AF_INET6, create_server
from typing import Annotated

from typer import Option

from specinfer.cli import options
from specinfer.errors import InputError

PACKAGES = ("starlette", "uvicorn", "prometheus_client")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEY = "SPECINFER_API_KEY"
LIMITS = "max_rows max_queue cache_megabytes write_timeout request_timeout queue_timeout"
KEEP_ALIVE = 75  # seconds for which an idle connection stays: longer than clients keep one, which may ask meanwhile


@dataclass(frozen=True)
class Access:
    """Where a server listens, and to whom."""

    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000
    api_key_file: Annotated[
        Path | None, Option(help=f"File with a key on each line; requests need one of them. ${KEY} is another.")
    ] = None
    insecure: Annotated[bool, Option("--insecure", help="Listen beyond this machine without keys.")] = False
    allow_origin: Annotated[list[str] | None, Option(help="Origin of web pages that may ask. Repeat.")] = None

    def keys(self) -> list[str]:
        """Return the keys; raise `InputError` for a host that strangers reach, where there are none."""
        found = [os.environ.get(KEY, "")]
        if self.api_key_file:
            found += options.read_text("--api-key-file", self.api_key_file).splitlines()
        keys = [key.strip() for key in found if key.strip()]
        if self.api_key_file and not keys:
            raise InputError(f"--api-key-file {self.api_key_file} holds no key: write one on each line")
        if not keys and self.host not in LOOPBACK and not self.insecure:
            reach = f"--host {self.host} is reached from other machines, and there is no key"
            raise InputError(f"{reach}: add --api-key-file FILE, or --insecure")
        return keys


def check_free(host: str, port: int) -> None:
    """Raise `InputError` if nothing can listen there, before a model is loaded for it."""
    try:
        create_server((host, port), family=AF_INET6 if ":" in host else AF_INET).close()
    except OSError as error:
        what = str(error.strerror).partition(" (")[0]  # without the address, which follows in brackets
        advice = "choose another --port, or 0 for a free one"
        raise InputError(f"cannot listen on {host}, port {port} ({what}): {advice}") from error


@dataclass(frozen=True)
class Capacity:
    """What a server takes at most."""

    max_rows: Annotated[int, Option(help="Texts at a time.", min=1)] = 16
    max_queue: Annotated[int, Option(help="Texts that may wait; more get status 503.", min=0)] = 256
    context: Annotated[
        int | None, Option(help="Tokens of prompt and text at most.", min=2, show_default="the target's context")
    ] = None
    max_tokens: Annotated[
        int | None,
        Option(help="New tokens where a request names no number.", min=1, show_default="the rest of the context"),
    ] = None
    cache_megabytes: Annotated[
        float | None,
        Option(
            help="Memory for what was read, for later prompts that begin alike; 0 keeps none.",
            min=0,
            show_default="a quarter of what is free",
        ),
    ] = None
    write_timeout: Annotated[float, Option(help="Seconds after which a stream that nobody reads is closed.", min=0)] = (
        60.0
    )
    request_timeout: Annotated[
        float, Option(help="Seconds that an answer may take; then status 408.", min=0, show_default="no limit")
    ] = inf
    queue_timeout: Annotated[
        float, Option(help="Seconds until a text must have begun; then status 503.", min=0, show_default="no limit")
    ] = inf
    drain: Annotated[int, Option(help="Seconds that texts under way have after SIGTERM.", min=0)] = 30


def serve(
    *,
    models: options.Models,
    trees: options.Trees,
    served_name: Annotated[
        str | None, Option(help="The model's name for clients.", show_default="the target's name")
    ] = None,
    access: Access,
    capacity: Capacity,
) -> None:
    """Serve the protocol of OpenAI's API: chat, completions, streams, metrics."""
    keys = access.keys()
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        raise InputError(f'a server needs {missing[0]}: pip install "specinfer[serve]"')
    check_free(access.host, access.port)
    decoder = models.decoder(grown=trees.policy)
    import uvicorn

    from specinfer.serve.application import Limits, application

    app = application(
        decoder,
        served_name,
        context=capacity.context,
        max_tokens=capacity.max_tokens,
        limits=Limits(**options.chosen(vars(capacity), LIMITS)),
        keys=keys,
        hosts=LOOPBACK if access.host in LOOPBACK else (),  # that are answered to without keys; none are all
        origins=access.allow_origin or (),
    )
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.info("serving %s; %s", served_name or decoder.target.checkpoint, decoder.passes)
    uvicorn.run(
        app,
        host=access.host,
        port=access.port,
        log_config=None,
        timeout_graceful_shutdown=capacity.drain,
        timeout_keep_alive=KEEP_ALIVE,
    )
