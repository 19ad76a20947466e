"""The APIs of OpenAI and Anthropic: fields of requests, and bodies of answers."""
