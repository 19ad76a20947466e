"""Models as files: names, downloads, headers, and what a budget is for them."""
