"""Functions of the operating system that kvtool uses."""
