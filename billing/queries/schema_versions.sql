-- name: schema_versions
-- description: The schema files that have been applied.
-- params: none
SELECT version, checksum FROM schema_versions FINAL ORDER BY version
