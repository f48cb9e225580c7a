"""Counts and times of a server, for Prometheus; speculation under the names that vLLM gave them.

Knows: metrics, steps.  Does not know: HTTP, who reads them.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specinfer.results import Step

PREFIX = "specinfer:"
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)  # seconds
LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The counters of one server, in a registry of its own.

    Args:
        running, waiting: return how many texts are decoded, and how many wait.
    """

    def __init__(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}{name}", help, labels, registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{PREFIX}{name}_seconds", help, buckets=buckets, registry=registry)

        Gauge(f"{PREFIX}num_requests_running", "Texts under way.", registry=registry).set_function(running)
        Gauge(f"{PREFIX}num_requests_waiting", "Texts that wait.", registry=registry).set_function(waiting)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.asked_prefixes = counter("prefix_cache_queries", "Tokens of prompts that were looked up.")
        self.found_prefixes = counter("prefix_cache_hits", "Those that were copied, not read.")
        self.generation_tokens = counter("generation_tokens", "Tokens of texts.")
        self.successes = counter("request_success", "Texts that ended.", "finished_reason")
        self.rejections = counter("admission_rejections", "Requests that were not taken.", "reason")
        self.drafts = counter("spec_decode_num_drafts", "Steps of a text in which something was drafted.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Nodes of trees.")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self.accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "The same, by depth in the tree from 0.", "position"
        )
        self.accepted_of = counter("spec_decode_num_accepted_tokens_per_draft", "The same, by draft.", "draft")
        self.first_token = histogram("time_to_first_token", "From the request to the first step.", LONG)
        self.between_tokens = histogram("inter_token_latency", "Of a token after the first step.", SHORT)
        self.whole = histogram("e2e_request_latency", "From the request to the end of the text.", LONG)
        self.queued = histogram("request_queue_time", "From the request to the beginning of the prompt.", LONG)

    def step(self, step: Step) -> None:
        """Count the tokens that a step of a text drafted and accepted."""
        self.generation_tokens.inc(len(step.tokens))
        if step.tree.num_drafted:
            self.drafts.inc()
            self.draft_tokens.inc(step.tree.num_drafted)
        accepted = min(len(step.path), len(step.tokens))
        self.accepted.inc(accepted)
        for position, names in enumerate(step.drafted_by[:accepted]):
            self.accepted_at.labels(position).inc()
            for name in names:
                self.accepted_of.labels(name).inc()

    @property
    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self.registry)
