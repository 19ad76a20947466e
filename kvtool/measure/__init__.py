"""Measurements: perplexity, divergence, grids of runs, speed, memory, tokens held by the rows."""
