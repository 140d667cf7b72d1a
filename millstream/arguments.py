"""What the command's arguments may hold. A wrong one is click's kind of error: a sentence, and exit code 2."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from wire.topics import KEPT_FOR_REPLAY_MS

LABEL_CHARACTERS = 200
_DURATION = re.compile(r"([0-9]{1,4})([smh])")
_UNIT_S = {"s": 1, "m": 60, "h": 3_600}
COUNT = click.IntRange(1, 10**9)


def insist_utf8(argv: Sequence[str]) -> None:
    """UsageError when an argument isn't UTF-8: Python hands such bytes on as lone surrogates."""
    for text in argv:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise click.UsageError(f"the argument {text!a} isn't UTF-8")


def stdin_or(text: str) -> str:
    """The text, or what stdin holds where it is `-`. UsageError unless that is UTF-8, and something."""
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as exc:
            raise click.UsageError(f"the text on stdin isn't UTF-8, from byte {exc.start} on") from exc
    if not text.strip():
        raise click.UsageError("the text is empty; give some, or `-` and some on stdin")
    return text


class NamedPath(click.Path):
    """A path that isn't empty: pathlib takes "" for the current directory."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path. BadParameter when it is empty."""
        if not str(value).strip():
            self.fail(f"it is empty; name a {'directory' if self.dir_okay else 'file'}", param, ctx)
        return Path(str(super().convert(str(value), param, ctx)))


def month(_context: click.Context, _option: click.Parameter, text: str | None) -> str | None:
    """YYYY-MM."""
    from billing.errors import BadStatement
    from billing.statement import month_span_ms

    try:
        if text is not None:
            month_span_ms(text, "UTC")
    except BadStatement as exc:
        raise click.BadParameter(str(exc)) from exc
    return text


def duration_s(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    """A time of at most an hour, in seconds: the log keeps no more of what is asked about."""
    if text is None:
        return None
    found = _DURATION.fullmatch(text)
    seconds = int(found[1]) * _UNIT_S[found[2]] if found else 0
    if not 0 < seconds <= KEPT_FOR_REPLAY_MS // 1_000:
        raise click.BadParameter(f"{text!a} isn't a time of up to an hour, like 30s, 5m or 1h")
    return seconds


def label(_context: click.Context, option: click.Parameter, text: str) -> str:
    """What people read: one printable line of at most 200 characters; only a key's name may be empty."""
    if option.name != "name" and not text.strip():
        raise click.BadParameter("it is empty; give it at least one character that isn't white space")
    if len(text) > LABEL_CHARACTERS:
        raise click.BadParameter(f"it has {len(text)} characters; {LABEL_CHARACTERS} are the most")
    if not text.isprintable():
        raise click.BadParameter(f"{text!a} holds characters that can't be printed")
    return text


def number(_context: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    """No NaN, which every range lets through."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan isn't a number")
    return value


def key(_context: click.Context, _option: click.Parameter, text: str | None) -> str | None:
    """An API key: it must fit into a header."""
    if text is not None and not (text.isascii() and text.isprintable() and text.strip()):
        raise click.BadParameter("a key is ASCII text, like sk-ms-…")
    return text
