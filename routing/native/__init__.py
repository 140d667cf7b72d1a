"""The policy's arithmetic in C++, a choice at once: numpy spends most of such a small sum between its operations."""
