"""Models as files: names, downloads, headers."""
