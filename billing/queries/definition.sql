-- name: definition
-- description: How the table of attempts is defined, which says its deduplication window.
-- params: none
SELECT create_table_query
FROM system.tables
WHERE database = currentDatabase() AND name = 'attempts'
