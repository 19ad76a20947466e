"""An OpenAI-compatible server over one cache."""
