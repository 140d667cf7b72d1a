"""The metrics that come from snapshots."""

from __future__ import annotations

from ingress.metrics import Metrics
from wire.messages import Snapshot


def test_regret_and_swing_are_live_and_unknown_ones_are_no_numbers() -> None:
    known = Snapshot(model="a", region="here", version=1, created_ms=1, routes=(), regret_ms=12.0, swing=0.25)
    unknown = Snapshot(model="b", region="here", version=1, created_ms=1, routes=())
    metrics = Metrics()
    metrics.shared({"a": known, "b": unknown})
    text = metrics.exposition().decode()
    assert 'millstream_ingress_regret_seconds{model="a"} 0.012' in text
    assert 'millstream_ingress_swing_ratio{model="a"} 0.25' in text
    assert 'millstream_ingress_regret_seconds{model="b"} NaN' in text
    metrics.shared({"b": known})
    assert 'millstream_ingress_swing_ratio{model="b"} 0.25' in metrics.exposition().decode()
