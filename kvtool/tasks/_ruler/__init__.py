"""RULER's thirteen tasks: a file for each kind of task, and the sources of their texts."""
