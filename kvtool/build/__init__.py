"""The patched llama.cpp and the kernels, built once per machine."""
