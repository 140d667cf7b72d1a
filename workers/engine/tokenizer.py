"""A real model's tokens and chat template, from its converted directory. Loads in a fraction of a second, no torch.

Control tokens come from the template alone. To tell the template's `<|im_end|>` from the same characters in a message,
those in messages are broken by a mark before the template is rendered; the text is then cut at the unbroken ones, and
the pieces between are encoded, without the mark, by a tokenizer that knows no control tokens at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from wire.calls import CLOSING, OPENING
from workers.engine.errors import ModelUnusable
from workers.engine.template import Template
from workers.engine.tool_prompt import ToolPrompt
from workers.engine.vocabulary import Messages, Vocabulary

_MARKS = range(0xE000, 0xF8FF)
"""characters for private use: one that is in none of the messages is the mark"""

_SHRINKS_AT_MOST = 4
"""times, by Unicode's normal forms: composed, a character of 2 to 4 bytes stands for up to three"""


class Tokenizer(Vocabulary):
    """Of the byte-level kind: each token is a fixed string of bytes."""

    def __init__(
        self,
        plain: tokenizers.Tokenizer,
        pieces: Sequence[bytes],
        control: Mapping[str, int],
        *,
        opening: Sequence[int],
        eos_ids: frozenset[int],
        template: Template,
        shown: Collection[str] = (),
        shrinks: bool = False,
    ) -> None:
        """`control`: ids of tokens that no message can hold; of these `shown` are part of an answer's text.

        `shrinks`: text may lose bytes before it is cut into tokens.
        """
        self._plain = plain
        self._pieces = pieces
        self._control = control
        self._silent_ids = frozenset(token for name, token in control.items() if name not in shown)
        self._written = {name: control[name] for name in shown}
        self._opening = tuple(opening)
        self._eos_ids = eos_ids
        self._template = template
        self._tool_prompt = ToolPrompt(template.render)
        self._longest_token_bytes = max(map(len, pieces)) * (_SHRINKS_AT_MOST if shrinks else 1)

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """ModelUnusable when the directory lacks what is needed or holds another kind of tokenizer."""
        described = _read(model_dir / "tokenizer.json")
        config, model_config = _read(model_dir / "tokenizer_config.json"), _read(model_dir / "config.json")
        if "ByteLevel" not in json.dumps(described.get("decoder")):
            raise ModelUnusable(f"{model_dir}: only byte-level tokenizers are supported (Llama 3, SmolLM, Qwen)")
        control = {token["content"]: token["id"] for token in described["added_tokens"]}
        shown = [token["content"] for token in described["added_tokens"] if _is_shown(token)]
        full = tokenizers.Tokenizer.from_str(json.dumps(described))
        return cls(
            tokenizers.Tokenizer.from_str(json.dumps({**described, "added_tokens": [], "post_processor": None})),
            _pieces(described["model"]["vocab"], control),
            control,
            opening=full.encode("").ids,
            eos_ids=_eos_ids(model_dir, model_config, config, control),
            template=Template(_template_source(model_dir, config), _named_tokens(config)),
            shown=shown,
            shrinks=described.get("normalizer") is not None,
        )

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    def token_bytes(self, token: int) -> bytes:
        return b"" if token in self._silent_ids else self.token_label(token)

    def token_label(self, token: int) -> bytes:
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    @property
    def longest_token_bytes(self) -> int:
        return self._longest_token_bytes

    def render(self, messages: Messages, tools: Messages = ()) -> str:
        return self._template.render(*self._tool_prompt.adapted(messages, tools))

    def encode_chat(self, messages: Messages, tools: Messages = ()) -> tuple[int, ...]:
        mark = _mark(json.dumps([list(messages), list(tools)], ensure_ascii=False, default=str))
        turns, tools = self._tool_prompt.adapted(messages, tools)
        text = self._template.render(self._broken(turns, mark), self._broken(tools, mark))
        return tuple(self._encoded(text, self._cut, self._control, mark))

    def encode_written(self, text: str) -> list[int]:
        return self._encoded(text, self._cut_written, self._written) if self._written else self.encode_plain(text)

    def encode_text(self, text: str) -> tuple[int, ...]:
        return (*self._opening, *self.encode_plain(text))

    def encode_plain(self, text: str) -> list[int]:
        """Ids of the characters as they are; none is a control token."""
        if not text:
            return []
        return list(self._plain.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False).ids)

    def _encoded(self, text: str, cut: re.Pattern[str], named: Mapping[str, int], mark: str = "") -> list[int]:
        """Ids of a text in which the `named` tokens are themselves; the rest is plain, without the mark."""
        ids: list[int] = []
        for piece in cut.split(text):
            token = named.get(piece)
            ids += self.encode_plain(piece.replace(mark, "") if mark else piece) if token is None else (token,)
        return ids

    @cached_property
    def _cut(self) -> re.Pattern[str]:
        return _at_any(self._control)

    @cached_property
    def _cut_written(self) -> re.Pattern[str]:
        return _at_any(self._written)

    def _broken(self, value: Any, mark: str) -> Any:
        """`value` with a mark in every control token that its strings spell out."""
        if isinstance(value, str):
            return self._cut.sub(lambda found: found[0][0] + mark + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self._broken(name, mark): self._broken(inner, mark) for name, inner in value.items()}
        if isinstance(value, Sequence):
            return [self._broken(inner, mark) for inner in value]
        return value


def _at_any(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


def _is_shown(token: Mapping[str, Any]) -> bool:
    """Whether an added token is part of the text that it stands in: it is not special, or it begins or ends a call."""
    return not token["special"] or token["content"] in (OPENING, CLOSING)


def _mark(text: str) -> str:
    return next(character for character in map(chr, _MARKS) if character not in text)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError as exc:
        raise ModelUnusable(f"{path} is missing; delete the directory, and `millstream up` makes it again") from exc
    except ValueError as exc:
        raise ModelUnusable(f"{path} is broken; delete the directory, and `millstream up` makes it again") from exc
    if not isinstance(found, dict):
        raise ModelUnusable(f"{path} doesn't hold a JSON object")
    return found


def _template_source(model_dir: Path, config: Mapping[str, Any]) -> str:
    aside = model_dir / "chat_template.jinja"
    source = aside.read_text() if aside.is_file() else config.get("chat_template")
    if not isinstance(source, str):
        raise ModelUnusable(f"{model_dir} has no chat template; only instruction-tuned models can be served")
    return source


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its like, by which templates call control tokens."""
    named = {name: config.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: value for name, value in contents.items() if isinstance(value, str)}


def _eos_ids(
    model_dir: Path, model_config: Mapping[str, Any], config: Mapping[str, Any], control: Mapping[str, int]
) -> frozenset[int]:
    """What ends an answer. The tokenizer's own word is the last resort: after a conversion it may be wrong."""
    generation = model_dir / "generation_config.json"
    named = _read(generation).get("eos_token_id") if generation.is_file() else None
    if named is None:
        named = model_config.get("eos_token_id", control.get(_named_tokens(config).get("eos_token", "")))
    ids = named if isinstance(named, list) else [named]
    if not ids or not all(isinstance(token, int) for token in ids):
        raise ModelUnusable(f"{model_dir} doesn't say which token ends an answer; add eos_token_id to config.json")
    return frozenset(ids)


def _pieces(vocab: Mapping[str, int], control: Mapping[str, int]) -> list[bytes]:
    """The bytes of each id. Byte-level vocabularies spell each byte as a printable character (GPT-2, 2019)."""
    spelled = _spelling()
    pieces = [b""] * (max((*vocab.values(), *control.values())) + 1)
    for text, token in vocab.items():
        pieces[token] = bytes(spelled[character] for character in text if character in spelled)
    for name, token in control.items():
        pieces[token] = name.encode()
    return pieces


def _spelling() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
