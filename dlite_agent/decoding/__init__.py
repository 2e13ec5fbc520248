"""The one decode loop: draft, verify, commit."""
