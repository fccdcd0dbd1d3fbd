"""Reports of a server on itself, without text of a request: its log on standard error, its numbers for Prometheus."""

import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import datetime
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from unpad.inference.engine import Engine
from unpad.terminal.printing import print_lines
from unpad.terminal.table import number_of

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")  # of the request that is being answered
# Seconds, from a small model's step to a request's limit.
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
# Numbers of an engine: its attribute, their name and kind, what they are.
OF_ENGINE = (
    ("tokens_read", "tokens_read", CounterMetricFamily, "Tokens of prompts that were read."),
    ("tokens_reused", "tokens_reused", CounterMetricFamily, "Tokens of prompts kept from earlier requests."),
    ("tokens_made", "tokens_made", CounterMetricFamily, "Tokens of answers."),
    ("live", "rows_live", GaugeMetricFamily, "Answers that decode."),
    ("waiting", "rows_waiting", GaugeMetricFamily, "Requests whose prompt is not read yet."),
    ("kept_bytes", "kept_bytes", GaugeMetricFamily, "Bytes of keys and values of beginnings that are kept."),
)


class Metrics(Collector):
    """Numbers of one server; `engine` are those of the engine, when they were last asked for."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.engine: dict[str, int] = {}
        what = "Requests by route and status."
        self.requests = Counter("unpad_requests", what, ("route", "status"), registry=registry)
        what = "Answers that had begun and are not whole, by route and reason."
        self.broken = Counter("unpad_broken_answers", what, ("route", "reason"), registry=registry)
        seconds = partial(Histogram, buckets=BUCKETS, registry=registry)
        self.first = seconds("unpad_first_token_seconds", "From a request to its first token.")
        self.between = seconds("unpad_token_seconds", "Between tokens of an answer.")
        registry.register(self)

    @staticmethod
    def of(engine: Engine) -> dict[str, int]:
        """Numbers of an engine at this moment; for its own thread."""
        return {attribute: getattr(engine, attribute) for attribute, *_ in OF_ENGINE}

    def collect(self) -> Iterator[Metric]:
        for attribute, name, kind, what in OF_ENGINE:
            yield kind(f"unpad_{name}", what, self.engine.get(attribute, 0))

    def text(self) -> bytes:
        return generate_latest(self.registry)


def log_request(id: str, route: str, status: str, tokens: str, seconds: float) -> None:
    """Time, id, route, status, tokens and seconds of a request that is done."""
    now = datetime.now().astimezone().isoformat(timespec="milliseconds")
    print_lines([f"{now} {id} {route} {status} {tokens} {seconds:.3f} s"], to_errors=True)


def log_draining(num_open: int, seconds: float) -> None:
    """The beginning of the end: answers that are open, and how long they may take."""
    left = f"{number_of(num_open, 'answers')} open, for at most {seconds:g} s; another signal ends it now"
    print_lines([f"draining: {left if num_open else 'no answer is open'}"], to_errors=True)


def log_fault(place: str, error: BaseException) -> None:
    """The traceback of a fault, without the messages of errors, which may quote a request."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    print_lines([f"fault {place}: {type(error).__name__}", *lines], to_errors=True)
