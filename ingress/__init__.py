"""HTTP in, server-sent events out: authenticates, routes, publishes and relays."""
