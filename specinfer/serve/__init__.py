"""An HTTP server with the protocol of OpenAI's API, over the scheduler: ``specinfer serve``.

Knows: HTTP, the protocol, one thread for the engine.  Does not know: how texts are decoded.

    protocol      bodies of requests, and errors, in the protocol's shape
    engine        the thread that takes the scheduler's steps, and what waits for it
    choice        the text of one request as it becomes known
    answer        what answers have in common; chat, completions and responses: their prompts, chunks and whole answers
    tools         calls of tools: read in texts, and forced by grammars
    metrics       counts and times for Prometheus
    guard         who may ask
    application   routes, limits, the life of the server

It needs the packages of ``specinfer[serve]``.
"""
