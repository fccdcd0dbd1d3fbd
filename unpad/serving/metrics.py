"""Numbers of a server for Prometheus: requests, tokens, rows, seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

# Seconds, from a small model's step to a request's limit.
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)


class Numbers(Protocol):
    """What is read of the engine when somebody looks."""

    tokens_read: int
    tokens_reused: int
    tokens_made: int

    @property
    def live(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def kept_bytes(self) -> int: ...


class Metrics:
    """Numbers of one server; `engine` is set when the model is there."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine: Numbers | None = None
        self.requests = Counter(
            "unpad_requests", "Requests by route and status.", ("route", "status"), registry=self.registry
        )
        self.first = Histogram(
            "unpad_first_token_seconds", "From a request to its first token.", buckets=BUCKETS, registry=self.registry
        )
        self.between = Histogram(
            "unpad_token_seconds", "Between tokens of an answer.", buckets=BUCKETS, registry=self.registry
        )
        self.registry.register(_OfEngine(self))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _OfEngine(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        engine = self._metrics.engine
        counts = (
            ("tokens_read", "Tokens of prompts that were read.", engine.tokens_read if engine else 0),
            ("tokens_reused", "Tokens of prompts kept from earlier requests.", engine.tokens_reused if engine else 0),
            ("tokens_made", "Tokens of answers.", engine.tokens_made if engine else 0),
            ("padding_tokens", "Tokens computed as padding.", 0),
        )
        for name, what, value in counts:
            yield CounterMetricFamily(f"unpad_{name}", what, value)
        gauges = (
            ("rows_live", "Answers that decode.", engine.live if engine else 0),
            ("rows_waiting", "Requests whose prompt is not read yet.", engine.waiting if engine else 0),
            ("bytes", "Bytes of keys and values.", engine.num_bytes if engine else 0),
            ("kept_bytes", "Bytes of those of beginnings that are kept.", engine.kept_bytes if engine else 0),
        )
        for name, what, value in gauges:
            yield GaugeMetricFamily(f"unpad_{name}", what, value)
