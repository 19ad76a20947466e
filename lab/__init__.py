"""The laboratory: programs that measure kvtool, and the experiments of the papers."""
