"""Rating: one usage and one price give one ledger line, in integers. Pure.

The rule (docs/billing.md says it for people):
- stop, length, tool_calls, content_filter are billed: prompt and completion.
- cancelled and timeout are billed the same if anything was generated, else nothing.
- expired, refused, moved and error are recorded and never billed.

amount = (prompt − cached) × input + cached × cached input + completion × output, exact in pico-dollars, then rounded
once, to the nearest nano-dollar, half a nano-dollar upwards. A bill is the sum of its lines; nothing is rounded again.
The prompt counts once, whatever n is: `completion_tokens` is over all choices, `prompt_tokens` isn't multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

from billing.errors import BadUsage
from billing.prices import UNPRICED, Price, PriceBook
from wire.messages import FinishReason, Usage

PICODOLLARS_PER_NANODOLLAR = 1_000
ALWAYS_BILLED: frozenset[FinishReason] = frozenset({"stop", "length", "tool_calls", "content_filter"})
BILLED_IF_GENERATED: frozenset[FinishReason] = frozenset({"cancelled", "timeout"})
MAX_TOKENS = 10**9
"""More in one attempt is a broken usage: together with the highest price it still fits 64 bits"""
_MAX_MS = 4_102_444_800_000
"""The year 2100"""
_MAX_OFFSET = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the ledger: the usage, the prices it was rated with, and the amount, so it proves itself."""

    usage: Usage
    price_id: str
    input_picodollars: int
    """per token, as the other prices"""
    cached_input_picodollars: int
    output_picodollars: int
    billable: bool
    amount_nanodollars: int


def charge(usage: Usage, price: Price | None) -> Line:
    """The line of a usage. Without a price the amount is 0, and the price id says so. BadUsage for what can't be."""
    check(usage)
    billable = is_billable(usage.reason, usage.completion_tokens)
    prices = (price.input_picodollars, price.cached_input_picodollars, price.output_picodollars) if price else (0, 0, 0)
    return Line(
        usage=usage,
        price_id=price.price_id if price else UNPRICED,
        input_picodollars=prices[0],
        cached_input_picodollars=prices[1],
        output_picodollars=prices[2],
        billable=billable,
        amount_nanodollars=amount_nanodollars(usage, *prices) if billable else 0,
    )


def rate(usage: Usage, book: PriceBook) -> Line:
    """The line of a usage at the price that was in effect when its request was created."""
    return charge(usage, book.price_at(usage.model, usage.tier, usage.created_ms))


def is_billable(reason: FinishReason, completion_tokens: int) -> bool:
    """Whether an ending is billed."""
    return reason in ALWAYS_BILLED or (reason in BILLED_IF_GENERATED and completion_tokens > 0)


def amount_nanodollars(usage: Usage, input_pd: int, cached_input_pd: int, output_pd: int) -> int:
    """The amount of a billed usage; prices in pico-dollars per token."""
    exact = (
        (usage.prompt_tokens - usage.cached_tokens) * input_pd
        + usage.cached_tokens * cached_input_pd
        + usage.completion_tokens * output_pd
    )
    return (exact + PICODOLLARS_PER_NANODOLLAR // 2) // PICODOLLARS_PER_NANODOLLAR


def proves(line: Line) -> bool:
    """Whether a line's amount follows from its own counts and prices."""
    billable = is_billable(line.usage.reason, line.usage.completion_tokens)
    prices = (line.input_picodollars, line.cached_input_picodollars, line.output_picodollars)
    amount = amount_nanodollars(line.usage, *prices) if billable else 0
    return (line.billable, line.amount_nanodollars) == (billable, amount)


def check(usage: Usage) -> None:
    """BadUsage for counts and times that no journal gives, so that nothing else can be refused by the database."""
    counts = {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
    }
    for name, value in counts.items():
        if not 0 <= value <= MAX_TOKENS:
            raise BadUsage(f"{name} is out of range")
    if usage.cached_tokens > usage.prompt_tokens:
        raise BadUsage("more cached tokens than prompt tokens")
    for name in ("created_ms", "begun_ms", "first_token_ms", "finished_ms"):
        value = getattr(usage, name)
        if value is not None and not 0 <= value < _MAX_MS:
            raise BadUsage(f"{name} is out of range")
    for name in ("ref", "begin_offset", "finish_offset"):
        if not 0 <= getattr(usage, name) < _MAX_OFFSET:
            raise BadUsage(f"{name} is out of range")
    if not (1 <= usage.attempt < 2**31 and 0 <= usage.shard < 2**31):
        raise BadUsage("attempt or shard is out of range")
    if not usage.request_id or not usage.tenant:
        raise BadUsage("request_id or tenant is empty")
