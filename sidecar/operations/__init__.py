"""Running it: health, metrics, logs, reloading the configuration."""
