"""HTTP: the server, its routes, limits on clients, and the web page."""
