"""kvtool: llama.cpp conversations and streams that never end, under a KV-cache policy."""

__version__ = "0.1.0"
