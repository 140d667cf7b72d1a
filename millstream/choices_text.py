"""How `millstream choices` looks to people and programs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from millstream.status_text import duration
from millstream.table import table
from routing.board import Candidate
from routing.hindsight import Hindsight
from routing.query import Offer
from routing.replay import Decision


def summary_text(found: Sequence[Hindsight], last_s: int) -> str:
    """A row a model, and whose regret is the worst."""
    if not found:
        return f"no request was sent in the last {duration(last_s)}"
    header = ("model", "choices", "alike", "regret", "p99", "worst", "swing", "cached", "by reason")
    rows = [
        (
            one.model,
            one.decisions,
            _share(one.alike),
            _loss(one.regret_mean),
            _loss(one.regret_p99),
            _loss(one.regret_worst),
            None if one.swing is None else f"{one.swing:.2f}",
            _share(one.cached_tokens / one.prompt_tokens if one.prompt_tokens else 0.0),
            ", ".join(f"{reason} {count}" for reason, count in one.reasons.items()),
        )
        for one in found
    ]
    worst = [
        f"{one.model}: the worst is {one.worst_request_id}; `millstream choices {one.worst_request_id}` shows why"
        for one in found
        if one.regret_worst
    ]
    return "\n\n".join(filter(None, (f"the last {duration(last_s)}", table(header, rows), "\n".join(worst))))


def summary_json(found: Sequence[Hindsight]) -> str:
    """For programs."""
    return _json(found)


def decisions_text(found: Sequence[Decision]) -> str:
    """Attempt by attempt: what was chosen, what there was to choose from."""
    return "\n\n\n".join(map(_decision, found))


def decisions_json(found: Sequence[Decision]) -> str:
    """For programs."""
    return _json([_plain(one) for one in found])


def _decision(one: Decision) -> str:
    dispatch = one.dispatch
    head = [
        f"{dispatch.request_id}, attempt {dispatch.attempt}: {dispatch.model}, {dispatch.prompt_tokens_estimate} prompt"
        f" tokens, about {dispatch.cached_tokens} of them cached",
        f"sent {_when(one.at_ms)} by {one.ingress} to {_shard(one.chosen)}, after {dispatch.waited_ms} ms",
        f"reason {dispatch.reason}, expected loss {_loss(dispatch.loss)}, {_snapshot(one)}",
        _again(one),
    ]
    if not one.offers:
        return "\n".join(head)
    header = ("engine", "shard", "weight", "cached", "wait ms", "loss", "")
    rows = [
        (
            one.engines[offer.candidate],
            _shard(offer.candidate),
            f"{offer.weight:.3f}",
            offer.cached_tokens,
            f"{offer.wait_ms:.0f}",
            _loss(offer.loss),
            _note(one, offer),
        )
        for offer in sorted(one.offers, key=lambda offer: (not offer.able, offer.loss))
    ]
    return "\n".join(head) + "\n\n" + table(header, rows)


def _snapshot(one: Decision) -> str:
    version = one.dispatch.snapshot_version
    if version is None:
        return "without a snapshot"
    if one.followed is None:
        return f"by snapshot {version}, which isn't in the log any more"
    return f"by snapshot {version}" + (f": {one.followed.why}" if one.followed.why else "")


def _again(one: Decision) -> str:
    if one.dispatch.reason == "unfit":
        return "no engine could serve it, so there is nothing to compare"
    if one.again is None:
        return "nothing was known of any engine, so there is nothing to compare"
    known = f"regret {_loss(one.regret)}" if one.regret is not None else "nothing was known of that shard"
    if one.alike:
        return f"with all that the log knew it would go there again; {known}"
    return f"with all that the log knew it would go to {_shard(_elsewhere(one))}, by {one.again.reason}; {known}"


def _note(one: Decision, offer: Offer) -> str:
    if offer.candidate == one.chosen:
        return "chosen"
    if offer.candidate == _elsewhere(one):
        return "would be chosen"
    return "" if offer.able else "not able"


def _elsewhere(one: Decision) -> Candidate | None:
    return None if one.again is None else Candidate(one.again.fleet, one.again.shard)


def _plain(one: Decision) -> dict[str, Any]:
    dispatch, again = one.dispatch, _elsewhere(one)
    return {
        "request_id": dispatch.request_id,
        "attempt": dispatch.attempt,
        "model": dispatch.model,
        "at_ms": one.at_ms,
        "ingress": one.ingress,
        "shard": _shard(one.chosen),
        "reason": dispatch.reason,
        "loss": dispatch.loss,
        "prompt_tokens": dispatch.prompt_tokens_estimate,
        "cached_tokens": dispatch.cached_tokens,
        "waited_ms": dispatch.waited_ms,
        "snapshot_version": dispatch.snapshot_version,
        "why": None if one.followed is None else one.followed.why,
        "again": None if again is None else _shard(again),
        "alike": one.alike,
        "regret": one.regret,
        "candidates": [
            {
                "engine": one.engines[offer.candidate],
                "shard": _shard(offer.candidate),
                "weight": offer.weight,
                "able": offer.able,
                "cached_tokens": offer.cached_tokens,
                "wait_ms": offer.wait_ms,
                "loss": offer.loss,
                "chosen": offer.candidate == one.chosen,
            }
            for offer in one.offers
        ],
    }


def _json(found: Any) -> str:
    return orjson.dumps(found, option=orjson.OPT_INDENT_2).decode()


def _shard(shard: Candidate | None) -> str:
    return "-" if shard is None else f"{shard.fleet.name}/{shard.shard}"


def _share(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _loss(requests: float | None) -> str | None:
    return None if requests is None else f"{requests:.4f}"


def _when(ms: float) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"
