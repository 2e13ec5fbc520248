"""The engine: admits turns, runs them in shared rounds, and keeps their sessions."""
