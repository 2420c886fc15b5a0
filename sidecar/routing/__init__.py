"""How requests reach the sidecar, and which model server they go to."""
