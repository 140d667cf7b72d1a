"""Ten thousand requests, each accounted for. Only under `make soak`: it takes minutes."""

from __future__ import annotations

import json

import pytest
from stack import millstream

REQUESTS = 10_000


@pytest.mark.soak
@pytest.mark.kafka
@pytest.mark.timeout(3_600)
def test_ten_thousand_requests_end_and_are_billed_and_memory_stays_flat() -> None:
    done = millstream("soak", "--requests", str(REQUESTS), "--json", timeout_s=3_500)
    print(done.stderr[-2_000:])
    account = json.loads(done.stdout)
    print(json.dumps(account, indent=2))
    assert account["requests"] >= REQUESTS
    assert account["endings"] == account["requests"]
    assert account["ledger_lines"] == account["requests"]
    assert account["client_tokens"] == account["ledger_tokens"]
    assert account["differences"] == 0
    assert account["failures"] == []
    assert [one["process"] for one in account["memory"] if not one["flat"]] == []
    assert done.returncode == 0
