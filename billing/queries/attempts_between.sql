-- name: attempts_between
-- description: Attempts whose Finish lies in [from, to) of a journal's partition, in that order.
-- params: fleet String, shard UInt32, from_offset UInt64, to_offset UInt64, at_most UInt32
SELECT *
FROM attempts FINAL
WHERE fleet = {fleet:String} AND shard = {shard:UInt32}
    AND finish_offset >= {from_offset:UInt64} AND finish_offset < {to_offset:UInt64}
ORDER BY finish_offset, request_id, attempt
LIMIT {at_most:UInt32}
