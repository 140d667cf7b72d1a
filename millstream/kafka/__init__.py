"""A real Apache Kafka broker for one machine: its jars, its settings, its start."""
