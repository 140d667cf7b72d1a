"""What two processes must agree on: messages, codec, topics, bus, settings, clock, errors. Imports nothing of ours."""
