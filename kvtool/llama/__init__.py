"""llama.cpp behind plain classes: the only importer of llama_cpp."""
