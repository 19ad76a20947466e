"""The patched llama.cpp, built once a machine."""
