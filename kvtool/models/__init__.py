"""Models: names, downloads, headers, budgets."""
