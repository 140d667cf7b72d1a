"""The documents name only what there is: files, anchors, commands, options, targets, settings."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
from planned import a_stack

from millstream import cli
from millstream.errors import StackError
from millstream.model import ModelFailed
from wire.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?:^|`|\s)millstream ((?:[a-z]+ ?)+)")
OPTION = re.compile(r"(--[a-z][a-z-]+)")
TARGET = re.compile(r"(?:^|`|\s)make ([a-z]+)\b(?!-)")
ROW = re.compile(r"^\| ([A-Z_]+)( †)? \| (.*?) \| (.+) \|$", re.M)


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def code_of(text: str) -> Iterator[str]:
    """Code spans and indented or fenced blocks: what a reader might paste."""
    yield from re.findall(r"`([^`\n]+)`", text)
    yield from re.findall(r"^ {4,}(.*)$", text, re.M)
    for block in re.findall(r"^```[a-z]*\n(.*?)^```", text, re.M | re.S):
        yield from block.splitlines()


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def verb(words: list[str]) -> click.Command | None:
    """The command that these words name, as far as they go."""
    at: click.Command = cli.cli
    for word in words:
        if not isinstance(at, click.Group):
            return at
        found = at.commands.get(word)
        if found is None:
            return None
        at = found
    return at


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
class TestDocument:
    def test_its_links_lead_somewhere(self, document: Path) -> None:
        for link in LINK.findall(document.read_text()):
            if link.startswith(("http://", "https://")):
                continue
            path, _, fragment = link.partition("#")
            target = (document.parent / path).resolve() if path else document
            assert target.exists(), f"{link} leads nowhere"
            if fragment:
                headings = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
                assert fragment in map(anchor, headings), f"{link} names no heading"

    def test_its_commands_and_options_exist(self, document: Path) -> None:
        for code in code_of(document.read_text()):
            for words in COMMAND.findall(code):
                found = verb(words.split())
                assert found is not None, f"`millstream {words.strip()}` is no command"
                known = {name for option in found.params for name in option.opts}
                for option in OPTION.findall(code.partition("#")[0]):
                    assert option in known | {"--help"}, f"`millstream {words.strip()}` takes no {option}"

    def test_its_make_targets_exist(self, document: Path) -> None:
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
        for code in code_of(document.read_text()):
            assert set(TARGET.findall(code)) <= targets

    def test_its_settings_exist(self, document: Path) -> None:
        known = {PREFIX + field.name.upper() for field in msgspec.structs.fields(Settings)}
        for name in re.findall(r"\bMILLSTREAM_[A-Z_]+\b", document.read_text()):
            assert name in known or name == PREFIX, f"{name} is no setting"


def test_operating_lists_every_setting_with_its_default() -> None:
    rows = {name: default for name, _, default, _ in ROW.findall((ROOT / "docs/operating.md").read_text())}
    fields = {field.name.upper(): field.default for field in msgspec.structs.fields(Settings)}
    assert list(rows) == list(fields)
    for name, default in fields.items():
        if name in ("REGIONS", "CLICKHOUSE", "ROUND_TRIPS_MS", "RESIDENCY"):
            continue
        shown = rows[name]
        want = "–" if default in (None, "") else f"{default:g}" if isinstance(default, float) else str(default)
        assert shown == want, f"{name} is {want}, the table says {rows[name]}"


def test_operating_writes_values_of_settings_so_that_they_can_be_pasted() -> None:
    for name, _, default, meaning in ROW.findall((ROOT / "docs/operating.md").read_text()):
        assert not re.search(r"\d,\d{3}", default + " ".join(re.findall(r"`[^`]*`", meaning))), name
        assert not re.search(r"\d,\d{3} is right", meaning), name


def test_operating_marks_what_up_decides() -> None:
    rows = ROW.findall((ROOT / "docs/operating.md").read_text())
    marked = {name for name, mark, _, _ in rows if mark}
    whole = a_stack()
    children = (whole.ingress(), whole.worker(0), whole.control(), whole.ledger(), whole.clickhouse())
    decided = {name for child in children for name in child.env if name.startswith(PREFIX)}
    assert marked == {name.removeprefix(PREFIX) for name in decided}


def test_operating_lists_every_exit_code() -> None:
    codes = [int(code) for code in re.findall(r"^\| (\d+) \| ", (ROOT / "docs/operating.md").read_text(), re.M)]
    assert codes == sorted(set(codes)), "one table, each code once"
    of_errors = {error.exit_code for error in (StackError, *StackError.__subclasses__())}
    assert ModelFailed.exit_code in of_errors
    assert set(codes) == {0, 2, 130} | of_errors


def test_the_lock_has_hashes_and_names_no_host() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock
    assert "index-url" not in lock
    pinned = re.findall(r"^[a-zA-Z0-9_.-]+==", lock, re.M)
    assert len(pinned) > 50
    assert lock.count("--hash=sha256:") >= len(pinned)


def test_the_lock_holds_every_dependency() -> None:
    locked = set(re.findall(r"^([a-z0-9.-]+)==", (ROOT / "requirements.lock").read_text(), re.M))
    project = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)^\]", project, re.M | re.S)
    assert listed is not None
    for name in re.findall(r'"([A-Za-z0-9-]+)', listed[1]):
        assert name.lower() in locked, f"{name} isn't in requirements.lock; run `make lock`"


@pytest.mark.parametrize("script", [".ci/run", ".ci/environment"])
def test_scripts_are_well_formed(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    assert (ROOT / script).stat().st_mode & 0o111
