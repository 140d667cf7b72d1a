"""The GPU's kernels where there is no GPU: run by Triton's interpreter against plain torch, and compiled for Hopper.

With a GPU, `python -m workers.engine.gpu.measure` checks the rest: attention over pages, graphs, batch invariance.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_world import LIMITS, write_model

from workers.engine.errors import ModelUnusable
from workers.engine.gpu import measure
from workers.engine.gpu.engine import load_engine
from workers.engine.gpu.kernels import Matrix
from workers.engine.gpu.plain import PlainKernels
from workers.engine.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux"),
]
ROOT = Path(__file__).resolve().parents[2]


def ran(module: str, **environment: str) -> str:
    """What a script beside this file prints, in a process of its own: Triton reads its mode when it is imported."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "integration" / module)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))), **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_interpreted_they_give_what_plain_torch_gives() -> None:
    told = ran("kernels_interpreted.py", TRITON_INTERPRET="1")
    offs = re.findall(r"^(\S+): off by (\S+)$", told, re.M)
    assert {name for name, _ in offs} >= {"linear", "norm", "place", "gate", "model"}
    assert all(float(off) < 2e-5 for _, off in offs), told


def test_they_compile_for_hopper_with_its_own_matrix_instructions(tmp_path: Path) -> None:
    told = ran("kernels_compiled.py", TRITON_CACHE_DIR=str(tmp_path))
    linear = re.findall(r"^linear .*: (\d+) bytes shared, (\d+) spilled, (\d+) copies ahead, (.*)$", told, re.M)
    assert len(linear) == 6, told
    for shared, spilled, copies, instructions in linear:
        assert int(shared) <= 227 * 1024, "more than a multiprocessor has"
        assert spilled == "0"
        assert int(copies) > 0, "memory is read while the last block is computed"
        assert "wgmma" in instructions
        assert "bf16.bf16" in instructions
    assert set(re.findall(r"^(\w+) ", told, re.M)) == {"linear", "norm", "place", "gate"}


@pytest.mark.parametrize("numerics", ["bf16", "int8"])
def test_the_measuring_script_checks_and_measures_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], numerics: str
) -> None:
    options = (
        f"--device reference --shape tiny --streams 2 --piece 32 --numerics {numerics} --json {tmp_path / 'f.json'}"
    )
    status = measure.main(options.split())
    told = capsys.readouterr().out
    assert status == 0, told
    assert told.count("ok   ") == 11
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["checks failed"] == 0
    assert {"prefill tok/s", "decode tok/s, 1 streams", "decode tok/s, 2 streams"} < set(figures)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert measure.main(["--model", "/nowhere"]) == 1
    assert "finds no GPU" in capsys.readouterr().err


class Careless(PlainKernels):
    """Adds in an order that depends on how many rows there are."""

    def linear(self, rows: torch.Tensor, matrix: Matrix, *, wide: bool = False) -> torch.Tensor:
        return super().linear(rows, matrix, wide=wide) * (1 + 1e-6 * len(rows))


def test_a_device_whose_rows_depend_on_one_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engine.gpu.build.PlainKernels", Careless)
    directory = write_model(tmp_path)
    with pytest.raises(ModelUnusable, match="depend on what runs beside it"):
        load_engine(directory, Tokenizer.load(directory), LIMITS, device="reference", numerics="bf16", threads=1)
