"""Experiments that repeat four papers, and the pages that show their results."""
