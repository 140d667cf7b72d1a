"""Kill any one process mid-stream: the same streams go on to their end, and each is billed once (R1 to R8)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from chats import Chat, chat_body, check_bill, check_complete, ledger_lines, run_chats
from stack import Handle, running_stack

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(400)]
SEEDS = range(100, 112)
TOKENS = 120
SESSION_MS = 6_000


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    pace = {
        "MILLSTREAM_SIMULATED_TTFT_MS": "20",
        "MILLSTREAM_SIMULATED_TBT_MS": "25",
        "MILLSTREAM_SESSION_TIMEOUT_MS": str(SESSION_MS),
    }
    with running_stack("simulated", tmp_path_factory.mktemp("failures"), environ=pace) as stack:
        yield stack


@pytest.fixture(scope="module")
def undisturbed(stack: Handle) -> dict[int, str]:
    """Each seed's text when nothing goes wrong."""
    chats = run_chats(stack, SEEDS, TOKENS, ignore_eos=True)
    check_complete(chats)
    return {chat.seed: chat.text for chat in chats}


def disturbed(stack: Handle, harm: Callable[[], None], undisturbed: dict[int, str]) -> list[Chat]:
    """Run the same chats and do harm midway: every text is the undisturbed one, every bill right."""
    chats = run_chats(stack, SEEDS, TOKENS, midway=harm, after_pieces=200, ignore_eos=True)
    check_complete(chats)
    assert {chat.seed: chat.text for chat in chats} == undisturbed
    assert all(chat.completion_tokens == TOKENS for chat in chats)
    stack.wait_ready()
    check_bill(stack, chats)
    return chats


def test_kill_the_worker(stack: Handle, undisturbed: dict[int, str]) -> None:
    disturbed(stack, lambda: void(stack.kill("worker-0")), undisturbed)


def test_kill_the_engine_process(stack: Handle, undisturbed: dict[int, str]) -> None:
    disturbed(stack, lambda: os.kill(stack.engine_pids()[0], signal.SIGKILL), undisturbed)


def test_kill_both_aggregators(stack: Handle, undisturbed: dict[int, str]) -> None:
    disturbed(stack, lambda: void(stack.kill("control"), stack.kill("ledger")), undisturbed)


def test_kill_clickhouse(stack: Handle, undisturbed: dict[int, str]) -> None:
    disturbed(stack, lambda: void(stack.kill("clickhouse")), undisturbed)


def test_kill_the_broker(stack: Handle, undisturbed: dict[int, str]) -> None:
    before = stack.pids()
    disturbed(stack, lambda: void(stack.kill("kafka")), undisturbed)
    after = stack.pids()
    assert {name for name in before if before[name] != after[name]} == {"kafka"}, "nothing else was restarted"


def test_freeze_the_worker_past_its_session(stack: Handle, undisturbed: dict[int, str]) -> None:
    def freeze() -> None:
        pid = stack.kill("worker-0", signal.SIGSTOP)
        time.sleep(SESSION_MS / 1000 + 4)
        os.kill(pid, signal.SIGCONT)

    disturbed(stack, freeze, undisturbed)


def test_kill_the_ingress(stack: Handle) -> None:
    """Its clients lose their connections; its requests end by themselves and are billed for what was generated."""
    killed: list[int] = []
    chats = run_chats(
        stack, SEEDS, 1_900, midway=lambda: killed.append(stack.kill("ingress")), after_pieces=200, tolerate=True,
        ignore_eos=True,
    )  # fmt: skip
    dead = time.monotonic()
    stack.wait_restarted("ingress", killed[0])
    lines = ledger_lines(stack, [chat.request_id for chat in chats], timeout_s=45)
    assert time.monotonic() - dead < 45
    for chat in chats:
        (line,) = lines[chat.request_id]
        assert line["reason"] == "cancelled"
        assert int(line["completion_tokens"]) >= chat.pieces
        assert int(line["amount_nanodollars"]) > 0
    assert stack.verify().returncode == 0


def test_a_client_that_leaves_frees_its_slot_and_pays_for_what_was_generated(stack: Handle) -> None:
    body = chat_body(stack, 5, 1_900, ignore_eos=True)
    with httpx.stream(
        "POST", stack.base_url + "/chat/completions", json=body, headers=stack.headers, timeout=30
    ) as response:
        request_id = response.headers["x-request-id"].removeprefix("req_")
        lines = response.iter_lines()
        for _ in range(20):
            next(lines)
    (line,) = ledger_lines(stack, [request_id], timeout_s=5)[request_id]
    assert line["reason"] == "cancelled"
    assert 5 <= int(line["completion_tokens"]) < 500


def test_while_kafka_is_away_requests_are_turned_away_and_never_run_later(stack: Handle) -> None:
    pid = stack.kill("kafka", signal.SIGSTOP)
    try:
        answer = httpx.post(
            stack.base_url + "/chat/completions", json=chat_body(stack, 1, 5, stream=False) | {"stream_options": None},
            headers=stack.headers, timeout=60,
        )  # fmt: skip
    finally:
        os.kill(pid, signal.SIGCONT)
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    request_id = answer.headers["x-request-id"].removeprefix("req_")
    stack.wait_ready()
    run_chats(stack, [7], 5)
    rows = stack.sql(f"SELECT * FROM ledger WHERE request_id = '{request_id}'")
    assert all(row["reason"] == "expired" and int(row["completion_tokens"]) == 0 for row in rows)


def test_while_clickhouse_is_away_answers_go_on_and_the_ledger_catches_up(stack: Handle) -> None:
    pid = stack.kill("clickhouse", signal.SIGSTOP)
    try:
        chats = run_chats(stack, SEEDS, 10)
        check_complete(chats)
    finally:
        os.kill(pid, signal.SIGCONT)
    stack.wait_ready()
    check_bill(stack, chats)


def void(*_: object) -> None:
    """Several calls as one statement of a lambda."""
