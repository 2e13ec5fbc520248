"""Timelines of token ids with the target's KV. Knows no message."""
