"""The engine of a batcher: a state machine without clock, thread or loop, and the threads that drive it."""
