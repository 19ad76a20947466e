"""What kvtool asks of the operating system."""
