"""Prefix chains: equal beginnings share numbers, other tenants share none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from routing.prefix import BLOCK_CHARS, MAX_BLOCKS, match_blocks, prefix_chain

text = st.text(max_size=3 * BLOCK_CHARS)


def chat(*contents: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": content} for content in contents]


@given(text, text, text)
def test_a_common_beginning_is_a_common_chain(start: str, left: str, right: str) -> None:
    one, other = (prefix_chain("t", "m", prompt=start + end) for end in (left, right))
    shared = len(start) // BLOCK_CHARS
    assert one[:shared] == other[:shared]
    assert len(one) == min(len(start + left) // BLOCK_CHARS, MAX_BLOCKS)


def test_a_different_first_block_changes_every_number() -> None:
    one, other = (prefix_chain("t", "m", prompt=first + "x" * 1023) for first in "ab")
    assert len(one) == len(other) == 4
    assert not set(one) & set(other)


def test_another_tenant_or_model_shares_nothing() -> None:
    prompt = "x" * 1024
    chains = [prefix_chain(t, m, prompt=prompt) for t, m in (("t", "m"), ("u", "m"), ("t", "n"), ("tm", ""))]
    assert len({link for chain in chains for link in chain}) == 16


def test_a_conversation_that_goes_on_keeps_its_chain() -> None:
    turn = chat("system " * 100, "question " * 50)
    longer = [*turn, {"role": "assistant", "content": "answer " * 60}]
    chain = prefix_chain("t", "m", messages=turn)
    assert prefix_chain("t", "m", messages=longer)[: len(chain)] == chain


def test_the_order_of_keys_does_not_matter_but_their_values_do() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "y" * 900}}
    one = {"role": "assistant", "content": None, "tool_calls": [call], "name": None}
    other = {"tool_calls": [dict(reversed(call.items()))], "content": None, "role": "assistant"}
    assert prefix_chain("t", "m", messages=[one]) == prefix_chain("t", "m", messages=[other]) != ()
    assert prefix_chain(
        "t", "m", messages=[one | {"tool_calls": [call | {"function": {"arguments": "z"}}]}]
    ) != prefix_chain("t", "m", messages=[one])


def test_token_prompts_have_chains() -> None:
    ids = tuple(range(1000, 1300))
    assert len(prefix_chain("t", "m", prompt=ids)) == 300 * 5 // BLOCK_CHARS
    assert prefix_chain("t", "m", prompt=ids)[:2] == prefix_chain("t", "m", prompt=ids[:200])[:2]


def test_nothing_and_little_have_no_chain() -> None:
    assert prefix_chain("t", "m") == ()
    assert prefix_chain("t", "m", prompt="short") == ()


def test_a_chain_is_bounded_and_its_numbers_fit_64_bits() -> None:
    chain = prefix_chain("t", "m", prompt="x" * 1_000_000)
    assert len(chain) == MAX_BLOCKS
    assert all(0 <= link < 2**64 for link in chain)


def test_lone_surrogates_have_a_chain() -> None:
    assert len(prefix_chain("t", "m", messages=chat("\ud800" * 600))) == 2
    assert prefix_chain("t", "m", messages=[{"role": "user", "content": [{"text": "\udfff" * 300}]}])


def test_match_counts_the_known_beginning() -> None:
    assert match_blocks((1, 2, 3), {1, 2}) == 2
    assert match_blocks((1, 2, 3), {2, 3}) == 0
    assert match_blocks((1, 2), frozenset({1, 2, 9})) == 2
