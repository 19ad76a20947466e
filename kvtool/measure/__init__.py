"""What kvtool measures: perplexity, divergence, grids of cells, memory, which tokens the rows hold."""
