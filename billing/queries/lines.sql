-- name: lines
-- description: The ledger lines of some requests, given as (tenant, request id).
-- params: requests Array(Tuple(String, String))
SELECT * EXCEPT (created)
FROM ledger
WHERE (tenant, request_id) IN {requests:Array(Tuple(String, String))}
ORDER BY tenant, request_id
