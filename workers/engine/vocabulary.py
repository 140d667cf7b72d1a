"""Text ↔ token ids, as both the I/O process and the engine need it. No torch here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from wire.messages import ChoiceEnd, Logprob, TokenLogprob
from workers.engine.text import TextStream

if TYPE_CHECKING:
    from workers.engine.grammar import Grammars

Messages = Sequence[Mapping[str, Any]]


def names_token(text: str, vocab_size: int) -> bool:
    """Whether a decimal string, such as a key of `logit_bias`, is a token's id."""
    return text.isascii() and text.isdecimal() and int(text) < vocab_size


class Vocabulary(ABC):
    """A model's tokens and its chat template."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Ids run from 0 to this, exclusive."""

    @property
    @abstractmethod
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a choice; they never appear in it."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text; nothing for a control token or an unknown id."""

    @abstractmethod
    def token_label(self, token: int) -> bytes:
        """What a token is called: its bytes, or a control token's name."""

    @property
    @abstractmethod
    def longest_token_bytes(self) -> int:
        """No token adds more to the text: so many bytes take at least so many tokens, known without encoding them."""

    @abstractmethod
    def render(self, messages: Messages, tools: Messages = ()) -> str:
        """The prompt as text, up to where the assistant's turn begins. For showing and for prefix hashes:

        only `encode_chat` tells a control token from the same characters in a message. TemplateRefused.
        """

    @abstractmethod
    def encode_chat(self, messages: Messages, tools: Messages = ()) -> tuple[int, ...]:
        """The prompt of a chat. Control tokens come from the template alone: in a message they are plain text.

        TemplateRefused when the template doesn't take these messages.
        """

    @abstractmethod
    def encode_text(self, text: str) -> tuple[int, ...]:
        """The prompt of a plain completion."""

    @abstractmethod
    def encode_written(self, text: str) -> Sequence[int]:
        """Ids as the model itself writes a text; they spell it exactly."""

    @cached_property
    def grammars(self) -> Grammars:
        """What binds answers to a form; made when it is first needed, in some tenths of a second."""
        from workers.engine.grammar import Grammars, Vocab

        ids = range(self.vocab_size)
        control = [token for token in ids if not self.token_bytes(token)]
        vocab = Vocab(list(map(self.token_label, ids)), control, min(self.eos_ids), self.encode_written)
        return Grammars(vocab, self.eos_ids)

    def show_logprobs(self, ids: Sequence[int], logprobs: Sequence[Logprob]) -> tuple[TokenLogprob, ...]:
        """Logprobs as OpenAI shows them; `bytes` is exact where `token` can't be (half a character)."""
        return tuple(self._shown(token, entry.logprob, entry.top) for token, entry in zip(ids, logprobs, strict=True))

    def _shown(self, token: int, logprob: float, top: Sequence[tuple[int, float]] = ()) -> TokenLogprob:
        label = self.token_label(token)
        return TokenLogprob(
            token=label.decode("utf-8", "replace"),
            bytes=tuple(label),
            logprob=logprob,
            top=tuple(self._shown(other, value) for other, value in top),
        )

    def render_text(
        self, ids: Sequence[int], stop: Sequence[str] = (), end: ChoiceEnd | None = None, *, calls: bool = False
    ) -> str:
        """All text an engine has released once a choice stands at `ids`; with `end`, the choice's whole text.

        `calls`: it may hold tool calls.
        """
        text = TextStream(self.token_bytes, stop, calls=calls)
        released = text.push(ids)
        return released + text.finish() if end is not None else released
