"""Providers on this machine: loopback servers that speak a provider's own wire format and really execute.

engine.py   sandboxes (namespaces over an overlay of the test image), processes, snapshots
server.py   an application behind a port of its own: faults that tests order, a record of the calls
running.py  such a server as a test sees it, from another process
e2b.py      the wire format of one provider, between the real SDK and the engine
"""
