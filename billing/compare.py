"""What a journal says about finished attempts against what the ledger says: differences named, nothing read. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from billing.charge import Line, proves
from billing.prices import UNPRICED, Price
from billing.rows import USAGE_COLUMNS
from wire.fleet import Fleet
from wire.messages import Finish, Usage

_OF_FINISH = ("reason", "prompt_tokens", "cached_tokens", "completion_tokens")
NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that the journal and the ledger don't agree on."""

    topic: str
    partition: int
    offset: int
    """of the Finish, or of the record that can't be used"""
    request_id: str
    """empty where the journal doesn't tell"""
    attempt: int
    journal: str
    ledger: str

    def __str__(self) -> str:
        who = f"request {self.request_id} attempt {self.attempt}, " if self.request_id else ""
        return f"{who}{self.topic}[{self.partition}] offset {self.offset}: journal {self.journal}; ledger {self.ledger}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What finished at the offsets [from_offset, to_offset) of one partition of a journal."""

    fleet: Fleet
    shard: int
    from_offset: int
    to_offset: int
    usages: Mapping[tuple[str, int], Usage]
    """by request id and attempt"""
    orphans: Mapping[int, Finish]
    """by offset: those whose beginning the log no longer holds"""

    @property
    def topic(self) -> str:
        return f"journal.{self.fleet.name}"


def compare(
    window: Window, lines: Iterable[Line], prices: Mapping[str, Price]
) -> tuple[list[Difference], list[Usage], list[Line]]:
    """(differences, usages without a line, the lines that were met). `prices`: the adopted ones, by price id."""
    differences: list[Difference] = []
    met: list[Line] = []
    missing = dict(window.usages)
    for line in lines:
        key = (line.usage.request_id, line.usage.attempt)
        usage = missing.pop(key, None)
        finish = window.orphans.get(line.usage.finish_offset)
        if usage is None and finish is None:
            differences.append(_differs(line.usage, "has no such Finish", _told(line.usage)))
            continue
        met.append(line)
        said = _fields(line.usage, usage, USAGE_COLUMNS) if usage else _fields(line.usage, finish, _OF_FINISH)
        differences += [_differs(usage or line.usage, journal, ledger) for journal, ledger in said]
        differences += [_differs(line.usage, journal, ledger) for journal, ledger in _money(line, prices)]
    return differences, list(missing.values()), met


def absent(usage: Usage) -> Difference:
    """The difference of an attempt that the ledger lacks."""
    return _differs(usage, _told(usage), NOTHING)


def orphans_without_line(window: Window, met: Sequence[Line]) -> list[Difference]:
    """Differences of Finishes, their beginnings no longer in the log, that no line of the ledger belongs to."""
    known = {line.usage.finish_offset for line in met}
    return [
        broken(window.topic, window.shard, offset, f"a Finish ({finish.reason})", NOTHING)
        for offset, finish in window.orphans.items()
        if offset not in known
    ]


def broken(topic: str, partition: int, offset: int, journal: str, ledger: str = "can't be compared") -> Difference:
    """The difference of a record that tells no request."""
    return Difference(
        topic=topic, partition=partition, offset=offset, request_id="", attempt=0, journal=journal, ledger=ledger
    )


def _money(line: Line, prices: Mapping[str, Price]) -> Iterator[tuple[str, str]]:
    if not proves(line):
        yield "gives another amount at the line's own prices", f"{line.amount_nanodollars} nano-dollars"
    if line.price_id == UNPRICED:
        return
    price = prices.get(line.price_id)
    stored = (line.input_picodollars, line.cached_input_picodollars, line.output_picodollars)
    if price is None:
        yield "knows no prices", f"{line.price_id}, which was never adopted"
    elif stored != (price.input_picodollars, price.cached_input_picodollars, price.output_picodollars):
        yield "knows no prices", f"other prices than those of {line.price_id}"


def _fields(line: Usage, journal: object, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        theirs, ours = getattr(journal, name), getattr(line, name)
        if theirs != ours:
            yield f"{name} {theirs}", f"{name} {ours}"


def _differs(usage: Usage, journal: str, ledger: str) -> Difference:
    return Difference(
        topic=f"journal.{usage.fleet.name}",
        partition=usage.shard,
        offset=usage.finish_offset,
        request_id=usage.request_id,
        attempt=usage.attempt,
        journal=journal,
        ledger=ledger,
    )


def _told(usage: Usage) -> str:
    return f"{usage.reason} {usage.prompt_tokens}+{usage.completion_tokens} tokens ({usage.cached_tokens} cached)"
