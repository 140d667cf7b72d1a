-- Every price that has been adopted, so that none that was in effect can be changed or taken out unnoticed.
CREATE TABLE IF NOT EXISTS prices
(
    price_id String,
    name String,
    model String,
    tier String,
    effective_from_ms Int64,
    currency LowCardinality(String),
    input_picodollars Int64,
    cached_input_picodollars Int64,
    output_picodollars Int64,
    withdrawn Bool COMMENT 'left the book before it began',
    recorded_ms Int64
)
ENGINE = ReplacingMergeTree(recorded_ms)
ORDER BY price_id
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1
