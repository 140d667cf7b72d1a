"""One engine each: owns shards, runs the model, journals tokens, sends frames, usage and signals."""
