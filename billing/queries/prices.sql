-- name: prices
-- description: Every price that was adopted and not withdrawn.
-- params: none
SELECT name, model, tier, effective_from_ms, currency, input_picodollars, cached_input_picodollars, output_picodollars
FROM prices FINAL
WHERE NOT withdrawn
ORDER BY effective_from_ms, price_id
