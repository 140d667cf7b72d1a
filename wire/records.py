"""What both buses must do alike to a record: choose its partition and count its size."""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_SEED = 0x9747B28C
_M = 0x5BD1E995
FRAME_BYTES = 100
"""at most what a record costs in the log besides its key and value, its batch's header included"""


def murmur2(data: bytes) -> int:
    """MurmurHash2 of `data` as org.apache.kafka.common.utils.Utils computes it, as an unsigned 32-bit number."""
    h = _SEED ^ len(data)
    whole = len(data) & ~3
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * _M & _MASK
        k = (k ^ k >> 24) * _M & _MASK
        h = (h * _M & _MASK) ^ k
    if whole < len(data):
        h = (h ^ int.from_bytes(data[whole:], "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of `key` in a topic of so many, as Kafka's own clients choose it."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def check_record(
    topic: str, key: bytes | None, value: bytes | None, partition: int | None, partitions: int, limit_bytes: int
) -> int:
    """The record's size in bytes. ValueError for one that the topic can't take."""
    if key is None and value is None:
        raise ValueError("a record needs a key or a value: a tombstone without a key erases nothing")
    if partition is not None and not 0 <= partition < partitions:
        raise ValueError(f"topic {topic} has partitions 0 to {partitions - 1}, not {partition}")
    size = len(key or b"") + len(value or b"") + FRAME_BYTES
    if size > limit_bytes:
        raise ValueError(f"a record of {size} bytes is over the limit of topic {topic}, {limit_bytes} bytes")
    return size
