"""The token tap: what the engine sampled, carried beside the reply the agent sees."""
