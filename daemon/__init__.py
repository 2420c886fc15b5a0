"""The long-running daemon: tails shards, joins rewards, builds samples, schedules training."""
