"""The engine protocol and its implementations."""
