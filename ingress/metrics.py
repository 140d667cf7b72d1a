"""The ingress's metrics. This list is all there is; each name says its unit."""

from __future__ import annotations

import math
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from wire.messages import Snapshot

_LOSSES = (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 10)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 60, 300)


class Metrics:
    """One process's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        # answers by route template and HTTP status; a stream counts when its status line goes out
        self.answers = Counter("millstream_ingress_answers", "HTTP answers", ["route", "status"], registry=registry)
        # calls that hold a stream or a waiting answer open now
        self.open_calls = Gauge("millstream_ingress_open_calls", "Open calls", registry=registry)
        # from the Request's send to its Accepted
        self.accept_seconds = Histogram(
            "millstream_ingress_accept_seconds", "Produce to Accepted", ["model"], buckets=_SECONDS, registry=registry
        )
        # from the Request's send to the first token's frame
        self.first_token_seconds = Histogram(
            "millstream_ingress_first_token_seconds", "Produce to token", ["model"], buckets=_SECONDS, registry=registry
        )
        # tokens relayed to clients
        self.tokens = Counter("millstream_ingress_tokens", "Tokens relayed", ["model"], registry=registry)
        # attempts after the first
        self.retries = Counter("millstream_ingress_retries", "Further attempts", registry=registry)
        # further attempts that the retry budget didn't allow
        self.retries_refused = Counter("millstream_ingress_retries_refused", "Refused attempts", registry=registry)
        # choices of a shard, by what decided: affinity, loss, weight, local, backup, unfit or hashed
        self.choices = Counter("millstream_ingress_choices", "Choices", ["model", "reason"], registry=registry)
        # promises that a request was expected to break where it went, its own and others': 1 = one request lost
        self.expected_loss = Histogram(
            "millstream_ingress_expected_loss", "Expected loss", ["model"], buckets=_LOSSES, registry=registry
        )
        # prompt tokens, as estimated, that were thought to be in the cache of the engine chosen; and all of them
        self.affine_tokens = Counter("millstream_ingress_affine_tokens", "Cached", ["model"], registry=registry)
        self.routed_tokens = Counter("millstream_ingress_routed_tokens", "Routed", ["model"], registry=registry)
        # how well the model's engines share the load, by the latest snapshot: `regret_ms` and `swing` in docs/wire.md
        self.regret_seconds = Gauge("millstream_ingress_regret_seconds", "Regret", ["model"], registry=registry)
        self.swing_ratio = Gauge("millstream_ingress_swing_ratio", "Swing of shares", ["model"], registry=registry)
        # requests shed as the snapshot says
        self.shed = Counter("millstream_ingress_shed", "Requests shed", ["model"], registry=registry)
        # Cancels by reason (client_gone, gave_up, moved)
        self.cancels = Counter("millstream_ingress_cancels", "Cancels sent", ["reason"], registry=registry)
        # Attaches: a gap or a long silence on an open request
        self.attaches = Counter("millstream_ingress_attaches", "Attaches sent", registry=registry)
        # streams cancelled because their reader was too slow
        self.slow_readers = Counter("millstream_ingress_slow_readers", "Slow readers", registry=registry)
        # records on the reply slot that could not be decoded
        self.undecodable = Counter("millstream_ingress_undecodable_records", "Undecodable", registry=registry)
        # how long ago the log last acknowledged something; read when scraped
        self.log_age_seconds = Gauge("millstream_ingress_log_age_seconds", "Since the last ack", registry=registry)
        # how old the credential cache may be; read when scraped
        self.credentials_age_seconds = Gauge(
            "millstream_ingress_credentials_age_seconds", "Credential cache age", registry=registry
        )

    def shared(self, snapshots: Mapping[str, Snapshot]) -> None:
        """How each model's traffic is shared; what isn't known is no number."""
        for model, snapshot in snapshots.items():
            regret_ms, swing = snapshot.regret_ms, snapshot.swing
            self.regret_seconds.labels(model).set(math.nan if regret_ms is None else regret_ms / 1_000)
            self.swing_ratio.labels(model).set(math.nan if swing is None else swing)

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)
