"""The HTTP server, its routes, the limits on clients, and the web page."""
