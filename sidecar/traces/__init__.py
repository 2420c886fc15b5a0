"""Trace shards: what a record is, how it is written, kept and read again."""
