"""What a client is told when a request ends otherwise than with its answer."""

from __future__ import annotations

from ingress.errors import ApiError, unavailable
from wire.messages import End, Refused

NATURAL = frozenset(("stop", "length", "tool_calls", "content_filter"))
"""endings that clients know as finish reasons"""


def error_of_refusal(refused: Refused) -> ApiError:
    """The owner's own words; its status decides how OpenAI's clients treat it."""
    return ApiError(
        refused.status,
        refused.message,
        code=refused.code,
        param=refused.param,
        retry_after_s=refused.retry_after_s or (1 if refused.status in (429, 503) else None),
    )


def error_of_end(end: End) -> ApiError | None:
    """None for an answer that is complete."""
    if end.reason in NATURAL:
        return None
    return {
        "timeout": deadline_passed,
        "expired": nobody_accepted,
        "error": _engine_failed,
    }.get(end.reason, _stopped)()


def nobody_accepted() -> ApiError:
    """503: queued, but no engine took it on in time."""
    return unavailable("No engine could take the request on in time; try again.", retry_after_s=2, code="overloaded")


def log_away() -> ApiError:
    """503: the log can't be reached."""
    return unavailable("The service can't take requests just now; try again.", retry_after_s=5)


def deadline_passed() -> ApiError:
    """504: generated for as long as a request may; what was generated is billed, so a retry costs again."""
    return ApiError(
        504,
        "The request was still generating at its deadline; ask for fewer tokens.",
        code="timeout",
        should_retry=False,
    )


def inconsistent() -> ApiError:
    """500: rather an error than an answer that contradicts itself (R7). Not billed."""
    return ApiError(500, "The answer could not be continued consistently; try again.", code="inconsistent_answer")


def shutting_down() -> ApiError:
    """503: this process ends; another one serves."""
    return unavailable("The server is shutting down; try again.")


def shed() -> ApiError:
    """503: over capacity, and this request is of those to refuse."""
    return unavailable("The service is over capacity; try again.", retry_after_s=2, code="overloaded")


def _engine_failed() -> ApiError:
    return ApiError(500, "The engine failed on this request; it is not billed.", code="engine_error")


def _stopped() -> ApiError:
    return ApiError(503, "The request was cancelled.", code="cancelled", should_retry=False)
