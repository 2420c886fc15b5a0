"""Exact tokens: the engine-side token tap, the checks, the sample tree."""
