"""The laboratory of the four papers: their experiments, and the pages that say what became of them."""
