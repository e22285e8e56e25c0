"""`hermitcrab`, or `crab`: the command line. Each subcommand's module is imported only when it is the one."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from hermitcrab import __version__
from hermitcrab.cli import exits
from hermitcrab.errors import BackendUnavailable, ConfigError, HermitcrabWarning, SandboxError

EXAMPLES = """\
examples:
  hermitcrab run 'cd /tmp && ls'            a command line, on the default backend
  hermitcrab run --on bubblewrap -- make    a program and its arguments, isolated
  tar c . | hermitcrab run 'tar t | wc -l'  stdin comes from the pipe
  hermitcrab shell --on ci                  a prompt on an environment of hermitcrab.toml
  hermitcrab shell --pty --on docker:debian a terminal in a container
  hermitcrab new work --on docker:debian    a session that goes on from one command to the next
  hermitcrab exec work 'cd /srv; make'      a command of it
  hermitcrab move work --on bubblewrap      the same session, with its files, elsewhere
  hermitcrab doctor                         what works here, and what to do about the rest
"""
RUN_NOTES = """\
One COMMAND is a command line for bash; several words are one program and its arguments. The exit code is
the command's; 124 after a time-out, 130 after Ctrl-C, 125 when the sandbox failed, 2 when a setting is wrong.
stdout and stderr keep their order when they go to the same place, and stay apart when they do not.
"""
NEW_NOTES = """\
Variables given with --env are part of the session and stored with it, readable by you alone. For secrets use
--set 'forward_env=["NAME"]': their values are taken from here at each command and stored nowhere.
"""
EXEC_NOTES = """\
As `hermitcrab run`, from where the last command of the session ended. While another program uses the session,
this one waits. Options go before NAME; all after it is the command.
"""
CP_NOTES = """\
One of the two is NAME:PATH, or both. A directory is copied with all that is in it; into a directory that is
there it goes under its own name, `dir/.` without one.
"""
MOVE_NOTES = """\
The files of the workspace go along, and the session goes on where it was in them. After any failure the
session is where it was.
"""
DOCTOR_NOTES = """\
Programs, credentials and the config file are checked, and nothing is created. --probe makes a sandbox on each
usable backend, or on those that are named (`docker:debian:12`, an environment of the config file), and says
how long each step took. At a provider that costs what the shortest sandbox costs. Exit code 1: one failed.
"""
SNAPSHOT_NOTES = """\
Prints an id for `hermitcrab new NAME --snapshot ID` and hermitcrab.open(snapshot=ID). `ls` lists what was
kept, `rm ID` removes it.
"""
SERVE_NOTES = """\
examples:
  hermitcrab serve --engine docker:debian                  on this machine, for this machine
  hermitcrab serve --engine bubblewrap --pool 4            four sandboxes always ready
  hermitcrab serve --config /etc/hermitcrab/gateway.toml   everything from a file (docs/gateway.md)

No hermitcrab.toml and no HERMITCRAB_* setting is read: what others may do is said here and in --config alone.
"""
TOKEN_NOTES = """\
`create NAME` prints the token once; the gateway keeps its hash. `ls` lists them, `revoke ID...` ends them
within a second. Say --config, --state or --database as for `hermitcrab serve`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    warnings.formatwarning = _format_warning
    arguments = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(arguments if arguments[:1] != ["bench"] else ["bench"])
    try:
        if args.module == "bench":
            # It has options of its own, which argparse would take for ours.
            return int(import_module("hermitcrab.bench").main(arguments[1:]))
        return int(import_module(f"hermitcrab.cli.{args.module}").main(args))
    except SandboxError as error:
        complain(error)
        return exits.USAGE if isinstance(error, ConfigError) else exits.SANDBOX
    except BrokenPipeError:
        exits.forget_stdout()
        return exits.BROKEN_PIPE
    except KeyboardInterrupt:
        return exits.INTERRUPTED


_format_for_programmers = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Whoever types commands wants to know what, and not which line of ours says so."""
    if issubclass(category, HermitcrabWarning):
        return f"hermitcrab: warning: {message}\n"
    return _format_for_programmers(message, category, filename, lineno, line)


def complain(error: SandboxError) -> None:
    """The message on one line, what to do about it on the next."""
    message, hint = str(error), error.hint if isinstance(error, BackendUnavailable) else ""
    print(f"hermitcrab: {message.removesuffix(hint).rstrip()}", file=sys.stderr)
    if hint:
        print(f"  hint: {hint}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    top = _parser(
        argparse.ArgumentParser,
        prog="hermitcrab",
        description="Run shell commands in any sandbox; the session outlives the sandbox.",
        epilog=EXAMPLES,
    )
    top.add_argument("--version", action="version", version=f"hermitcrab {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, module: str, summary: str, epilog: str = "") -> argparse.ArgumentParser:
        command = _parser(commands.add_parser, name, help=summary, description=summary, epilog=epilog)
        command.set_defaults(module=module)
        return command

    run = add("run", "run", "run one command and show its output as it comes", RUN_NOTES)
    _environment_options(run)
    run.add_argument("--json", action="store_true", help="print the result as one JSON object instead")
    run.add_argument("--separate", action="store_true", help="keep stdout and stderr apart")
    run.add_argument("-q", "--quiet", action="store_true", help="do not say which backend it runs on")
    run.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER)

    shell = add("shell", "shell", "a prompt where each line is one command of the session")
    _environment_options(shell)
    shell.add_argument("--pty", action="store_true", help="a real terminal in the sandbox, for any program")

    new = add("new", "new", "a session under a name, which goes on from one command to the next", NEW_NOTES)
    new.add_argument("name", metavar="NAME")
    _environment_options(new)
    _set_option(new)
    new.add_argument("--snapshot", metavar="ID", default="", help="begin with the files and the state of it")

    exec_ = add("exec", "exec_", "one command of a named session", EXEC_NOTES)
    exec_.add_argument("--cwd", metavar="DIR", help="start there, in the sandbox; ~ works")
    exec_.add_argument("--timeout", metavar="SECONDS", type=float, help="end a command that takes longer")
    exec_.add_argument("--json", action="store_true", help="print the result as one JSON object instead")
    exec_.add_argument("--separate", action="store_true", help="keep stdout and stderr apart")
    exec_.add_argument("name", metavar="NAME")
    exec_.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER)

    cp = add("cp", "cp", "copy files and trees to, from and between named sessions", CP_NOTES)
    cp.add_argument("source", metavar="SOURCE")
    cp.add_argument("target", metavar="TARGET")
    _links_option(cp)

    move = add("move", "move", "a named session, with its files, into another sandbox", MOVE_NOTES)
    move.add_argument("name", metavar="NAME")
    _environment_options(move)
    _set_option(move)
    _directory_option(move)
    move.add_argument("--exclude", metavar="PATH", action="append", default=[], help="leave this behind")
    move.add_argument("--keep-code", action="store_true", help="take functions and aliases even to a host")
    _links_option(move)

    fork = add("fork", "fork", "independent copies of a named session, with names of their own")
    fork.add_argument("name", metavar="NAME")
    fork.add_argument("n", metavar="N", nargs="?", type=int, help="how many; 1 when left out")
    fork.add_argument("--names", metavar="NAME", nargs="+", help="else NAME-1, NAME-2 ...")
    _directory_option(fork)

    snapshot = add("snapshot", "snapshot", "keep a named session as it is now", SNAPSHOT_NOTES)
    snapshot.add_argument("what", metavar="NAME|ls|rm")
    snapshot.add_argument("ids", metavar="ID", nargs="*", help="for rm")
    snapshot.add_argument("--label", default="", help="words of your own, for ls")
    _json_option(snapshot)

    rm = add("rm", "rm", "end named sessions, and remove the files that are theirs alone")
    rm.add_argument("names", metavar="NAME", nargs="+")
    rm.add_argument("--force", action="store_true", help="forget one that cannot be reached, too")

    _json_option(add("ps", "ps", "the named sessions, and the sandboxes that are ours on every backend"))
    reap = add("reap", "reap", "remove the sandboxes of programs that are gone")
    _json_option(reap)

    doctor = add("doctor", "doctor", "what works on this machine, why not, and what to do", DOCTOR_NOTES)
    doctor.add_argument("places", metavar="BACKEND", nargs="*", help="only these, named as for --on")
    doctor.add_argument("--probe", action="store_true", help="make a sandbox, run `true`, remove it")
    _on_option(doctor)
    _json_option(doctor)
    _json_option(add("backends", "backends", "every backend, plug-ins too, and what it can do"))

    config = add("config", "config", "the settings in force and where each one came from")
    config.add_argument(
        "what", nargs="?", choices=["show", "path"], default="show", help="path: the files looked for"
    )
    _on_option(config)
    _json_option(config)

    setup = add("setup", "setup", "ask a few questions, check, and write the config file")
    setup.add_argument("--yes", action="store_true", help="take every default; never replaces a file")
    setup.add_argument("--project", action="store_true", help="write ./hermitcrab.toml, not the user's file")

    _serve_options(add("serve", "serve", "sandboxes over HTTP, for clients elsewhere", SERVE_NOTES))
    token = add("token", "token", "who may use the gateway of `hermitcrab serve`", TOKEN_NOTES)
    token.add_argument("what", choices=["create", "ls", "revoke"])
    token.add_argument("names", metavar="NAME|ID", nargs="*")
    token.add_argument("--tenant", default="local", help="whose sandboxes it uses (local)")
    token.add_argument("--operator", action="store_true", help="sees what all tenants have, and /metrics")
    _gateway_place_options(token)
    _json_option(token)

    add("bench", "bench", "measure hermitcrab beside the raw lower bounds")
    return top


def _parser(make: Any, *args: Any, **options: Any) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = make(
        *args, **options, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return made


def _environment_options(command: argparse.ArgumentParser) -> None:
    _on_option(command)
    command.add_argument("--cwd", metavar="DIR", help="start there, in the sandbox; ~ works")
    command.add_argument(
        "--env",
        metavar="K=V",
        action="append",
        default=[],
        help="a variable; K alone passes on ours; repeatable",
    )
    command.add_argument("--timeout", metavar="SECONDS", type=float, help="end a command that takes longer")


def _serve_options(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    option("--config", metavar="FILE", help="TOML, with [server], [limits], [engines.NAME] ...")
    option("--listen", metavar="HOST:PORT", help="127.0.0.1:8720 by default; beyond loopback it takes tokens")
    option("--engine", metavar="NAME[:IMAGE]", help="the backend that makes the sandboxes, and their image")
    option("--image", metavar="IMAGE", help="the same image, apart")
    option("--allow-image", metavar="PATTERN", action="append", default=[], help="clients may name these too")
    option("--pool", metavar="N", type=int, default=0, help="keep so many sandboxes ready")
    _set_option(command)
    option("--limit", metavar="KEY=VALUE", action="append", default=[], help="a tenant's limit; repeatable")
    option("--state", metavar="DIR", help="the gateway's own directory")
    option("--database", metavar="URL", help="postgresql://..., for several gateways; else a sqlite file")
    option("--url", metavar="URL", help="where other gateways on that database reach this one")
    option("--tls-certificate", metavar="FILE", help="PEM, with the chain")
    option("--tls-key", metavar="FILE")
    option("--audit", metavar="FILE", help="who did what, one JSON object a line")
    option("--require-tokens", action="store_true", help="on loopback too")
    option("--allow-unisolated", action="store_true", help="offer `local` or `ssh` beyond loopback")
    option("--keep", action="store_true", help="leave the sandboxes running at the end, for the next start")
    option("--check", action="store_true", help="say whether the settings are right, and end")


def _gateway_place_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", metavar="FILE", help="the gateway's file")
    command.add_argument("--state", metavar="DIR", help="the gateway's own directory")
    command.add_argument("--database", metavar="URL", help="as the gateway has it")


def _set_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any setting, as in the config file; repeatable",
    )


def _directory_option(command: argparse.ArgumentParser) -> None:
    command.add_argument("--directory", metavar="DIR", help="the files to take; else the workspace")


def _links_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--outward-links", action="store_true", help="take links that lead out of the tree too"
    )


def _on_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--on",
        metavar="NAME",
        help="an environment of hermitcrab.toml, a backend, or docker:IMAGE and the like",
    )


def _json_option(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="for programs")
