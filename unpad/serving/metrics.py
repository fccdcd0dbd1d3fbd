"""Numbers of a server for Prometheus: requests, tokens, rows, seconds (apart: the library of Prometheus)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from unpad.inference.engine import Engine

# Seconds, from a small model's step to a request's limit.
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)


@dataclass(frozen=True)
class Numbers:
    """Numbers of an engine at one moment."""

    tokens_read: int = 0
    tokens_reused: int = 0
    tokens_made: int = 0
    live: int = 0
    waiting: int = 0
    num_bytes: int = 0
    kept_bytes: int = 0

    @staticmethod
    def of(engine: Engine) -> Numbers:
        """For the thread of the engine."""
        return Numbers(**{field.name: getattr(engine, field.name) for field in fields(Numbers)})


class Metrics:
    """Numbers of one server; `engine` are those of the engine, when they were last asked for."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine = Numbers()
        self.requests = Counter(
            "unpad_requests", "Requests by route and status.", ("route", "status"), registry=self.registry
        )
        self.broken = Counter(
            "unpad_broken_answers",
            "Answers that had begun and are not whole, by route and reason.",
            ("route", "reason"),
            registry=self.registry,
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
            ("tokens_read", "Tokens of prompts that were read.", engine.tokens_read),
            ("tokens_reused", "Tokens of prompts kept from earlier requests.", engine.tokens_reused),
            ("tokens_made", "Tokens of answers.", engine.tokens_made),
            ("padding_tokens", "Tokens computed as padding.", 0),
        )
        for name, what, value in counts:
            yield CounterMetricFamily(f"unpad_{name}", what, value)
        gauges = (
            ("rows_live", "Answers that decode.", engine.live),
            ("rows_waiting", "Requests whose prompt is not read yet.", engine.waiting),
            ("bytes", "Bytes of keys and values.", engine.num_bytes),
            ("kept_bytes", "Bytes of those of beginnings that are kept.", engine.kept_bytes),
        )
        for name, what, value in gauges:
            yield GaugeMetricFamily(f"unpad_{name}", what, value)
