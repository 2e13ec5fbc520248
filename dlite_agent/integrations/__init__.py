"""What a host imports, one file a host."""
