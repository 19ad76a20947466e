"""Programs that measure kvtool: python -m lab.benchmarks.NAME."""
