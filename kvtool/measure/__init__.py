"""What kvtool measures: perplexity, memory, which tokens the rows hold."""
