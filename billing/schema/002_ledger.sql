-- The ledger: exactly one line per request, its highest attempt, right at once without waiting for merges.
CREATE OR REPLACE VIEW ledger AS
SELECT *, created
FROM attempts FINAL
ORDER BY tenant, request_id, attempt DESC
LIMIT 1 BY tenant, request_id
