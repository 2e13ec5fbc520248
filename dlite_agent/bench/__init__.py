"""`dlite-agent bench`: measurements, never timed tests."""
