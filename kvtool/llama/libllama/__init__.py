"""The loaded llama.cpp: its functions, log, crashes and devices, and the machines that help it."""
