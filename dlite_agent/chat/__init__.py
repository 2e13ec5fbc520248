"""Messages to token ids and token ids to typed deltas. Knows no tensor."""
