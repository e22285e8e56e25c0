"""The fate of a sandbox is an exception, never a command's output; and when it ends, all of it does."""

from __future__ import annotations

from functools import partial

from hermitcrab.environment import Environment
from hermitcrab.errors import SandboxLost, SessionClosed
from hermitcrab.testing.inside import (
    PATIENCE,
    host_processes,
    meanwhile,
    open_descriptors,
    own_children,
    raised,
    read_until,
    say,
    scratch,
    soon,
    works,
)
from hermitcrab.testing.suite import Inapplicable, Opener, case


def _agent(env: Environment) -> int:
    hello = env._session.sandbox.hello
    if hello is None or env.execute(f"test -d /proc/{hello.pid}").returncode != 0:
        raise Inapplicable("this sandbox has no agent that a command could kill")
    return hello.pid


@case
def a_dead_sandbox_is_an_exception(open: Opener) -> None:
    """When the sandbox dies under a command, that is SandboxLost with the output so far, never a result."""
    env = open()
    agent = _agent(env)
    command = f"echo before; sleep 0.2; kill -9 {agent}; sleep 600; echo after"
    error = raised(SandboxLost, lambda: env.execute(command, timeout=PATIENCE))
    assert error.partial_output == "before\n"


@case
def a_dead_sandbox_stays_dead_or_comes_back_with_the_state(open: Opener) -> None:
    """After the loss every command is SandboxLost at once; where the kind revives, they just go on."""
    env = open()
    scratch(env)
    say(env, "v=kept; f() { echo $v; }; cd /usr")
    raised(SandboxLost, partial(env.execute, f"kill -9 {_agent(env)}; sleep 600", timeout=PATIENCE))
    for _ in range(2):
        if env.traits.revives:
            assert say(env, "f; pwd; pwd") == "kept\n/usr\n/usr"
        else:
            raised(SandboxLost, partial(env.execute, "echo again", timeout=PATIENCE))
    env.cleanup()


@case
def a_dead_sandbox_ends_every_waiting_command(open: Opener) -> None:
    """All who wait, read or hold a handle learn of the loss."""
    env = open()
    agent = _agent(env)
    held = env.start("echo up; cat")
    read_until(held, "up")
    streamed = env.stream("echo up; sleep 600")
    read_until(streamed, "up")
    with meanwhile(env, f"kill -9 {agent}; sleep 600", timeout=PATIENCE) as future:
        for wait in (lambda: future.result(PATIENCE), lambda: held.wait(PATIENCE), lambda: list(streamed)):
            raised(SandboxLost, wait)


@case
def a_lost_command_is_not_run_again(open: Opener) -> None:
    """A command whose sandbox died ran once, and never again."""
    env = open()
    agent = _agent(env)
    second = open()
    shared = env.traits.isolated is False
    base = scratch(second if shared else env)
    command = f"echo ran >>{base}/count; kill -9 {agent}; sleep 600"
    raised(SandboxLost, lambda: env.execute(command, timeout=PATIENCE))
    if shared:
        assert say(second, f"wc -l <{base}/count").strip() == "1"
    works(second)


@case
def after_cleanup_everything_is_refused(open: Opener) -> None:
    """A cleaned-up environment says SessionClosed, whatever is asked of it."""
    env = open()
    works(env)
    env.cleanup()
    for use in (lambda: env.execute("true"), lambda: env.stream("true"), lambda: env.start("true")):
        raised(SessionClosed, use)
    assert env.cwd.startswith("/")


@case
def cleanup_may_be_called_twice(open: Opener) -> None:
    """`cleanup` and `stop` are the same, and a second one does nothing."""
    env = open()
    env.cleanup()
    env.cleanup()
    env.stop()


@case
def a_context_manager_cleans_up(open: Opener) -> None:
    """`with` ends the environment."""
    with open() as env:
        works(env)
    raised(SessionClosed, lambda: env.execute("true"))


@case
def nothing_is_left_after_cleanup(open: Opener) -> None:
    """Cleanup ends every process of the sandbox: shells, servers, what detached itself, and the agent."""
    children = own_children()
    env = open(kill_grace=0.1)
    mark = f"crab-mark-{id(env)}"
    say(env, f"(exec -a {mark} sleep 600) & (setsid bash -c 'exec -a {mark} sleep 600' &)")
    say(env, f"(bash -c 'trap \"\" TERM HUP; exec -a {mark} sleep 600' &) >/dev/null 2>&1")
    read_until(env.start(f"echo up; exec -a {mark} sleep 600"), "up")
    env.cleanup()
    assert not [line for line in host_processes().values() if mark in line]
    # Housekeeping that is not this sandbox's, such as looking for orphans, may take a moment longer.
    soon(lambda: own_children() <= children)


@case
def cleanup_while_a_command_runs_ends_it(open: Opener) -> None:
    """Whoever waits for a command while the environment is cleaned up gets an exception, and soon."""
    env = open(kill_grace=0.1)
    scratch(env)
    say(env, "mkfifo ready")
    with meanwhile(env, "echo >ready; sleep 600") as future:
        say(env, "cat ready")
        env.cleanup()
        error = future.exception(PATIENCE)
    assert isinstance(error, SandboxLost | SessionClosed)


@case
def an_environment_leaves_no_descriptor_open(open: Opener) -> None:
    """Opening and cleaning up, over and over, does not use up this program's files."""
    open().cleanup()
    before = open_descriptors()
    for _ in range(3):
        env = open(output_limit=10)
        env.execute("seq 100")
        env.execute("seq 100; seq 100 >&2", separate=True)
        env.cleanup()
    assert open_descriptors() <= before
