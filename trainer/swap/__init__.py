"""Hot swap of weights into a running vLLM: the engine's side, the client's side, the canary."""
