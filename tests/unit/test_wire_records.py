"""What both buses do alike to a record."""

from __future__ import annotations

import pytest
from aiokafka.partitioner import murmur2 as theirs
from hypothesis import given
from hypothesis import strategies as st

from wire.records import FRAME_BYTES, check_record, murmur2, partition_of


@pytest.mark.parametrize(
    ("data", "hashed"),
    # from Kafka's own UtilsTest.testMurmur2
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_kafkas(data: bytes, hashed: int) -> None:
    assert murmur2(data) == hashed & 0xFFFFFFFF


@given(st.binary(max_size=40))
def test_murmur2_is_aiokafkas(data: bytes) -> None:
    assert murmur2(data) == theirs(data)


@given(st.binary(), st.integers(1, 50))
def test_a_partition_is_one_of_the_topics(key: bytes, partitions: int) -> None:
    assert 0 <= partition_of(key, partitions) < partitions


def test_a_records_size_counts_key_value_and_frame() -> None:
    assert check_record("t", b"kk", b"vvv", None, 1, 1_000) == 5 + FRAME_BYTES
    assert check_record("t", b"k", None, 0, 1, 1_000) == 1 + FRAME_BYTES
    assert check_record("t", None, b"", 0, 1, 1_000) == FRAME_BYTES


@pytest.mark.parametrize("partition", [-1, 2])
def test_a_partition_outside_the_topic_is_refused(partition: int) -> None:
    with pytest.raises(ValueError, match="partitions 0 to 1"):
        check_record("t", b"k", b"v", partition, 2, 1_000)


def test_a_record_at_the_limit_passes_and_one_over_it_does_not() -> None:
    assert check_record("t", None, bytes(900), None, 1, 900 + FRAME_BYTES) == 1_000
    with pytest.raises(ValueError, match="over the limit of topic t"):
        check_record("t", None, bytes(901), None, 1, 900 + FRAME_BYTES)


def test_a_record_without_key_and_value_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a key or a value"):
        check_record("t", None, None, None, 1, 1_000)
