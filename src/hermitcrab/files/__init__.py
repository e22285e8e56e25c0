"""Files between the host and a sandbox."""
