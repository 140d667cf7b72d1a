"""The simulated engine's own tokens: bytes, common words, and an emoji in two halves. Needs no model, loads at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from workers.engine.errors import TemplateRefused
from workers.engine.vocabulary import Messages, Vocabulary

_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had "
    "by word but not what all were we when your can said there use an each which she do how their if will "
    "up other about out many then them these so some her would make like him into time has look two more "
    "write go see number no way could people my than first water been call who oil its now find long down "
    "day did get come made may part mill stream wheel river stone log grain flour miller sluice pond weir "
    "race gear shaft"
)
_EMOJI = "🌾".encode()
CONTROL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
WORDS = tuple(dict.fromkeys(_WORDS.split()))
FIRST_WORD = 256
HALVES = (FIRST_WORD + len(WORDS), FIRST_WORD + len(WORDS) + 1)
"""an emoji's first and second half: neither is a character"""
END = HALVES[1] + 1
_LABELS = (
    *(bytes([byte]) for byte in range(256)),
    *(b" " + word.encode() for word in WORDS),
    _EMOJI[:2],
    _EMOJI[2:],
    *(name.encode() for name in CONTROL),
)
_LONGEST_TOKEN_BYTES = max(map(len, _LABELS))
_WORD_IDS = {" " + word: FIRST_WORD + index for index, word in enumerate(WORDS)}
_PIECE = re.compile(r" [a-z]+|[^ ]+| ", re.DOTALL)


class SimulatedVocabulary(Vocabulary):
    """Words where it knows them, else bytes. Encoding and decoding are inverse."""

    @property
    def vocab_size(self) -> int:
        return len(_LABELS)

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset((END,))

    def token_bytes(self, token: int) -> bytes:
        return _LABELS[token] if 0 <= token < END else b""

    def token_label(self, token: int) -> bytes:
        return _LABELS[token] if 0 <= token < len(_LABELS) else b""

    @property
    def longest_token_bytes(self) -> int:
        return _LONGEST_TOKEN_BYTES

    def render(self, messages: Messages, tools: Messages = ()) -> str:
        turns = [_turn(message) for message in messages]
        return "".join(f"{CONTROL[role - END]}{content}\n" for role, content in turns) + CONTROL[3]

    def encode_chat(self, messages: Messages, tools: Messages = ()) -> tuple[int, ...]:
        ids: list[int] = []
        for role, content in map(_turn, messages):
            ids += (role, *self.encode_text(content + "\n"))
        return (*ids, END + 3)

    def encode_written(self, text: str) -> tuple[int, ...]:
        return self.encode_text(text)

    def encode_text(self, text: str) -> tuple[int, ...]:
        ids: list[int] = []
        for piece in _PIECE.findall(text):
            word = _WORD_IDS.get(piece)
            ids += piece.encode("utf-8", "replace") if word is None else (word,)
        return tuple(ids)


def _turn(message: Mapping[str, Any]) -> tuple[int, str]:
    """A message's control token and text."""
    role = "system" if message.get("role") == "developer" else message.get("role")
    name = f"<|{role}|>"
    if name not in CONTROL[1:]:
        raise TemplateRefused("the role of a message must be system, user, assistant or tool")
    return END + CONTROL.index(name), str(message.get("content") or "")
