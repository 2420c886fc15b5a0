"""Tokens of text: what the serving tokenizer makes of a call without the engine's ids."""
