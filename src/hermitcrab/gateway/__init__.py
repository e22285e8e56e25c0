"""Sandboxes as a service: a server that owns them, for clients that have no engine of their own."""
