"""One error tree for money."""

from __future__ import annotations

from wire.errors import MillstreamError


class BillingError(MillstreamError):
    """Root of billing's errors."""


class PriceBookError(BillingError):
    """The price book can't be used; the message names the entry and says what to put there."""


class BadUsage(BillingError):
    """A usage no journal can have given: negative counts, more cached than prompt tokens, times out of range."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class SchemaError(BillingError):
    """The ledger's schema is not what this version needs; the message says what to do."""


class LedgerAway(BillingError):
    """The ledger's database can't be reached or did not carry out what was asked; it may be asked again."""


class BadStatement(BillingError):
    """A month or time zone of a statement isn't one."""
