"""Bytes ↔ messages."""

from __future__ import annotations

import typing

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_samples import FLEET, begin, request

from wire import messages
from wire.codec import VERSION, decode, encode
from wire.errors import DecodeError
from wire.messages import (
    Accepted,
    Cancel,
    Claim,
    Delta,
    Frames,
    Inbound,
    Journal,
    Logprob,
    Span,
    Tokens,
    ref_lane,
    ref_offset,
    request_ref,
)

CLAIM = Claim(engine="e", incarnation="i", nonce="n", fingerprint="f", at_ms=1)


def altered(**fields: object) -> bytes:
    return orjson.dumps(orjson.loads(encode(CLAIM)) | fields)


def test_every_message_has_a_tag_of_its_own() -> None:
    kinds = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, messages.Message)]
    tags = [kind.__struct_config__.tag for kind in kinds]
    assert sorted(set(tags)) == sorted(tags)


def test_a_message_comes_back_equal() -> None:
    frames = Frames(
        slot=3,
        incarnation="i",
        entries=(
            Accepted(
                request_id="r",
                attempt=1,
                epoch=7,
                fleet=FLEET,
                shard=2,
                ref=request_ref("batch", 9),
                prompt_tokens=1,
                cached_tokens=0,
                fingerprint="f",
            ),
            Delta(request_id="r", attempt=1, epoch=7, choice=0, first=0, ids=(1, 2), text="é\u2028"),
        ),
    )
    for message in (CLAIM, frames, request(), begin(4)):
        assert decode(encode(message), type(message)) == message
        assert decode(encode(message)) == message


@given(
    ids=st.lists(st.integers(0, 2**31), max_size=5),
    first=st.integers(0, 2**40),
    logprob=st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_span_comes_back_equal(ids: list[int], first: int, logprob: float) -> None:
    span = Span(request_ref("requests", 1), 0, first, tuple(ids), (Logprob(logprob, ((1, logprob),)),), "stop")
    message = Tokens(epoch=1, spans=(span,), at_ms=2)
    assert decode(encode(message), Journal) == message


def test_unknown_fields_are_ignored_and_missing_ones_take_their_default() -> None:
    assert decode(altered(from_the_future=[1]), Claim) == CLAIM
    plain = orjson.loads(encode(request()))
    del plain["tier"]
    assert decode(orjson.dumps(plain)).tier == "default"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "has no value"),
        (b"\xff", "isn't JSON"),
        (b"{", "isn't JSON"),
        (b"[1]", "isn't a JSON object"),
        (b"{}", "version isn't 1"),
        (altered(v=VERSION + 1), "version isn't 1"),
        (altered(t="Nonsense"), "no message type"),
        (altered(t=7), "no message type"),
        (altered(t="Message"), "no message type"),
        (altered(at_ms="late"), "a field of this Claim"),
        (altered(engine=None), "a field of this Claim"),
    ],
)
def test_what_can_not_be_decoded_says_why(value: bytes | None, why: str) -> None:
    with pytest.raises(DecodeError, match=why) as caught:
        decode(value)
    assert why in caught.value.why


def test_a_message_of_another_kind_has_no_place() -> None:
    for kind in (Cancel, Inbound):
        with pytest.raises(DecodeError, match="a Claim has no place here"):
            decode(encode(CLAIM), kind)
    assert decode(encode(CLAIM), Journal) == CLAIM


def test_the_reason_quotes_nothing_of_the_content() -> None:
    with pytest.raises(DecodeError) as caught:
        decode(altered(at_ms="a secret prompt"))
    assert "secret" not in str(caught.value)


def test_a_bad_fleet_inside_a_message_is_a_decode_error() -> None:
    frames = orjson.loads(encode(Frames(slot=0, incarnation="i", entries=())))
    frames["entries"] = [{"t": "Accepted", "fleet": ["UPPER", "cpu", "m", "1", "sim"]}]
    with pytest.raises(DecodeError):
        decode(orjson.dumps(frames))


def test_a_key_that_nobody_pays_for_is_none() -> None:
    key = messages.Credential(key_id="k", hmac="h", tenant="", project="p", name="", created_ms=1)
    with pytest.raises(DecodeError):
        decode(encode(key), messages.Credential)


def test_a_ref_names_lane_and_offset() -> None:
    for lane in typing.get_args(messages.Lane):
        for offset in (0, 1, 77):
            ref = request_ref(lane, offset)
            assert (ref_lane(ref), ref_offset(ref)) == (lane, offset)
    assert len({request_ref(lane, o) for lane in ("requests", "batch") for o in range(9)}) == 18
