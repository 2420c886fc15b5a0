"""``ridealong doctor``: sends real calls through the configured path and says what works."""
