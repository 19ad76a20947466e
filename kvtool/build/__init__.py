"""Build the patched llama.cpp and the kernels, once per machine."""
