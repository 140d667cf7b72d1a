"""Parameters that chat and completions share: their bounds, and what they become for the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from ingress.call import Tier
from ingress.errors import invalid, unsupported
from wire.messages import Sampling

T = TypeVar("T")
DrawSeed = Callable[[], int]
Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
MAX_LOGIT_BIASES = 1024
MAX_N = 128


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options`; keys that OpenAI doesn't know, such as continuous_usage_stats, are tolerated."""

    include_usage: bool | None = None


class Params(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints take. None is absent: OpenAI's default applies. Fields not listed are ignored."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    best_of: int | None = None
    max_tokens: Tokens | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=4)] | None = None
    seed: int | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIASES)] | None = None
    # not OpenAI's, known from vLLM and the benchmarks that speak to it
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    service_tier: str | None = None

    @property
    def tier(self) -> Tier:
        """What a request is served and billed as: `flex` if that is wished, else what everybody has."""
        return "flex" if self.service_tier == "flex" else "default"

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def stops(self) -> tuple[str, ...]:
        """Stop strings, one or many."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self, max_tokens: int | None) -> None:
        """ApiError for what no single field shows. `max_tokens` is the limit that will hold."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "'stream_options' is only allowed when 'stream' is true.")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", "'best_of' other than 'n' is not supported; leave it out.")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise invalid("seed", "Invalid value for 'seed': expected an integer from -2^63 to 2^64 - 1.")
        if self.min_tokens and max_tokens is not None and self.min_tokens > max_tokens:
            raise invalid("min_tokens", f"'min_tokens' must not be more than the limit of {max_tokens} tokens.")
        self._check_logit_bias()

    def sampling(self, draw_seed: DrawSeed) -> Sampling:
        """How to draw tokens; a missing seed is drawn here (R8)."""
        defaults = Sampling(seed=draw_seed() if self.seed is None else self.seed)
        return Sampling(
            seed=defaults.seed,
            temperature=_or(self.temperature, defaults.temperature),
            top_p=_or(self.top_p, defaults.top_p),
            top_k=max(_or(self.top_k, defaults.top_k), 0),
            min_p=_or(self.min_p, defaults.min_p),
            presence_penalty=_or(self.presence_penalty, defaults.presence_penalty),
            frequency_penalty=_or(self.frequency_penalty, defaults.frequency_penalty),
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty),
            logit_bias={str(int(token)): bias for token, bias in (self.logit_bias or {}).items()},
        )

    def _check_logit_bias(self) -> None:
        for token, bias in (self.logit_bias or {}).items():
            if not (token.isascii() and token.isdigit() and len(token) <= 10):
                raise invalid("logit_bias", "The keys of 'logit_bias' must be token ids: whole numbers as strings.")
            if not -100 <= bias <= 100:
                raise invalid("logit_bias", "The values of 'logit_bias' must be numbers from -100 to 100.")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
