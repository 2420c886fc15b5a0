"""The transparent proxy beside an agent: forwards bytes, tees them, writes trace shards."""
