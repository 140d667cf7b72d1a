"""What can go wrong in and around an engine."""

from __future__ import annotations

from wire.errors import MillstreamError


class EngineError(MillstreamError):
    """Root of the errors of engines, tokenizers and models."""


class TemplateRefused(EngineError):
    """The model's chat template doesn't take these messages; the message is the template's own."""


class ModelUnusable(EngineError):
    """A model directory is missing, broken or of a kind this engine can't run; says what to do."""


class SequenceRefused(EngineError):
    """A sequence can't run on this engine, whatever the load; holds no content of the request."""


class EngineGone(EngineError):
    """The engine process ended before it was ready; holds its exit status and last words."""


class SamplingFailed(EngineError):
    """A request's logits aren't numbers: it can't go on, the others can."""


class Uncompilable(EngineError):
    """A grammar that can't be compiled; the message says why, in the compiler's words."""


class GrammarRefused(EngineError):
    """What an answer shall look like can't be compiled. `param` names the schema, the message says what is wrong."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param
