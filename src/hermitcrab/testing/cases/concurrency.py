"""Commands that run at the same time in one session."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hermitcrab.testing.inside import PATIENCE, meanwhile, say, scratch, value, works
from hermitcrab.testing.suite import Opener, case


@case
def two_commands_merge_what_they_changed(open: Opener) -> None:
    """Variables, functions, aliases, options: what each of two changed is there afterwards."""
    env = open()
    scratch(env)
    say(env, "mkfifo begun go; old=1; gone=1; list=(1)")
    changes = "slow=s; sf() { echo sf; }; alias sa='echo sa'; set -o noclobber; unset gone"
    with meanwhile(env, f"echo >begun; read -r x <go; unset x; {changes}") as future:
        say(env, "cat begun")
        say(env, "quick=q; qf() { echo qf; }; alias qa='echo qa'; shopt -s nullglob; list+=(2); umask 077")
        say(env, "echo >go")
        future.result(PATIENCE)
    assert say(env, "echo $slow $quick $old ${gone-gone} ${list[*]}; sf; qf; sa; qa; umask") == (
        "s q 1 gone 1 2\nsf\nqf\nsa\nqa\n0077"
    )
    assert "noclobber" in env.state.options
    assert "nullglob" in env.state.shopts


@case
def a_slow_command_that_changed_nothing_undoes_nothing(open: Opener) -> None:
    """What happened while a command ran is not undone by its end."""
    env = open()
    base = scratch(env)
    say(env, "mkfifo begun go; v=1; mkdir sub; export w=1")
    with meanwhile(env, "echo >begun; cat go >/dev/null") as future:
        say(env, "cat begun")
        say(env, "v=2; unset w; f() { :; }; set -o noclobber; cd sub")
        env.start(f"echo >{base}/go")  # which is no command whose own end could come last
        future.result(PATIENCE)
    assert (value(env, "v"), env.cwd) == ("2", f"{base}/sub")
    assert "w" not in env.state.variables
    assert "f" in env.state.functions
    assert "noclobber" in env.state.options


@case
def the_later_end_wins_for_the_same_variable(open: Opener) -> None:
    """Two that change the same variable: whoever ends last is believed, and nothing else suffers."""
    env = open()
    base = scratch(env)
    say(env, "mkfifo begun go")
    with meanwhile(env, "v=slow; echo >begun; read -r x <go; unset x; cd /", cwd=base) as future:
        say(env, "cat begun", cwd=base)
        say(env, "v=quick; w=1; cd /usr")
        say(env, f"echo >{base}/go")
        future.result(PATIENCE)
    assert (value(env, "v"), value(env, "w"), env.cwd) == ("slow", "1", "/")


@case
def thirteen_commands_at_once_all_count(open: Opener) -> None:
    """None of thirteen concurrent commands loses what another one did."""
    env = open()
    base = scratch(env)

    def one(number: int) -> int:
        # Nobody ends before everybody has begun.
        wait = f"echo >>{base}/begun; until test $(wc -l <{base}/begun) -ge 13; do sleep 0.02; done"
        return env.execute(
            f"v{number}={number}; f{number}() {{ echo {number}; }}; {wait}", timeout=PATIENCE
        ).returncode

    with ThreadPoolExecutor(13) as pool:
        assert list(pool.map(one, range(13))) == [0] * 13
    assert [value(env, f"v{number}") for number in range(13)] == [str(number) for number in range(13)]
    assert say(env, "f0; f12") == "0\n12"


@case
def concurrent_commands_really_run_at_the_same_time(open: Opener) -> None:
    """A command does not wait for another one to end."""
    env = open()
    scratch(env)
    say(env, "mkfifo there back")
    with meanwhile(env, "echo ping >there; cat back", timeout=PATIENCE) as future:
        assert say(env, "cat there; echo pong >back") == "ping"
        assert future.result(PATIENCE).output == "pong\n"


@case
def outputs_of_concurrent_commands_do_not_mix(open: Opener) -> None:
    """Each of many concurrent commands gets its own output, whole."""
    env = open()

    def one(number: int) -> bool:
        result = env.execute(f"for i in {{1..300}}; do echo {number}; done; cat", stdin_data=f"in {number}")
        return result.output == f"{number}\n" * 300 + f"in {number}"

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(40)))
    works(env)


@case
def a_command_that_dies_beside_others_harms_none(open: Opener) -> None:
    """One of two concurrent commands times out; the other one and its state are whole."""
    env = open(kill_grace=0.1)
    scratch(env)
    say(env, "mkfifo go")
    with meanwhile(env, "read -r x <go; kept=$x; echo fine", timeout=PATIENCE) as future:
        assert env.execute("v=lost; kill -STOP $$", timeout=0.2).returncode == 124
        say(env, "echo word >go")
        assert future.result(PATIENCE).output == "fine\n"
    assert value(env, "kept") == "word"


@case
def a_command_that_failed_to_start_merges_nothing(open: Opener) -> None:
    """A concurrent command whose directory is missing changes nothing that others did."""
    env = open()
    scratch(env)
    say(env, "mkfifo begun go")
    with meanwhile(env, "echo >begun; read -r x <go; v=1", timeout=PATIENCE) as future:
        say(env, "cat begun")
        assert env.execute("v=2", "/no/such/place").returncode == 126
        say(env, "echo >go")
        future.result(PATIENCE)
    assert value(env, "v") == "1"


@case
def two_environments_share_nothing(open: Opener) -> None:
    """What happens in one session does not show in another."""
    one, two = open(), open()
    say(one, "v=1; export e=1; f() { :; }; cd /usr; umask 077")
    assert say(two, "echo ${v-none} ${e-none}; type -t f; umask | grep -c 77; true") == "none none\n0"
    assert two.cwd != "/usr"
