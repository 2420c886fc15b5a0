"""Who may use the sidecar, what is refused, and what must not be recorded."""
