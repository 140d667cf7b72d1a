"""The price book."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.errors import PriceBookError
from billing.prices import load, parse

JAN_MS, FEB_MS = 1_767_225_600_000, 1_769_904_000_000


def entry(**changes: str) -> str:
    fields = {
        "name": '"a"',
        "model": '"m"',
        "tier": '"*"',
        "effective_from": "2026-01-01T00:00:00Z",
        "input": '"0.15"',
        "cached_input": '"0.075"',
        "output": '"0.60"',
    } | changes
    return "[[price]]\n" + "".join(f"{name} = {value}\n" for name, value in fields.items() if value)


def book(*entries: str) -> str:
    return 'currency = "USD"\n' + "".join(entries)


def test_dollars_per_million_become_picodollars_per_token() -> None:
    (price,) = parse(book(entry(input='"0.15"', cached_input='"0.0375"', output='"15"'))).prices
    assert (price.input_picodollars, price.cached_input_picodollars) == (150_000, 37_500)
    assert price.output_picodollars == 15_000_000


@given(st.integers(0, 10**12 - 1))
def test_every_price_of_six_decimals_is_exact(picodollars: int) -> None:
    text = f'"{picodollars // 10**6}.{picodollars % 10**6:06}"'
    (price,) = parse(book(entry(input=text))).prices
    assert price.input_picodollars == picodollars


def test_the_latest_price_that_has_begun_counts() -> None:
    prices = parse(book(entry(), entry(name='"b"', effective_from="2026-02-01T00:00:00Z", input='"0.2"')))
    at = [prices.price_at("m", "default", ms) for ms in (JAN_MS - 1, JAN_MS, FEB_MS - 1, FEB_MS)]
    assert [price and price.name for price in at] == [None, "a", "a", "b"]


def test_the_model_comes_before_the_tier_and_both_before_the_star() -> None:
    prices = parse(
        book(
            entry(name='"any"', model='"*"'),
            entry(name='"tier"', model='"*"', tier='"flex"'),
            entry(name='"model"'),
            entry(name='"both"', tier='"flex"', effective_from="2026-02-01T00:00:00Z"),
        )
    )
    found = [
        ("m", "flex", FEB_MS),
        ("m", "flex", JAN_MS),
        ("m", "x", FEB_MS),
        ("n", "flex", JAN_MS),
        ("n", "x", JAN_MS),
    ]
    names = [price.name if (price := prices.price_at(*key)) else None for key in found]
    assert names == ["both", "model", "model", "tier", "any"]


def test_an_unknown_model_is_unpriced_however_many_are_asked_for() -> None:
    prices = parse(book(entry()))
    assert all(prices.price_at(f"model-{n}", "default", JAN_MS) is None for n in range(5_000))
    assert prices.price_at("m", "default", JAN_MS) is not None


def test_another_content_is_another_price_id() -> None:
    (price,) = parse(book(entry())).prices
    (other,) = parse(book(entry(output='"0.61"'))).prices
    assert price.price_id != other.price_id
    assert price.price_id.startswith("a-")
    assert parse(book(entry(input='"0.150"'))).prices[0].price_id == price.price_id


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("currency = ", "isn't TOML"),
        (entry(), 'put currency = "USD" at the top'),
        ('currency = "EUR"', 'put currency = "USD"'),
        (book() + "prices = 1", "'prices' means nothing here"),
        (book() + "price = 1", "write each price as a table"),
        (book(entry(model="")), r"price 1 \(a\) lacks model"),
        (book(entry(name="")), r"price 1 \(without a name\) lacks name"),
        (book(entry(input="")), "lacks input"),
        (book(entry(colour='"red"')), "'colour' means nothing here"),
        (book(entry(model="7")), "model is 7; it must be text"),
        (book(entry(name='"a b"')), "name is 'a b'"),
        (book(entry(model='""')), "model is ''"),
        (book(entry(input="0.15")), "input is 0.15; write dollars per million tokens as text"),
        (book(entry(input='"-1"')), "input is '-1'"),
        (book(entry(input='"0.0000001"')), "at most six decimals"),
        (book(entry(output='"1e3"')), "output is '1e3'"),
        (book(entry(output='"NaN"')), "output is 'NaN'"),
        (book(entry(output='"1000000"')), "below a million"),
        (book(entry(output='"٣"')), "output is"),
        (book(entry(effective_from="2026-01-01")), "write a time in UTC"),
        (book(entry(effective_from="2026-01-01T00:00:00")), "write a time in UTC"),
        (book(entry(effective_from="2026-01-01T00:00:00+01:00")), "write a time in UTC"),
        (book(entry(effective_from="2026-01-01T00:00:00.000001Z")), "milliseconds are the finest"),
        (book(entry(), entry()), "begin at the same time"),
        (book(entry(), entry(effective_from="2026-02-01T00:00:00Z")), "two prices are named 'a'"),
    ],
)
def test_a_broken_book_is_refused_with_a_sentence(text: str, says: str) -> None:
    with pytest.raises(PriceBookError, match=says):
        parse(text)


def test_the_book_that_ships_prices_the_models_that_ship() -> None:
    prices = load(None)
    assert prices.price_at("SmolLM2-135M-Instruct", "default", JAN_MS) is not None
    assert prices.price_at("simulated", "default", JAN_MS) is not None


def test_a_book_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "book.toml"
    path.write_text(book(entry()))
    assert [price.name for price in load(path).prices] == ["a"]


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(PriceBookError, match=r"book\.toml can't be read"):
        load(tmp_path / "book.toml")
