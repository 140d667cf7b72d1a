"""What the shard's state machine tells its shell to do, and what the shell tells it. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from wire.fleet import Fleet
from wire.journal import Attempt
from wire.messages import Entry, Frames, Journal, Lane, Ref, ReplyTo, Usage
from workers.engine.protocol import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One try at owning a shard. Acknowledgements of an earlier try are stale, whatever they say."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Write to the journal, in order; answer each with `appended(term, offset)` or `append_failed(term)`."""

    term: Term
    record: Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Send frames. They may be lost: the reader asks again (Attach)."""

    region: str
    frames: Frames


@dataclass(frozen=True, slots=True, kw_only=True)
class SendUsage:
    """Send until it is acknowledged, then answer with `usage_sent(term, ref)`."""

    term: Term
    ref: Ref
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request the model can run, as the tokenizer sees it."""

    prompt: tuple[int, ...]
    max_tokens: int
    links: tuple[tuple[int, int], ...] = ()
    """(link of the request's prefix chain, tokens of the prompt that hold all its text)"""
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Give the attempt to the engine, with what it has already; it must be prepared again where `prepared` is None."""

    epoch: int
    attempt: Attempt
    prepared: Prepared | None
    alone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """The engine shall forget this request."""

    epoch: int
    ref: Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltAll:
    """The engine shall forget everything of this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTail:
    """Read the journal from where the group's commit says up to `until` (the Claim's own offset), then `tail_read`."""

    term: Term
    until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """Ownership is in doubt. If the group still proposes this worker, claim again; otherwise forget the shard."""

    term: Term


Effect = Append | Reply | SendUsage | Run | Halt | HaltAll | ReadTail | Reclaim


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who claims, for which shard."""

    engine: str
    incarnation: str
    fleet: Fleet
    shard: int


@dataclass(slots=True, kw_only=True)
class Pending:
    """An Append on its way, and what may leave once it is acknowledged (R2)."""

    offset: int
    replies: list[tuple[ReplyTo, Entry]]
    usages: list[Ref] = field(default_factory=list)
    passed: list[tuple[Lane, int]] = field(default_factory=list)
    """(lane, offset) of records whose effect this makes durable"""
    carried: Ref | None = None
    """the attempt whose older records aren't needed once this is acknowledged"""
