"""An OpenAI-compatible server: `dlite-agent serve`."""
