"""The program that starts processes inside a sandbox, and its wire format (see PROTOCOL.md)."""
