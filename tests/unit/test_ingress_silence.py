"""When a silent engine is lost: not by one look, nor right after a pause."""

from __future__ import annotations

from test_ingress_life import A, B

from ingress.silence import LATE_MS, LOOK_MS, Looks

NOBODY: frozenset[object] = frozenset()


def test_an_engine_is_lost_at_the_second_look() -> None:
    looks = Looks()
    assert looks.look(0, frozenset([A])) == NOBODY
    assert looks.look(LOOK_MS, frozenset([A, B])) == {A}
    assert looks.look(2 * LOOK_MS, frozenset([A, B])) == {A, B}


def test_a_burst_of_signals_of_which_one_engines_come_first_loses_nobody() -> None:
    looks = Looks()
    assert looks.look(0, frozenset()) == NOBODY
    assert looks.look(LOOK_MS, frozenset([B])) == NOBODY, "those of A were read, those of B are next"
    assert looks.look(2 * LOOK_MS, frozenset()) == NOBODY


def test_what_was_seen_before_a_pause_of_this_process_counts_for_nothing() -> None:
    looks = Looks()
    looks.look(0, frozenset([A]))
    assert looks.look(LATE_MS, frozenset([A])) == NOBODY, "its signals may be waiting to be read"
    assert looks.look(LATE_MS + LOOK_MS, frozenset()) == NOBODY
