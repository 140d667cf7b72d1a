"""The pure parts of the measurements."""

from __future__ import annotations

import msgspec

from millstream.bench.client import Answer
from millstream.bench.pipeline import Times
from millstream.bench.soak import WARM_UP_SAMPLES, Memory, Result, as_text, judge

MB = 1_000_000


def test_percentiles() -> None:
    times = Times.of([float(n) for n in range(1, 101)])
    assert (times.count, times.p50_ms, times.p99_ms) == (100, 50.5, 99.0)


def test_an_answer_is_read_from_its_bytes() -> None:
    raw = (
        b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
        b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":17}}\n\ndata: [DONE]\n\n'
    )
    answer = Answer(ttft_ms=1, total_ms=2, raw=raw)
    assert answer.whole
    assert (answer.events, answer.finish_reason, answer.completion_tokens) == (4, "length", 17)
    cut = Answer(ttft_ms=1, total_ms=2, raw=raw[:60])
    assert not cut.whole
    assert (cut.finish_reason, cut.completion_tokens) == (None, None)


def test_memory_is_judged_after_the_warm_up() -> None:
    # after the warm-up, thirds of 8 samples: medians of the first and last two
    warm_up = [10 * MB, *[50 * MB] * (WARM_UP_SAMPLES - 1)]
    flat = judge({"ingress": [*warm_up, *[100 * MB] * 6, 101 * MB, 103 * MB]})
    assert flat == (Memory(process="ingress", first_bytes=100 * MB, last_bytes=102 * MB, flat=True),)
    (grows,) = judge({"ingress": [*warm_up, *[100 * MB + n * 5 * MB for n in range(8)]]})
    assert not grows.flat


def test_kafka_may_take_the_heap_it_was_given_and_no_more() -> None:
    warm_up = [MB] * WARM_UP_SAMPLES
    assert judge({"kafka": [*warm_up, *[300 * MB] * 5, *[400 * MB] * 5]})[0].flat
    assert not judge({"kafka": [*warm_up, *[400 * MB] * 5, *[600 * MB] * 5]})[0].flat


def test_an_account_is_good_only_if_everything_is() -> None:
    good = Result(
        requests=9,
        endings=9,
        ledger_lines=9,
        client_tokens=70,
        ledger_tokens=70,
        differences=0,
        failures=(),
        memory=judge({"ingress": [MB] * 9}),
        took_s=1.0,
    )
    assert good.good
    assert "Every request is accounted for" in as_text(good)
    wrongs = ({"endings": 8}, {"ledger_lines": 10}, {"ledger_tokens": 71}, {"differences": 1}, {"failures": ("x",)})
    for wrong in wrongs:
        bad = msgspec.structs.replace(good, **wrong)
        assert not bad.good
        assert "NOT every request" in as_text(bad)
