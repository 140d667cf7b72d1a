"""Price book, rating, schema, statements and reconciliation of the ledger."""
