-- name: attempts_since
-- description: How many attempts were created since a time, of a model and tier ("*" = any): whom a new price would touch.
-- params: model String, tier String, since_ms Int64
SELECT count() AS attempts
FROM attempts FINAL
WHERE created_ms >= {since_ms:Int64}
    AND ({model:String} = '*' OR model = {model:String})
    AND ({tier:String} = '*' OR tier = {tier:String})
