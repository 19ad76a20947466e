"""Functions for files, memory, the CPU, signals and texts from outside."""
