"""Which tokens hold a link's text, and how signals tell what an engine has."""

from __future__ import annotations

import msgspec
import pytest
from engine_world import write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from shard_world import make_request

from routing.chains import Chains
from routing.prefix import BLOCK_CHARS, prefix_chain
from wire.fleet import Fleet
from wire.messages import Body, EngineSignal, Request, Sampling
from workers.coverage import Links, links_of
from workers.engine.protocol import Prefixes
from workers.engine.simulated_vocabulary import SimulatedVocabulary
from workers.engine.tokenizer import Tokenizer
from workers.engine.vocabulary import Vocabulary
from workers.prefixes import FULL_EVERY, PrefixReport

SIMULATED = SimulatedVocabulary()
CONTENT = st.one_of(st.text(max_size=700), st.sampled_from(["", "  the mill  ", "user", "the river " * 60]))
MESSAGES = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), CONTENT), max_size=5)


@pytest.fixture(scope="module", params=["simulated", "tokenizer"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    if request.param == "simulated":
        return SIMULATED
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    (directory / "config.json").write_text('{"eos_token_id": 2}')
    return Tokenizer.load(directory)


def asked(messages: list[dict[str, object]], prompt: object = None) -> Request:
    body = Body(sampling=Sampling(seed=1), messages=tuple(messages), prompt=prompt)  # type: ignore[arg-type]
    chain = prefix_chain("t", "m", messages, prompt)  # type: ignore[arg-type]
    return msgspec.structs.replace(make_request(0, 0), body=body, prefix_chain=chain)


def chat(*contents: str) -> list[dict[str, object]]:
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def covered(request: Request, vocabulary: Vocabulary) -> Links:
    return links_of(request, vocabulary.encode_chat(request.body.messages), vocabulary.token_bytes)


def test_a_link_ends_with_the_token_that_ends_its_text(vocabulary: Vocabulary) -> None:
    text = "".join(f"{number} mills, " for number in range(200))
    request = asked(chat(text))
    ids = vocabulary.encode_chat(request.body.messages)
    links = covered(request, vocabulary)
    assert [link for link, _ in links] == list(request.prefix_chain)
    for count, (_, needed) in enumerate(links, start=1):
        read = count * BLOCK_CHARS - len("\x1euser\x1f")
        held, less = (b"".join(map(vocabulary.token_bytes, ids[:end])).decode() for end in (needed, needed - 1))
        assert text[:read] in held
        assert text[:read] not in less


def test_prompts_of_text_and_of_tokens(vocabulary: Vocabulary) -> None:
    text = "é mill 🌾 " * 90
    request = asked([], text)
    ids = vocabulary.encode_text(text)
    for count, (_, needed) in enumerate(links_of(request, ids, vocabulary.token_bytes), start=1):
        held = b"".join(map(vocabulary.token_bytes, ids[:needed])).decode("utf-8", "ignore")
        assert held.startswith(text[: count * BLOCK_CHARS])
    numbers = tuple(range(100, 300))
    links = links_of(asked([], numbers), numbers, vocabulary.token_bytes)
    assert [needed for _, needed in links] == [64, 128, 192], "256 characters are 64 times three digits and a comma"


def test_where_the_template_rewrites_a_message_nothing_from_there_on_is_told() -> None:
    request = asked(chat("a" * 600, "b" * 600, "c" * 600))
    ids = SIMULATED.encode_chat(chat("a" * 600, "B" * 600, "c" * 600))
    links = links_of(request, ids, SIMULATED.token_bytes)
    assert [link for link, _ in links] == list(request.prefix_chain[:2])


def test_space_around_a_message_may_be_cut_off(vocabulary: Vocabulary) -> None:
    request = asked(chat("  " + "mill " * 100 + "\n" * 300, "race " * 100))
    links = covered(request, vocabulary)
    assert len(links) == len(request.prefix_chain)
    assert [needed for _, needed in links] == sorted(needed for _, needed in links)


def test_without_a_chain_there_is_nothing_to_tell() -> None:
    assert covered(asked(chat("hello")), SIMULATED) == ()


@given(MESSAGES, MESSAGES)
def test_prompts_that_share_a_link_share_the_tokens_before_its_last(
    one: list[tuple[str, str]], other: list[tuple[str, str]]
) -> None:
    """So an engine that has them can serve both; the last token may reach over the link's end."""
    for vocabulary in (SIMULATED,):
        first, second = ([{"role": role, "content": text} for role, text in turns] for turns in (one, one + other))
        mine, theirs = (asked(messages) for messages in (first, second))
        ids, others = (vocabulary.encode_chat(request.body.messages) for request in (mine, theirs))
        for (link, needed), again in zip(covered(mine, vocabulary), covered(theirs, vocabulary), strict=False):
            assert again == (link, needed)
            assert ids[: needed - 1] == others[: needed - 1]


BASE = EngineSignal(
    engine="e",
    incarnation="i",
    fleet=Fleet("local", "cpu", "m", "1", "sim"),
    shards=(),
    state="ready",
    model="m",
    fingerprint=None,
    at_ms=0,
    queued_requests=0,
    queued_tokens=0,
    running=0,
    slots=1,
)


def test_an_engine_that_keeps_nothing_never_says_so() -> None:
    report = PrefixReport()
    assert report.signal(BASE) == BASE
    report.began(keeps=False)
    assert report.signal(BASE) == BASE


def test_the_first_signal_tells_all_and_then_changes() -> None:
    report = PrefixReport()
    report.began(keeps=True)
    first = report.signal(BASE)
    assert (first.prefixes_full, first.prefixes_added) == (True, ())
    report.changed(Prefixes((1, 2), ()))
    report.changed(Prefixes((3,), (1,)))
    second = report.signal(BASE)
    assert (second.prefixes_full, second.prefixes_added, second.prefixes_evicted) == (False, (2, 3), (1,))
    third = report.signal(BASE)
    assert (third.prefixes_added, third.prefixes_evicted) == ((), ())


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9))),
        st.tuples(st.just("signal"), st.booleans()),
        st.tuples(st.just("restart")),
    ),
    max_size=40,
)


@given(STEPS)
def test_who_hears_every_signal_knows_what_is_there_and_who_missed_some_learns_it_in_time(
    steps: list[tuple[object, ...]],
) -> None:
    report, there = PrefixReport(), set[int]()
    report.began(keeps=True)
    always, lately = Chains(), Chains()

    def hear(signal: EngineSignal, *hearers: Chains) -> None:
        for chains in hearers:
            chains.report(0, signal.prefixes_added, signal.prefixes_evicted, full=signal.prefixes_full)

    def known(chains: Chains) -> set[int]:
        return {link for link in range(10) if chains.match(0, (link,))}

    for step in steps:
        match step:
            case ("change", set(added), set(evicted)):
                report.changed(Prefixes(tuple(added), tuple(evicted - added)))
                there = (there - evicted) | added
            case ("restart",):
                report.began(keeps=True)
                there.clear()
            case ("signal", bool(lost)):
                hear(report.signal(BASE), *((always,) if lost else (always, lately)))
                assert known(always) == there
    for _ in range(FULL_EVERY + 1):
        hear(report.signal(BASE), always, lately)
    assert known(always) == known(lately) == there
