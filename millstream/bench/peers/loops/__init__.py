"""Scripts that run in the environments of other engines: one each, all answering as `workers.engine.measure` does."""
