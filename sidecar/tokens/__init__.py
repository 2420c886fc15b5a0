"""Where a call's exact tokens come from, and how they are taken out of the reply."""
