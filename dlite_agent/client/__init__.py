"""A client of `dlite-agent serve`: `RemoteEngine`, and how a turn travels over HTTP."""
