"""What the trace shards hold, for people and other programs: listing, showing, exporting."""
