"""What kvtool measures: perplexity, divergence, grids of runs, memory, which tokens the rows hold."""
