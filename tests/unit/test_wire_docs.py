"""docs/wire.md and docs/glossary.md say what wire.topics and wire.messages say; each dependency has its reason."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from wire import messages
from wire.fleet import Fleet
from wire.topics import Topic, all_topics

ROOT = Path(__file__).resolve().parents[2]
WIRE = (ROOT / "docs/wire.md").read_text()
GLOSSARY = (ROOT / "docs/glossary.md").read_text()
KEPT = {
    600_000: "10 min",
    3_600_000: "1 h",
    21_600_000: "6 h",
    604_800_000: "7 d",
    2_592_000_000: "30 d",
}
ROOTS = (messages.Message, messages.Value)
TYPES = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in ROOTS and kind is not Fleet
]


def sections() -> dict[str, str]:
    """The text below each bold name, up to the next; one text may have several names."""
    found: dict[str, str] = {}
    heads = list(re.finditer(r"^\*\*(\w+)\*\*.*$", WIRE, re.M))
    for head, after in zip(heads, [*heads[1:], None], strict=True):
        text = WIRE[head.start() : after.start() if after else None].partition("\n#")[0]
        for name in re.findall(r"\*\*(\w+)\*\*", head[0]):
            found[name] = text
    return found


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_each_message_is_described_with_exactly_its_fields(kind: type[msgspec.Struct]) -> None:
    text = sections()[kind.__name__]
    described = {name for row in re.findall(r"^\| (`.+?) \|", text, re.M) for name in re.findall(r"`(\w+)`", row)}
    fields = set(kind.__struct_fields__)
    together = {"Ask": messages.Grant, "Grant": messages.Ask, "Intent": messages.Located, "Located": messages.Intent}
    if kind.__name__ in together:
        fields |= set(together[kind.__name__].__struct_fields__)
    assert described == fields


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_each_message_is_in_the_glossary(kind: type[msgspec.Struct]) -> None:
    assert re.search(rf"\b{kind.__name__}\b", GLOSSARY)


def rows() -> dict[str, list[str]]:
    table = re.findall(r"^\| `([\w.<>]+)` \| (.+) \|$", WIRE.partition("## How a message")[0], re.M)
    return {name: [cell.strip() for cell in rest.split(" | ")] for name, rest in table}


def topics() -> dict[str, Topic]:
    fleet = Fleet("r", "cpu", "m", "1", "sim")
    return {topic.name.replace(fleet.name, "F"): topic for topic in all_topics([(fleet, 3)], [("<region>", 5)])}


def test_each_topic_has_its_row() -> None:
    assert set(rows()) == set(topics())


@pytest.mark.parametrize("name", sorted(topics()))
def test_a_topics_row_tells_its_settings(name: str) -> None:
    topic = topics()[name]
    partitions, _, _, kept, acks, largest, _ = rows()[name]
    assert partitions == {3: "one a shard", 5: "one a slot"}.get(topic.partitions, str(topic.partitions))
    assert acks == topic.acks
    assert largest == f"{topic.max_message_bytes // 1024**2} MiB"
    if topic.retention_ms is not None:
        assert kept == KEPT[topic.retention_ms]
    elif topic.compact_after_ms is not None:
        assert kept == f"latest, all of {KEPT[topic.compact_after_ms]}"
    else:
        assert kept == ("latest, 24 h" if topic.compact_horizon_ms is not None else "latest")


def test_each_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = (ROOT / "docs/decisions/dependencies.md").read_text()
    extras = [name for names in project["project"]["optional-dependencies"].values() for name in names]
    for requirement in [*project["project"]["dependencies"], *extras, *project["build-system"]["requires"]]:
        name = re.split(r"[<>=\[]", requirement)[0]
        assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text), f"{name} has no reason"
