"""A loaded model: its vocabulary, its adapters, and where its weights are."""
