"""One module per kind of sandbox, each with a module-level `BACKEND`; found by name through `registry`."""
