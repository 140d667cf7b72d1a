"""The one reading of a journal."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_samples import FLEET, begin

from wire.journal import Attempt, Fold, JournalBroken, usage_of
from wire.messages import (
    Carry,
    ChoiceEnd,
    Claim,
    Crash,
    Finish,
    FinishReason,
    Journal,
    Logprob,
    Ref,
    Span,
    Tokens,
    request_ref,
)

CLAIM = Claim(engine="e", incarnation="i", nonce="n", fingerprint="f", at_ms=1)
ONE = request_ref("requests", 1)
TWO = request_ref("requests", 2)


def tokens(ref: Ref, first: int, *ids: int, epoch: int = 0, choice: int = 0, end: ChoiceEnd | None = None) -> Tokens:
    return Tokens(epoch=epoch, spans=(Span(ref, choice, first, ids, None, end),), at_ms=1_200)


def finish(ref: Ref, completion_tokens: int, *, epoch: int = 0, reason: FinishReason = "stop") -> Finish:
    return Finish(
        epoch=epoch,
        ref=ref,
        reason=reason,
        ends=("stop",),
        prompt_tokens=5,
        cached_tokens=2,
        completion_tokens=completion_tokens,
        at_ms=1_300,
    )


def folded(*records: Journal, epoch: int | None = None) -> tuple[Fold, list[Attempt]]:
    fold, done = Fold(epoch), []
    for offset, record in enumerate(records):
        attempt = fold.apply(offset, record)
        if attempt is not None:
            done.append(attempt)
    return fold, done


def test_a_life_from_begin_to_finish() -> None:
    fold, done = folded(CLAIM, begin(1), tokens(ONE, 0, 7, 8), tokens(ONE, 2, 9, end="stop"), finish(ONE, 3))
    (attempt,) = done
    assert fold.attempts == {ONE: attempt}
    assert [choice.ids for choice in attempt.choices] == [[7, 8, 9]]
    assert (attempt.completion_tokens, attempt.ended, attempt.ref) == (3, True, ONE)
    assert (attempt.begin_offset, attempt.oldest_offset, attempt.oldest_epoch, attempt.finish_offset) == (1, 1, 0, 4)
    assert attempt.first_token_ms == 1_200
    assert attempt.spans() == (Span(ONE, 0, 0, (7, 8, 9), None, "stop"),)
    fold.forget(ONE)
    fold.forget(ONE)
    assert fold.attempts == {}


def test_choices_are_kept_apart_and_all_must_end() -> None:
    fold, _ = folded(CLAIM, begin(1, n=2), tokens(ONE, 0, 7, choice=1, end="length"))
    attempt = fold.attempts[ONE]
    assert not attempt.ended
    fold.apply(3, tokens(ONE, 0, 4, 5, choice=0, end="stop"))
    assert attempt.ended
    assert attempt.completion_tokens == 3


def test_logprobs_are_kept_with_their_ids() -> None:
    span = Span(ONE, 0, 0, (7,), (Logprob(-0.5, ((7, -0.5),)),))
    fold, _ = folded(CLAIM, begin(1), Tokens(epoch=0, spans=(span,), at_ms=9))
    assert fold.attempts[ONE].spans() == (span,)


def test_only_the_latest_claims_records_count() -> None:
    fold, done = folded(
        CLAIM,
        begin(1),
        tokens(ONE, 0, 7),
        CLAIM,
        tokens(ONE, 1, 666, epoch=0),
        begin(2, epoch=0),
        finish(ONE, 1, epoch=0),
        tokens(ONE, 1, 8, epoch=3),
        finish(ONE, 2, epoch=3),
    )
    assert fold.epoch == 3
    assert list(fold.attempts) == [ONE]
    assert [attempt.choices[0].ids for attempt in done] == [[7, 8]]


def test_reading_may_start_in_the_middle_of_a_known_epoch() -> None:
    fold, done = folded(tokens(ONE, 5, 1, epoch=4), finish(ONE, 6, epoch=4), begin(2, epoch=4), epoch=4)
    assert done == []
    assert list(fold.attempts) == [TWO]
    assert fold.attempts[TWO].oldest_epoch == 4


def test_where_the_first_claim_is_gone_the_highest_epoch_counts() -> None:
    # a zombie of epoch 3 wrote on for a moment after epoch 9 had begun
    fold, _ = folded(begin(1, epoch=3), begin(2, epoch=9), tokens(ONE, 0, 7, epoch=3), tokens(TWO, 0, 8, epoch=9))
    assert fold.epoch == 9
    assert list(fold.attempts) == [TWO]
    fold.apply(4, CLAIM)
    fold.apply(5, begin(1, epoch=99))
    assert list(fold.attempts) == [TWO], "once a Claim is read nothing is inferred"


def test_a_carry_stands_for_all_before_it() -> None:
    carry = Carry(
        epoch=0,
        begin=begin(1, epoch=0),
        begin_offset=17,
        spans=(Span(ONE, 0, 0, (7, 8)),),
        crashes=2,
        at_ms=5_000,
        first_token_ms=1_150,
    )
    fold, done = folded(CLAIM, carry, tokens(ONE, 2, 9), finish(ONE, 3))
    assert (done[0].begin_offset, done[0].oldest_offset, done[0].crashes) == (17, 1, 2)
    assert done[0].first_token_ms == 1_150, "of the token, not of the Carry"
    assert fold.attempts[ONE].choices[0].ids == [7, 8, 9]


def test_a_carried_finish_keeps_its_first_offset() -> None:
    carry = Carry(
        epoch=0,
        begin=begin(1),
        begin_offset=2,
        spans=(Span(ONE, 0, 0, (7,), None, "stop"),),
        crashes=0,
        at_ms=5_000,
        finish=finish(ONE, 1),
        finish_offset=6,
    )
    fold, done = folded(CLAIM, carry)
    assert done == []
    assert fold.attempts[ONE].finish_offset == 6
    with pytest.raises(JournalBroken, match="finishes twice"):
        fold.apply(2, finish(ONE, 1))


def test_a_carry_of_what_is_known_only_moves_the_oldest_record_needed() -> None:
    carry = Carry(epoch=0, begin=begin(1), begin_offset=1, spans=(Span(ONE, 0, 0, (7,)),), crashes=0, at_ms=5_000)
    fold, _ = folded(CLAIM, begin(1), tokens(ONE, 0, 7), carry, tokens(ONE, 1, 8))
    attempt = fold.attempts[ONE]
    assert (attempt.begin_offset, attempt.oldest_offset, attempt.choices[0].ids) == (1, 3, [7, 8])
    other = Carry(epoch=0, begin=begin(1), begin_offset=1, spans=(Span(ONE, 0, 0, (9,)),), crashes=0, at_ms=5_000)
    with pytest.raises(JournalBroken, match="carried at offset 5 with other tokens"):
        fold.apply(5, other)


def test_crashes_are_counted_for_those_that_ran() -> None:
    fold, _ = folded(CLAIM, begin(1), Crash(epoch=0, refs=(ONE, TWO), at_ms=1), Crash(epoch=0, refs=(ONE,), at_ms=2))
    assert fold.attempts[ONE].crashes == 2


def test_what_is_no_journal_record_changes_nothing() -> None:
    fold, _ = folded(CLAIM, begin(1))
    stray = SimpleNamespace(epoch=0)
    assert fold.apply(2, cast("Journal", stray)) is None
    assert list(fold.attempts) == [ONE]


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ((begin(1), begin(1)), "begins twice, again at offset 2"),
        ((begin(1), tokens(ONE, 1, 7)), "a span at position 1, the journal stands at 0"),
        ((begin(1), tokens(ONE, 0, 7), tokens(ONE, 0, 7)), "a span at position 0, the journal stands at 1"),
        ((begin(1), tokens(ONE, 0, 7, end="stop"), tokens(ONE, 1, 8)), "a span at position 1"),
        ((begin(1), tokens(ONE, 0, 7, choice=1)), "has no choice 1"),
        ((begin(1), tokens(ONE, 0, 7, choice=-1)), "has no choice -1"),
        ((begin(1), tokens(ONE, 0, 7), finish(ONE, 2)), "with 2 tokens, 2 cached, the journal holds 1 and 2"),
        ((begin(1), finish(ONE, 0), finish(ONE, 0)), "finishes twice, again at offset 3"),
        ((begin(1), finish(ONE, 0), tokens(ONE, 0, 7)), "a span at position 0"),
    ],
)
def test_records_that_count_and_contradict_one_another_are_no_journal(records: tuple[Journal, ...], why: str) -> None:
    with pytest.raises(JournalBroken, match=why):
        folded(CLAIM, *records)


def test_usage_is_the_same_bytes_whenever_it_is_sent_and_from_whatever_it_is_read() -> None:
    _, (attempt,) = folded(CLAIM, begin(1), tokens(ONE, 0, 7, 8), finish(ONE, 2))
    usage = usage_of(FLEET, 3, attempt)
    assert (usage.begin_offset, usage.finish_offset, usage.ref, usage.lane) == (1, 3, ONE, "requests")
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (5, 2, 2)
    assert (usage.created_ms, usage.begun_ms, usage.first_token_ms, usage.finished_ms) == (1_000, 1_100, 1_200, 1_300)
    carry = Carry(
        epoch=9,
        begin=attempt.begin,
        begin_offset=attempt.begin_offset,
        spans=attempt.spans(),
        crashes=0,
        at_ms=9_999,
        first_token_ms=attempt.first_token_ms,
        finish=attempt.finish,
        finish_offset=attempt.finish_offset,
    )
    carried = Fold(9)
    carried.apply(50, carry)
    assert msgspec.json.encode(usage_of(FLEET, 3, carried.attempts[ONE])) == msgspec.json.encode(usage)


def test_cached_tokens_are_fixed_by_the_first_record_that_speaks() -> None:
    def counted(ref: Ref, cached: int, first: int, *ids: int, end: ChoiceEnd | None = None) -> Tokens:
        return msgspec.structs.replace(tokens(ref, first, *ids, end=end), cached=((ref, cached), (TWO, 9)))

    of_five = msgspec.structs.replace(finish(ONE, 2), cached_tokens=5)
    _, (attempt,) = folded(CLAIM, begin(1), counted(ONE, 5, 0, 7), counted(ONE, 4, 1, 8), of_five)
    assert usage_of(FLEET, 0, attempt).cached_tokens == 5
    silent, _ = folded(CLAIM, begin(1), tokens(ONE, 0, 7), counted(ONE, 5, 1, 8))
    assert silent.attempts[ONE].cached_tokens == 2, "as in Begin, when the first record says nothing"
    carry = Carry(
        epoch=0,
        begin=attempt.begin,
        begin_offset=1,
        spans=attempt.spans(),
        crashes=0,
        at_ms=1,
        cached_tokens=attempt.cached_tokens,
    )
    carried, _ = folded(CLAIM, carry)
    assert carried.attempts[ONE].cached_tokens == 5


def test_there_is_no_usage_before_the_finish() -> None:
    fold, _ = folded(CLAIM, begin(1))
    with pytest.raises(ValueError, match="only a finished attempt"):
        usage_of(FLEET, 0, fold.attempts[ONE])
    half = dataclasses.replace(fold.attempts[ONE], finish=finish(ONE, 0))
    with pytest.raises(ValueError, match="only a finished attempt"):
        usage_of(FLEET, 0, half)


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), max_size=6), st.integers(0, 6))
def test_a_carry_anywhere_changes_nothing(steps: list[list[int]], cut: int) -> None:
    """Folding all records, and folding a Carry of the first part and then the rest, agree."""
    spans, first = [], 0
    for ids in steps:
        spans.append(tokens(ONE, first, *ids))
        first += len(ids)
    whole, _ = folded(CLAIM, begin(1), *spans, finish(ONE, first))
    head, _ = folded(CLAIM, begin(1), *spans[:cut])
    seen = head.attempts[ONE]
    carry = Carry(
        epoch=0,
        begin=seen.begin,
        begin_offset=seen.begin_offset,
        spans=seen.spans(),
        crashes=seen.crashes,
        at_ms=1,
        first_token_ms=seen.first_token_ms,
    )
    again, _ = folded(CLAIM, carry, *spans[cut:], finish(ONE, first))
    assert again.attempts[ONE].spans() == whole.attempts[ONE].spans()
    assert again.attempts[ONE].first_token_ms == whole.attempts[ONE].first_token_ms
