-- Every attempt that ended, rated; the key names it, so a replay replaces a row by the same row.
--
-- Nothing here is computed when a row is written: a replayed row is the same row. `created` follows from created_ms.
-- The deduplication window lets a repeated insert of the same block be dropped before it reaches a materialised view;
-- the key, read with FINAL, is what identity rests on. fsync: an acknowledged line survives a power cut.
CREATE TABLE IF NOT EXISTS attempts
(
    tenant String,
    project String,
    key_id String,
    request_id String,
    attempt UInt32,
    model LowCardinality(String),
    version LowCardinality(String),
    tier LowCardinality(String),
    lane LowCardinality(String),
    fleet LowCardinality(String) COMMENT 'region.pool.slug.version.numerics',
    shard UInt32,
    ref UInt64 COMMENT 'offset of the Request x 2, + 1 on the batch lane',
    begin_offset UInt64 COMMENT 'of the Begin in journal.<fleet>',
    finish_offset UInt64 COMMENT 'of the Finish in journal.<fleet>',
    reason LowCardinality(String),
    prompt_tokens UInt32,
    cached_tokens UInt32 COMMENT 'of the prompt tokens',
    completion_tokens UInt32 COMMENT 'over all choices',
    created_ms Int64,
    begun_ms Int64,
    first_token_ms Nullable(Int64),
    finished_ms Int64,
    price_id LowCardinality(String) COMMENT 'name-digest of the price, or unpriced',
    input_picodollars Int64 COMMENT 'per token, as the other prices',
    cached_input_picodollars Int64,
    output_picodollars Int64,
    billable Bool,
    amount_nanodollars Int64,
    created DateTime64(3, 'UTC') MATERIALIZED fromUnixTimestamp64Milli(created_ms, 'UTC'),
    INDEX finish_offset finish_offset TYPE minmax GRANULARITY 1
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(fromUnixTimestamp64Milli(created_ms, 'UTC'))
ORDER BY (tenant, request_id, attempt)
SETTINGS non_replicated_deduplication_window = 1000, fsync_after_insert = 1, fsync_part_directory = 1
