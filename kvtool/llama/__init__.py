"""Classes around llama.cpp. Only this package imports llama.cpp's bindings."""
