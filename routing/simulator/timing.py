"""How long an engine's steps take.

The coefficients are those of the polynomial timing of Dynamo's mocker (ai-dynamo 1.6.1), so that figures compare: a
prefill of x new tokens takes 4.209989e-7·x² + 0.01518344·x + 16.50142 ms, a decode step −25.74·p² + 54.01·p + 5.74 ms
with p = logical key/value tokens of the decoding sequences / tokens that the cache holds, at most 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

BLOCK_TOKENS = 64
"""Tokens of one block of the key/value cache"""
CHUNK_TOKENS = 8_192
"""The most tokens in one step"""

SQUARE_MS, LINEAR_MS, STEP_MS = 4.209989e-7, 0.01518344, 16.50142
"""Prefill: for each token squared, for each token, for the step"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One kind of hardware. Speeds divide times: 1 is the mocker's; an H100 next to an A100 is 1.8 and 1.5."""

    prefill_speed: float = 1.0
    decode_speed: float = 1.0
    kv_tokens: int = 16_384 * BLOCK_TOKENS

    def faster(self, times: float) -> Timing:
        """The same, so many times as fast."""
        return replace(self, prefill_speed=self.prefill_speed * times, decode_speed=self.decode_speed * times)

    def prefill_ms(self, tokens: int) -> float:
        """Prefill of so many new tokens in one step; 0 for none."""
        if tokens <= 0:
            return 0.0
        return (SQUARE_MS * tokens * tokens + LINEAR_MS * tokens + STEP_MS) / self.prefill_speed

    def chunked_ms(self, tokens: int) -> float:
        """Prefill of so many new tokens in the fewest steps, with nothing beside it."""
        whole, rest = divmod(tokens, CHUNK_TOKENS)
        return whole * self.prefill_ms(CHUNK_TOKENS) + self.prefill_ms(rest)

    def decode_ms(self, kv_tokens: float) -> float:
        """One decode step at so many logical tokens."""
        full = min(kv_tokens / self.kv_tokens, 1.0)
        return (5.74 + full * (54.01 - 25.74 * full)) / self.decode_speed

    def span_ms(self, kv_tokens: int, sequences: int, steps: int) -> float:
        """`steps` decode steps in a row, each of which adds a token to each of `sequences`: Σ decode_ms(kv + j·n).

        Exact while the cache isn't full; from then on every step takes as long as at a full one.
        """
        free = min(max((self.kv_tokens - kv_tokens) // sequences, 0), steps)
        fill, growth = kv_tokens / self.kv_tokens, sequences / self.kv_tokens
        pairs = free * (free - 1) / 2
        linear = free * fill + growth * pairs
        squares = free * fill * fill + 2 * fill * growth * pairs + growth * growth * pairs * (2 * free - 1) / 3
        ms = 5.74 * free + 54.01 * linear - 25.74 * squares
        return (ms + (steps - free) * (5.74 + 54.01 - 25.74)) / self.decode_speed

    def steps_within(self, kv_tokens: int, sequences: int, steps: int, within_ms: float) -> int:
        """How many of `steps` decode steps in a row have ended after `within_ms`."""
        if within_ms >= self.span_ms(kv_tokens, sequences, steps):
            return steps
        low, high = 0, steps  # ended after low steps, not after high
        guess = min(int(within_ms / self.decode_ms(kv_tokens)), steps - 1)
        while high - low > 1:
            spent_ms = self.span_ms(kv_tokens, sequences, guess)
            if spent_ms <= within_ms:
                low = guess
            else:
                high = guess
            secant = guess + int((within_ms - spent_ms) / self.decode_ms(kv_tokens + guess * sequences))
            guess = min(max(secant, low + 1), high - 1)
        return low


COLD = Timing()
"""The mocker's own hardware"""
