"""llama.cpp behind plain classes: the only importer of its bindings."""
