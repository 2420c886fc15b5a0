"""verl updates in their own process, checkpoints, and the hot swap into vLLM."""
