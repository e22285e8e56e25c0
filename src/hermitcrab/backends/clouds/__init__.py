"""What the backends on somebody else's machines have in common.

provider.py  what a provider's module owes: make a sandbox, find it again, run a program in it, end it
retry.py     a failed call: what it means, whether it may be repeated
link.py      the pipe to our agent, over a provider's streaming exec
life.py      a sandbox's life at the provider, extended while it is in use
stay.py      one environment's sandbox from its creation to its end, across losses
tasks.py     sandboxes that outlive a program: what the next one needs to join one
owned.py     what is ours there: `hermitcrab doctor`, `ps` and `reap`
kept.py      snapshots that a provider keeps by itself
kind.py      a backend out of all that
"""
