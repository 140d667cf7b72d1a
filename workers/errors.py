"""Errors of the worker's own doing; the engine's are in `workers.engine.errors`."""

from __future__ import annotations

from wire.errors import MillstreamError


class WorkerError(MillstreamError):
    """Root of the worker's errors."""


class StartFailed(WorkerError):
    """The worker can't run as it is set up; the message says what to change."""
