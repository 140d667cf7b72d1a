"""Scripts that run in the environments of other engines: one each, all with the protocol of `workers.engine.measure`."""
