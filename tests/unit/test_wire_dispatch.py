"""Dispatches: what was told before choices were replayed still reads, and what is told now stays small."""

from __future__ import annotations

import msgspec
import orjson
from hypothesis import given
from hypothesis import strategies as st
from wire_samples import FLEET

from wire.codec import decode, encode
from wire.messages import Dispatch, Dispatches

OLD = {
    "model": "m",
    "fleet": ["local", "cpu", "m", "1", "sim"],
    "shard": 3,
    "prompt_tokens_estimate": 7,
    "prefix_chain": [1, 2],
}


def told(*sent: Dispatch) -> Dispatches:
    return Dispatches(ingress="local/0", incarnation="i", at_ms=5, sent=sent)


def plain(message: Dispatches) -> dict[str, object]:
    (one,) = orjson.loads(encode(message))["sent"]
    return dict(one)


def test_an_old_record_reads_as_one_that_does_not_say_why() -> None:
    record = {"t": "Dispatches", "v": 1, "ingress": "local/0", "incarnation": "i", "at_ms": 5, "sent": [OLD]}
    (one,) = decode(orjson.dumps(record), Dispatches).sent
    assert one == Dispatch(model="m", fleet=FLEET, shard=3, prompt_tokens_estimate=7, prefix_chain=(1, 2))
    assert (one.request_id, one.at_ms, one.snapshot_version) == ("", None, None)


def test_what_has_its_default_is_not_written() -> None:
    bare = Dispatch(model="m", fleet=FLEET, shard=3, prompt_tokens_estimate=7)
    assert set(plain(told(bare))) == {"model", "fleet", "shard", "prompt_tokens_estimate"}
    assert plain(told(msgspec.structs.replace(bare, attempt=2)))["attempt"] == 2


@given(
    tried=st.lists(st.integers(0, 99), max_size=3),
    at_ms=st.none() | st.integers(0, 2**45),
    loss=st.floats(0, 100),
    version=st.none() | st.integers(0, 2**40),
    residency=st.none() | st.just("eu"),
    features=st.lists(st.sampled_from(["tools", "logprobs"]), unique=True),
)
def test_any_dispatch_comes_back_equal(
    tried: list[int], at_ms: int | None, loss: float, version: int | None, residency: str | None, features: list[str]
) -> None:
    one = Dispatch(
        model="m",
        fleet=FLEET,
        shard=3,
        prompt_tokens_estimate=7,
        request_id="r",
        attempt=len(tried) + 1,
        at_ms=at_ms,
        reason="loss",
        loss=loss,
        snapshot_version=version,
        residency=residency,
        features=tuple(features),
        tried=tuple((FLEET, shard) for shard in tried),
    )
    assert decode(encode(told(one)), Dispatches) == told(one)


def test_a_usual_one_takes_less_than_two_hundred_bytes_more() -> None:
    usual = {
        "request_id": "0198f2c4-5a3e-7b21-9c7d-1f2e3d4c5b6a",
        "at_ms": 1_796_032_392_072,
        "reason": "affinity",
        "loss": 0.190172,
        "cached_tokens": 1_024,
        "snapshot_version": 123_456_789,
        "waited_ms": 1,
    }
    assert len(orjson.dumps(OLD | usual)) - len(orjson.dumps(OLD)) < 200
    assert plain(told(msgspec.convert(OLD | usual, Dispatch))) == OLD | usual
