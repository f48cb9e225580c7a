"""The server on a Ray cluster: replicas of one application, behind Ray Serve.

    pip install "specinfer[serve]" "ray[serve]" && python examples/ray_serve.py

Each replica loads the models itself. `serve run ray_serve:replicas`, from this folder, goes on serving.
"""

import json
from urllib.request import Request, urlopen

from ray import serve
from starlette.applications import Starlette

from specinfer import SpeculativeDecoder
from specinfer.serve.application import Limits, application

ROWS = 8


def build() -> Starlette:
    """Return the application of a replica, in its process."""
    return application(SpeculativeDecoder.from_pretrained(), limits=Limits(max_rows=ROWS, max_queue=64))


deployed = serve.deployment(num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 1})
replicas = deployed(serve.ingress(build)(type("Replica", (), {}))).bind()

if __name__ == "__main__":
    serve.run(replicas)
    body = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 16, "temperature": 0}
    url, headers = "http://127.0.0.1:8000/v1/chat/completions", {"Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), headers)) as answer:
        print(json.load(answer)["choices"][0]["message"]["content"])
    serve.shutdown()
