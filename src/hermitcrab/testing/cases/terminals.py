"""Commands on a terminal of their own."""

from __future__ import annotations

from hermitcrab.result import INTERRUPTED, TIMED_OUT
from hermitcrab.testing.inside import PATIENCE, alive, needs, pids_in, raised, read_until, say, value, works
from hermitcrab.testing.suite import Opener, case

SIZE = (31, 97)


@case
def a_command_can_have_a_terminal(open: Opener) -> None:
    """All three standard descriptors are one terminal of the size that was asked for."""
    env = open()
    running = env.stream(
        "test -t 0 && test -t 1 && test -t 2 && tty && stty size </dev/tty", terminal=SIZE, timeout=PATIENCE
    )
    result = running.wait(PATIENCE)
    assert result.returncode == 0, result
    name, size = result.output.split("\r\n")[:2]
    assert name.startswith("/dev/")
    assert size == "31 97"


@case
def what_is_typed_is_echoed_and_read(open: Opener) -> None:
    """A line that is typed shows, and the program reads it when Enter is pressed."""
    env = open()
    running = env.stream("echo ready; read -r line; echo got $line", terminal=SIZE, timeout=PATIENCE)
    read_until(running, "ready\r\n")
    running.write("hello\r")
    assert "".join(running) == "hello\r\ngot hello\r\n"
    assert running.wait(PATIENCE).returncode == 0


@case
def a_terminal_can_be_resized(open: Opener) -> None:
    """The program hears of a new size by SIGWINCH, and finds it."""
    env = open()
    running = env.stream(
        "trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.05; done",
        terminal=SIZE,
        timeout=PATIENCE,
    )
    read_until(running, "ready\r\n")
    running.resize(50, 132)
    assert "50 132" in "".join(running)
    raised(ValueError, lambda: running.resize(0, 80))


@case
def ctrl_c_on_a_terminal_interrupts_the_program(open: Opener) -> None:
    """The terminal turns the key into a signal for what runs in front."""
    env = open()
    running = env.stream(
        "trap 'echo caught; exit 7' INT; echo ready; read -r", terminal=SIZE, timeout=PATIENCE
    )
    read_until(running, "ready\r\n")
    running.write("\x03")
    assert "caught" in "".join(running)
    assert running.wait(PATIENCE).returncode == 7


@case
def the_end_of_input_can_be_typed(open: Opener) -> None:
    """Closing the input is Ctrl-D at the beginning of a line."""
    env = open()
    running = env.stream("cat; echo over", terminal=SIZE, timeout=PATIENCE)
    running.write("one\r")
    read_until(running, "one\r\none\r\n")
    running.close_stdin()
    assert "over\r\n" in "".join(running)


@case
def a_terminal_command_is_one_of_the_session(open: Opener) -> None:
    """It sees the session's state and changes it; its limit and an interrupt end all that it started."""
    env = open(kill_grace=0.1)
    say(env, "v=1; cd /usr")
    done = env.stream("echo $v $PWD; v=2; cd /", terminal=SIZE).wait(PATIENCE)
    assert done.output == "1 /usr\r\n"
    assert (value(env, "v"), env.cwd) == ("2", "/")
    late = env.stream("setsid sleep 600 & echo $!; sleep 600", terminal=SIZE, timeout=0.5).wait(PATIENCE)
    assert late.returncode == TIMED_OUT
    assert alive(env, *pids_in(late.output.replace("\r", ""))) == []
    running = env.stream("echo ready; sleep 600", terminal=SIZE)
    read_until(running, "ready\r\n")
    running.interrupt()
    assert running.wait(PATIENCE).returncode == INTERRUPTED
    works(env)


@case
def an_interactive_shell_runs_on_a_terminal(open: Opener) -> None:
    """With a prompt, job control, and an end when one leaves it."""
    env = open()
    running = env.stream("PS1='ready> ' bash --norc --noprofile -i", terminal=SIZE, timeout=PATIENCE)
    read_until(running, "ready> ")
    running.write("sh -c 'echo in fr''ont; exec sleep 600'\r")
    read_until(running, "in front")
    running.write("\x1a")
    read_until(running, "ready> ")
    running.write("jobs\r")
    assert "Stopped" in read_until(running, "ready> ")
    running.write("disown -a; exit 5\r")
    assert running.wait(PATIENCE).returncode == 5


@case
def a_full_screen_program_runs_on_a_terminal(open: Opener) -> None:
    """A program that takes the whole screen draws on it, and leaves it when told to."""
    env = open()
    needs(env, "top")
    running = env.stream("TERM=xterm top -d 60", terminal=SIZE, timeout=PATIENCE)
    seen = read_until(running, "PID")
    assert "\x1b[" in seen
    running.write("q")
    assert running.wait(PATIENCE).returncode == 0
