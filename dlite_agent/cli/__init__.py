"""The `dlite-agent` command, one file a verb."""
