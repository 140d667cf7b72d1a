"""How fast the engine is, next to other engines on the same machine: `millstream bench engine`.

All contenders are up at once and asked in turn, round by round; a figure is the median of its rounds. Idle ones wait
for a line and take no time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from millstream.bench import svg
from millstream.bench.engine_setting import Setting
from millstream.bench.peers import Contender, Running, ours
from millstream.errors import StartFailed
from millstream.table import table
from millstream.wish import Say

STREAMS = (1, 8, 32, 64)
CLASSES = ("latency", "throughput", "bf16")
_SHORT, _LONG, _ANSWER = 64, 2_000, 64
_LONG_STREAMS, _LONG_ANSWER = 8, 16
_PREFILL = 512
_TEXT = 256
_CONTEXT = 2_560
"""the longest prompt, and what streams say while the others' prompts are computed"""
_PEER_CONTEXT = 1_024
"""of each stream: enough for the texts"""
_ENVIRON = {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One question to one contender."""

    contender: str
    question: str
    median: float
    rounds: list[float]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured."""

    threads: int
    figures: list[Figure]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What all contenders are asked; `full` and long contexts only Millstream's."""

    name: str
    ask: dict[str, object]
    ours_only: bool = False


def questions(*, quick: bool, text: Sequence[int] = ()) -> list[Question]:
    """Decoding at several loads, with and without all that sampling can do; prompts; a long context; and a `text` that
    is gone on with, with guesses and without."""
    answer = 16 if quick else _ANSWER
    found = [_decode(f"{streams} streams", streams, _SHORT, answer) for streams in STREAMS]
    found.append(Question(name="prefill", ask={"what": "prefill", "tokens": _PREFILL}))
    found += [_decode(f"{streams} streams, all on", streams, _SHORT, answer, full=True) for streams in STREAMS]
    found.append(_decode(f"{_LONG_STREAMS} streams at 2,000", _LONG_STREAMS, _LONG, _LONG_ANSWER, ours_only=True))
    found.append(Question(name="prefill at 2,000", ask={"what": "prefill", "tokens": _LONG}, ours_only=True))
    for guess in (False, True):
        ask = {"what": "decode", "context": _TEXT, "tokens": 2 * answer, "guess": guess, "ids": list(text)}
        found.append(Question(name="1 stream of text" + ", guessing" * guess, ask=ask, ours_only=True))
    return found


def _decode(
    name: str, streams: int, context: int, tokens: int, *, full: bool = False, ours_only: bool = False
) -> Question:
    ask = {"what": "decode", "streams": streams, "context": context, "tokens": tokens, "full": full}
    return Question(name=name, ask=ask, ours_only=full or ours_only)


def measure(setting: Setting, *, threads: int, rounds: int, quick: bool, say: Say) -> Figures:
    """Every question to every contender, interleaved. StartFailed if one of Millstream's own can't be measured; a peer
    that can't is left out from there on."""
    asked = questions(quick=quick, text=next(iter(setting.texts.values())))
    found: dict[tuple[str, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        running = list(_started(stack, setting, threads, say))

        def put(question: str, ask: Mapping[str, object], *, ours_only: bool = False) -> None:
            for own, one in list(running):
                if own or not ours_only:
                    say(f"{question}, {one.contender.name}")
                    try:
                        found.setdefault((one.contender.name, question), []).append(one.ask(ask))
                    except StartFailed as exc:
                        if own:
                            raise
                        say(f"{exc}: it is left out from here on")
                        running.remove((own, one))

        for _, one in running:
            found[one.contender.name, "ready s"] = [one.ready_s]
        for name, ids in setting.texts.items():
            put(f"perplexity, {name}", {"what": "perplexity", "ids": list(ids)})
        for round_ in range(rounds):
            say(f"round {round_ + 1} of {rounds}")
            for question in asked:
                put(question.name, question.ask, ours_only=question.ours_only)
        for _, one in running:
            found[one.contender.name, "memory MB"] = [one.memory_mb()]
    return Figures(
        threads=threads,
        figures=[
            Figure(contender=contender, question=question, median=median(values), rounds=values)
            for (contender, question), values in found.items()
            if values
        ],
    )


def _started(stack: contextlib.ExitStack, setting: Setting, threads: int, say: Say) -> Iterator[tuple[bool, Running]]:
    """Each contender with whether it is Millstream's own; a peer that doesn't start is left out."""
    environ = {**os.environ, **_ENVIRON}
    for name in CLASSES:
        yield (
            True,
            _run(
                stack,
                ours(name, setting.model_dir, threads=threads, streams=max(STREAMS), context_tokens=_CONTEXT),
                environ,
            ),
        )
    if setting.peers is None:
        return
    for contender in setting.peers.contenders(threads=threads, streams=max(STREAMS), context_tokens=_PEER_CONTEXT):
        try:
            yield False, _run(stack, contender, environ)
        except StartFailed as exc:
            say(str(exc))


def _run(stack: contextlib.ExitStack, contender: Contender, environ: Mapping[str, str]) -> Running:
    running = Running(contender, environ)
    stack.callback(running.close)
    return running


def as_json(figures: Figures) -> str:
    """For programs."""
    return msgspec.json.format(msgspec.json.encode(figures), indent=1).decode()


def as_text(figures: Figures) -> str:
    """For people: a row for each question, a column for each contender."""
    names = list(dict.fromkeys(figure.contender for figure in figures.figures))
    return table(["", *names], _rows(figures, names))


def as_markdown(figures: Figures) -> str:
    """For docs/benchmarks.md: the same table."""
    names = list(dict.fromkeys(figure.contender for figure in figures.figures))
    lines = [["", *names], ["---"] * (1 + len(names)), *_rows(figures, names)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rows(figures: Figures, names: Sequence[str]) -> list[list[str]]:
    values = {(figure.question, figure.contender): figure.median for figure in figures.figures}
    asked = list(dict.fromkeys(question for question, _ in values))
    return [[question, *(_cell(values.get((question, name))) for name in names)] for question in asked]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 30 else f"{value:.0f}"


def chart(figures: Figures) -> str:
    """Tokens a second by streams, a bar for each contender."""
    values: dict[str, dict[str, float]] = {}
    for figure in figures.figures:
        if figure.question in {*(f"{streams} streams" for streams in STREAMS), "prefill"}:
            values.setdefault(figure.question, {})[figure.contender] = figure.median
    return svg.bars("Tokens a second, SmolLM2-135M, two threads", values, y="tokens/s")


FILES = ("figures.json", "table.md", "engine.svg")


def write(figures: Figures, output: Path) -> None:
    """`FILES` into a directory. OSError."""
    texts = (as_json(figures) + "\n", as_markdown(figures) + "\n", chart(figures))
    for name, text in zip(FILES, texts, strict=True):
        (output / name).write_text(text)
