"""Grammars compiled for a model's tokens, and where a choice stands in one. Neither torch nor numpy here.

The compiler and the matcher are llguidance's. What it needs of a tokenizer is given to it by hand, from the same bytes
that the text is made of: read from tokenizer.json by itself it misunderstands decoders of more than one stage.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from wire.calls import OPENING
from workers.engine.errors import SamplingFailed, Uncompilable
from workers.engine.protocol import Grammar

KEPT = 32
"""compiled grammars"""
_MARKER = OPENING.encode()
_SILENT = 0
_WHY_CHARACTERS = 200
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


class Vocab:
    """A vocabulary as llguidance wants it. `tokens` by id, `control`: ids that text can't spell."""

    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], control: Iterable[int], eos_id: int, encode: Callable[[str], Sequence[int]]
    ) -> None:
        self.tokens = list(tokens)
        self.special_token_ids = sorted(control)
        self.eos_token_id = eos_id
        self._encode = encode

    def __call__(self, text: bytes | str) -> list[int]:
        return list(self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace")))


class Grammars:
    """Compiles, and keeps what was compiled last. May be used from several threads."""

    def __init__(self, vocab: Vocab, eos_ids: frozenset[int]) -> None:
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocab), eos_token=sorted(eos_ids))
        control = frozenset(vocab.special_token_ids)
        self._spelled = [b"" if token in control else spelled for token, spelled in enumerate(vocab.tokens)]
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._straying = _straying(self._spelled)
        self._lock = threading.Lock()

    def compile(self, text: str) -> LLMatcher:
        """A matcher at the grammar's beginning, to be copied. Uncompilable."""
        with self._lock:
            if text in self._compiled:
                self._compiled.move_to_end(text)
                return self._compiled[text]
        compiled = self._matcher(LLMatcher.grammar_from_lark, text)
        with self._lock:
            self._compiled[text] = compiled
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return compiled

    def check_schema(self, schema: str) -> None:
        """Uncompilable if the schema is."""
        self._matcher(LLMatcher.grammar_from_json_schema, schema)

    def start(self, grammar: Grammar) -> Matcher:
        """A choice's state at its beginning. Uncompilable."""
        compiled = self.compile(grammar.text)
        return _Lazy(compiled, self) if grammar.lazy else Matcher(compiled)

    def straying(self, written: int) -> bytes | None:
        """Which tokens may follow the first `written` bytes of the marker: all but those that complete it and go on.

        None when that is all of them. What goes on past the marker is bound to a grammar that such a token would evade.
        """
        return self._straying[written]

    def ends_marker(self, written: int, token: int) -> int:
        """How many bytes of the marker the text ends with, once `token` follows its first `written` bytes."""
        text = _MARKER[:written] + (self._spelled[token] if 0 <= token < len(self._spelled) else b"")
        return next((size for size in range(len(_MARKER), 0, -1) if text.endswith(_MARKER[:size])), 0)

    def _matcher(self, read: Callable[[str], str], text: str) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokenizer, read(text), log_level=_SILENT, limits=_LIMITS)
        except ValueError as exc:  # a number or a character that the compiler doesn't know
            raise Uncompilable(str(exc)[:_WHY_CHARACTERS]) from exc
        _check(matcher)
        # The first mask builds most of the lexer, for all copies; a grammar that used it up shows in the second.
        for _ in range(2):
            copy = matcher.deep_copy()
            copy.compute_bitmask()
            _check(copy)
        return matcher


class Matcher:
    """Where one choice stands in its grammar."""

    def __init__(self, compiled: LLMatcher) -> None:
        self._matcher = compiled.deep_copy()

    @property
    def ended(self) -> bool:
        """The grammar is complete, and nothing more can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self) -> bytes | None:
        """Which tokens may come next: bit `token % 8` of byte `token // 8`; None = any. SamplingFailed.

        An end-of-sequence token is among them when the text so far is complete.
        """
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise SamplingFailed("the text can't go on in the form that was asked for: it is too complex")
        return mask

    def take(self, token: int) -> None:
        """Go on by a token. One that isn't allowed shows at the next `allowed`."""
        self._matcher.consume_token(token)


class _Lazy(Matcher):
    """Anything goes until the marker is written; from there on the grammar."""

    def __init__(self, compiled: LLMatcher, grammars: Grammars) -> None:
        super().__init__(compiled)
        self._grammars = grammars
        self._written = 0
        """bytes of the marker that the text ends with"""

    @property
    def _free(self) -> bool:
        return self._written < len(_MARKER)

    @property
    def ended(self) -> bool:
        return not self._free and super().ended

    def allowed(self) -> bytes | None:
        return self._grammars.straying(self._written) if self._free else super().allowed()

    def take(self, token: int) -> None:
        if self._free:
            self._written = self._grammars.ends_marker(self._written, token)
        else:
            super().take(token)


_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
"""a schema made to be slow is refused, or ends its own request, after some tenths of a second"""


def _straying(spelled: Sequence[bytes]) -> list[bytes | None]:
    """By how much of the marker is written: the mask of what may follow."""
    long = {token: text for token, text in enumerate(spelled) if _MARKER[-1:] in text[:-1]}
    masks: list[bytes | None] = []
    for written in range(len(_MARKER)):
        rest = _MARKER[written:]
        stray = [
            token for token, text in long.items() if (text.startswith(rest) and text != rest) or _MARKER in text[:-1]
        ]
        masks.append(_all_but(stray, len(spelled)) if stray else None)
    return masks


def _all_but(tokens: Iterable[int], count: int) -> bytes:
    mask = bytearray(b"\xff" * -(-count // 8))
    for token in tokens:
        mask[token // 8] &= ~(1 << token % 8)
    return bytes(mask)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise Uncompilable(_why(matcher.get_error()))


def _why(error: str) -> str:
    """The compiler's reason on one line, without the source that it repeats."""
    lines = [line.strip() for line in error.splitlines()]
    reason = _PLACE.sub("", lines[0]) if lines else ""
    causes = [line for line in lines[1:] if line.startswith("error: ")]
    return " ".join((reason, *causes))[:_WHY_CHARACTERS] or "it allows no text at all"
