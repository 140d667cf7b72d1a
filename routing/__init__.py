"""Pure routing: which shard a request goes to, and which weights the fleets get."""
