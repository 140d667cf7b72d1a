"""`millstream bench engine`: contenders asked in turn, medians, tables. Stands-in answer at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from millstream.bench import engine
from millstream.bench.engine import Figure, Figures
from millstream.bench.peers import Contender, Running, ours
from millstream.errors import StartFailed

_ANSWERS = """
import json, sys
print("a warning nobody asked for")
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    if ask["what"] == "die":
        break
    print("noise")
    print(json.dumps({"value": ask["tokens"] * 2}), flush=True)
"""


def stand_in(script: str = _ANSWERS) -> Contender:
    return Contender(name="stand-in", argv=(sys.executable, "-c", script))


def test_a_contender_answers_line_by_line() -> None:
    running = Running(stand_in(), os.environ)
    try:
        assert running.ask({"what": "prefill", "tokens": 21}) == 42
        assert running.ready_s > 0
        assert running.memory_mb() > 1
        with pytest.raises(StartFailed, match="stand-in ended when it was asked for die"):
            running.ask({"what": "die"})
    finally:
        running.close()


def test_one_that_never_gets_ready_is_named() -> None:
    with pytest.raises(StartFailed, match="stand-in did not start"):
        Running(stand_in("import sys; sys.exit(3)"), os.environ)


def test_our_own_runs_a_class_with_room_for_all_streams() -> None:
    contender = ours("bf16", Path("/model"), threads=2, streams=64, context_tokens=2112)
    assert contender.environ["MILLSTREAM_ENGINE_PREFIX_TOKENS"] == "0"
    assert contender.environ["MILLSTREAM_NUMERICS"] == "bf16"
    assert contender.environ["MILLSTREAM_ENGINE_SLOTS"] == "64"
    assert contender.environ["MILLSTREAM_MODEL_DIR"] == "/model"


def test_only_our_own_are_asked_for_all_that_sampling_can_do() -> None:
    asked = {question.name: question for question in engine.questions(quick=True)}
    assert not asked["32 streams"].ours_only
    assert asked["32 streams, all on"].ours_only
    assert asked["32 streams, all on"].ask["full"] is True
    assert asked["8 streams at 2,000"].ask["context"] == 2000


def test_tables_and_charts_show_medians_and_gaps(tmp_path: Path) -> None:
    figures = Figures(
        threads=2,
        figures=[
            Figure(contender="a", question="8 streams", median=284.4, rounds=[280.0, 284.4, 290.0]),
            Figure(contender="b", question="8 streams", median=157.2, rounds=[157.2]),
            Figure(contender="a", question="perplexity, mill", median=17.157, rounds=[17.157]),
        ],
    )
    assert engine.as_text(figures).splitlines()[1].split() == ["8", "streams", "284", "157"]
    assert "| perplexity, mill | 17.16 | - |" in engine.as_markdown(figures)
    (tmp_path / "out").mkdir()
    engine.write(figures, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["engine.svg", "figures.json", "table.md"]
    assert "a" in (tmp_path / "out" / "engine.svg").read_text()
