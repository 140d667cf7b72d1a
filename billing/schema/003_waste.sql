-- Attempts that lost to a higher one: what was computed and never billed.
CREATE OR REPLACE VIEW waste AS
SELECT * EXCEPT (winner)
FROM
(
    SELECT *, created, max(attempt) OVER (PARTITION BY tenant, request_id) AS winner
    FROM attempts FINAL
)
WHERE attempt < winner
