-- name: tenants
-- description: The tenants with a request created in [from, to).
-- params: from_ms Int64, to_ms Int64
SELECT DISTINCT tenant
FROM attempts
WHERE created_ms >= {from_ms:Int64} AND created_ms < {to_ms:Int64}
ORDER BY tenant
