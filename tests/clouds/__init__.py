"""Providers on this machine: loopback servers that speak a provider's own wire format and really execute.

engine.py   sandboxes (namespaces over an overlay of the test image), processes, snapshots
server.py   an application behind a port of its own: faults that tests order, a record of the calls
running.py  such a server as a test sees it, from another process
provided.py what the tests of every provider begin with; starting.py, losing.py and keeping.py are tests of
            what each owes, which its own module subclasses
rest.py     a provider with a REST interface
e2b.py      the wire format of one provider, between the real SDK and the engine
modal.py    another one, with grpc.py (an SDK's gRPC services) and replay.py (output from an offset)
vercel.py   another one, with commands.py (output from the start)
daytona.py  another one, with terminals.py (a login shell on a pseudo-terminal)
"""
