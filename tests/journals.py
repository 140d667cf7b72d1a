"""Journal records for tests: requests of one choice and 10 prompt tokens, 4 of them cached."""

from __future__ import annotations

from collections.abc import Sequence

from usages import NOON_MS

from wire.messages import Begin, Body, Finish, FinishReason, Ref, ReplyTo, Request, Sampling, Span, Tokens


def begin(epoch: int, n: int, tenant: str = "acme") -> Begin:
    request = Request(
        request_id=f"r{n}",
        attempt=1,
        tenant=tenant,
        project="p",
        key_id="k",
        model="simulated",
        version="1",
        body=Body(sampling=Sampling(seed=1)),
        reply=ReplyTo(region="local", slot=0, incarnation="x"),
        created_ms=NOON_MS,
        accept_by_ms=NOON_MS + 1_000,
        deadline_ms=NOON_MS + 9_000,
    )
    return Begin(epoch=epoch, ref=Ref(n * 2), request=request, prompt_tokens=10, cached_tokens=4, at_ms=NOON_MS + 5)


def spoken(epoch: int, n: int, tokens: Sequence[int], first: int = 0) -> Tokens:
    return Tokens(epoch=epoch, spans=(Span(Ref(n * 2), 0, first, tuple(tokens)),), at_ms=NOON_MS + 9)


def finish(epoch: int, n: int, tokens: int, reason: FinishReason = "stop") -> Finish:
    return Finish(
        epoch=epoch,
        ref=Ref(n * 2),
        reason=reason,
        ends=(None,),
        prompt_tokens=10,
        cached_tokens=4,
        completion_tokens=tokens,
        at_ms=NOON_MS + 20,
    )
