"""llama.cpp behind plain classes. Only this package imports its bindings."""
