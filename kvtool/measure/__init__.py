"""What kvtool measures: perplexity, memory."""
