-- name: totals
-- description: What a tenant used and owes, by model, tier and day of a time zone, of the requests created in [from, to).
-- params: tenant String, from_ms Int64, to_ms Int64, tz String
SELECT
    model,
    tier,
    toString(toDate(fromUnixTimestamp64Milli(created_ms, {tz:String}))) AS day,
    count() AS requests,
    countIf(billable) AS billed_requests,
    countIf(billable AND price_id = 'unpriced') AS unpriced_requests,
    sumIf(prompt_tokens, billable) AS prompt_tokens,
    sumIf(cached_tokens, billable) AS cached_tokens,
    sumIf(completion_tokens, billable) AS completion_tokens,
    sum(amount_nanodollars) AS amount_nanodollars
FROM ledger
WHERE tenant = {tenant:String} AND created_ms >= {from_ms:Int64} AND created_ms < {to_ms:Int64}
GROUP BY model, tier, day
ORDER BY day, model, tier
