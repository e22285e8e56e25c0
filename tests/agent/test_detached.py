"""An agent that outlives its clients: what it keeps, whom it lets in, when it ends."""

from __future__ import annotations

import os
import random
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Ask, Cause, Fd, FdKind, Feature, Frame, Known, Start, Tell
from tests.agent.harness import INPUT, OUTPUT, PATIENCE, PLAIN, AgentClient, Outcome, is_alive, wait_dead
from tests.agent.test_agent import WITH_INPUT, send_input

TOKEN = bytes(range(16))


class Attached(AgentClient):
    """A client of an agent that serves, through the relay."""

    def __init__(self, agent: str, path: Path, *, how: str = "--connect", pipes: bool = False) -> None:
        super().__init__([agent, how, str(path)], pipes=pipes)
        self.known: dict[int, Known] = {}
        self.synced = False

    def attach(self, token: bytes = TOKEN, lease: int = 60) -> None:
        self.send(wire.PREAMBLE, wire.attach_frame(token, lease))
        self.pump_until(lambda: self.synced)

    def _file(self, frame: Frame) -> None:
        if frame.type == Tell.KNOWN:
            assert self.hello is not None
            assert not self.synced
            self.known[frame.exec_id] = wire.parse_known(frame.payload)
            self.execs[frame.exec_id] = Outcome()
            self._next_id = max(self._next_id, frame.exec_id)
        elif frame.type == Tell.SYNCED:
            self.synced = True
        else:
            super()._file(frame)

    def position(self, exec_id: int, number: int, kind: FdKind = OUTPUT) -> int:
        """Where what this client gets begins."""
        if exec_id not in self.known:
            return 0
        (found,) = [c for c in self.known[exec_id].channels if (c.number, c.kind) == (number, kind)]
        return found.position

    def leave(self) -> None:
        """As when the network fails: nothing is said."""
        self.process.kill()
        self.__exit__()


class Server:
    """`agent --serve`, and whoever talks to it."""

    def __init__(self, agent: str, path: Path, *options: str) -> None:
        self.agent, self.path = agent, path
        command = [agent, "--serve", str(path), *options]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert self.process.stderr is not None
        with self.process.stderr as errors:
            self.complaint = errors.read().decode()  # it lets go of stderr once it listens
        self.clients: list[Attached] = []

    def connect(self, *, pipes: bool = False) -> Attached:
        client = Attached(self.agent, self.path, pipes=pipes)
        self.clients.append(client)
        return client

    def attach(self, lease: int = 60) -> Attached:
        client = self.connect()
        client.attach(lease=lease)
        return client

    def end(self) -> None:
        for client in self.clients:
            client.__exit__()
        self.process.terminate()
        assert self.process.wait(PATIENCE) in (0, -signal.SIGTERM, -signal.SIGKILL, 1)


Serve = Callable[..., Server]


@pytest.fixture
def serve(c_agent: str, tmp_path: Path) -> Iterator[Serve]:
    servers: list[Server] = []

    def start(*options: str) -> Server:
        servers.append(Server(c_agent, tmp_path / "run" / "agent", *options))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve()


def forget(client: Attached, exec_id: int) -> None:
    client.send(wire.frame(Ask.FORGET, exec_id))


class TestJoining:
    """A pipe that starts the agent which it leads to, where there is none."""

    def test_the_first_starts_it_and_the_next_finds_it(self, c_agent: str, tmp_path: Path) -> None:
        path = tmp_path / "run" / "agent"
        first = Attached(c_agent, path, how="--join")
        first.attach()
        assert first.hello is not None
        server = first.hello.pid
        try:
            assert server != first.process.pid
            assert os.getsid(server) != os.getsid(first.process.pid)
            exec_id = first.shell("echo before; read line; echo $line", fds=WITH_INPUT)
            first.pump_until(lambda: first.execs[exec_id][1] == b"before\n")
            first.leave()
            second = Attached(c_agent, path, how="--join", pipes=True)
            second.attach()
            assert second.hello is not None
            assert second.hello.pid == server
            send_input(second, exec_id, b"after\n")
            assert second.wait_gone(exec_id)[1].endswith(b"after\n")
            second.__exit__()
        finally:
            os.kill(server, signal.SIGTERM)
        wait_dead([server])
        assert not path.exists()

    def test_as_text_every_byte_arrives(self, c_agent: str, tmp_path: Path) -> None:
        program = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 1200)"
        start = Start(argv=[b"python3", b"-c", program.encode()], fds=[Fd(1, OUTPUT)], inherit_env=True)
        asked = wire.PREAMBLE + wire.attach_frame(TOKEN, 60)
        asked += wire.frame(Ask.START, 1, payload=wire.start_payload(start))
        command = [c_agent, "--join", str(tmp_path / "agent"), "--lease", "60", "--text"]
        frames, lines = wire.Decoder(skip_noise=True), wire.Lines()
        output, server, gone = b"", 0, False
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as relay:
            assert relay.stdin is not None
            assert relay.stdout is not None
            relay.stdin.write(asked)
            relay.stdin.flush()
            while not gone:
                text = os.read(relay.stdout.fileno(), 4099)
                assert text.isascii()
                for frame in frames.feed(lines.feed(text)):
                    gone = gone or frame.type == Tell.GONE
                    server = wire.parse_hello(frame.payload).pid if frame.type == Tell.HELLO else server
                    output += frame.payload if frame.type == Tell.DATA else b""
            relay.stdin.close()
            assert relay.wait(PATIENCE) == 0
        os.kill(server, signal.SIGTERM)
        assert output == bytes(range(256)) * 1200

    def test_where_it_cannot_serve(self, c_agent: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("precious")
        done = subprocess.run(
            [c_agent, "--join", tmp_path / "file"], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("hermitcrab-agent: nobody serves at")
        assert (tmp_path / "file").read_text() == "precious"


class TestNumbers:
    def test_what_was_forgotten_leaves_its_number_to_the_next_client(self, server: Server) -> None:
        first = server.attach()
        exec_id = first.shell("sleep 600 & echo $!")
        left = int(first.wait_exit(exec_id)[1])
        forget(first, exec_id)
        assert first.run("echo fine")[1] == b"fine\n"
        first.leave()
        second = server.attach()
        assert exec_id not in second.known
        second._next_id = exec_id - 1
        again = second.shell("echo other; exit 3")
        assert (again, is_alive(left)) == (exec_id, True)
        outcome = second.wait_gone(again)
        assert (outcome[1], outcome.ended.code) == (b"other\n", 3)
        os.kill(left, signal.SIGKILL)
        wait_dead([left])
        second._next_id = 99
        assert second.run("echo fine")[1] == b"fine\n"


class TestBeginning:
    def test_the_socket_is_for_its_owner_alone(self, server: Server) -> None:
        assert server.complaint == ""
        assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(server.path.parent.stat().st_mode) == 0o700

    @pytest.mark.parametrize("pipes", [True, False])
    def test_a_first_client(self, server: Server, pipes: bool) -> None:
        client = server.connect(pipes=pipes)
        client.attach()
        assert client.known == {}
        assert client.hello is not None
        assert client.hello.features & Feature.DETACHED
        assert client.hello.pid == server.process.pid
        outcome = client.wait_gone(client.shell("echo out; exit 3"))
        assert (outcome[1], outcome.ended.code) == (b"out\n", 3)

    def test_much_both_ways(self, server: Server) -> None:
        client = server.attach()
        data = os.urandom(1 << 20) * 5
        exec_id = client.start("cat", fds=WITH_INPUT)
        send_input(client, exec_id, data)
        client.send(wire.frame(Ask.CLOSE, exec_id, 0))
        assert client.wait_gone(exec_id)[1] == data

    def test_a_socket_that_was_left_is_replaced(self, serve: Serve) -> None:
        first = serve()
        first.process.kill()
        first.process.wait()
        assert first.path.exists()
        assert serve().attach().run("echo fine")[1] == b"fine\n"

    def test_one_that_is_served_is_not(self, serve: Serve) -> None:
        client = serve().attach()
        second = serve()
        assert second.process.wait(PATIENCE) == 1
        assert "another agent serves there" in second.complaint
        assert client.run("echo fine")[1] == b"fine\n"

    def test_what_is_no_socket_is_left_alone(self, c_agent: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("precious")
        server = Server(c_agent, tmp_path / "file")
        assert server.process.wait(PATIENCE) == 1
        assert "Address" in server.complaint
        assert (tmp_path / "file").read_text() == "precious"

    def test_a_path_too_long(self, c_agent: str, tmp_path: Path) -> None:
        server = Server(c_agent, tmp_path / ("x" * 200))
        assert server.process.wait(PATIENCE) == 1
        assert "too long" in server.complaint

    @pytest.mark.parametrize("name", ["nothing", "x" * 200])
    def test_nobody_serves(self, c_agent: str, tmp_path: Path, name: str) -> None:
        done = subprocess.run(
            [c_agent, "--connect", tmp_path / name], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"hermitcrab-agent: nobody serves at {tmp_path}")


class TestWhoIsLetIn:
    def test_another_token_is_refused_and_disturbs_nobody(self, server: Server) -> None:
        first = server.attach()
        exec_id = first.start("cat", fds=WITH_INPUT)
        stranger = server.connect()
        stranger.send(wire.PREAMBLE, wire.attach_frame(TOKEN[:-1] + b"x", 60))
        stranger.pump_to_end()
        assert stranger.error == "the token is another"
        assert stranger.hello is None
        first.send(wire.frame(Ask.DATA, exec_id, 0, b"still here"), wire.frame(Ask.CLOSE, exec_id, 0))
        assert first.wait_gone(exec_id)[1] == b"still here"

    @pytest.mark.parametrize(
        "greeting",
        [
            b"GET / HTTP/1.0\r\n\r\n",
            wire.PREAMBLE + wire.frame(Ask.PING),
            wire.PREAMBLE + wire.frame(Ask.ATTACH, payload=bytes(19)),
            wire.PREAMBLE + wire.frame(Ask.ATTACH, 1, payload=bytes(20)),
        ],
        ids=["no preamble", "no ATTACH", "short ATTACH", "ATTACH with an id"],
    )
    def test_a_wrong_greeting(self, server: Server, greeting: bytes) -> None:
        stranger = server.connect()
        stranger.send(greeting)
        stranger.pump_to_end()
        assert stranger.error
        assert server.attach().run("echo fine")[1] == b"fine\n"

    def test_byte_by_byte(self, server: Server) -> None:
        client = server.connect()
        for byte in wire.PREAMBLE + wire.attach_frame(TOKEN, 60):
            client.send(bytes([byte]))
        client.pump_until(lambda: client.synced)

    def test_those_who_say_nothing_do_not_keep_others_out(self, server: Server) -> None:
        silent = [socket.socket(socket.AF_UNIX) for _ in range(30)]
        try:
            for each in silent:
                each.connect(str(server.path))
            assert server.attach().run("echo fine")[1] == b"fine\n"
        finally:
            for each in silent:
                each.close()

    def test_the_next_one_takes_over(self, server: Server) -> None:
        first = server.attach()
        exec_id = first.start("cat", fds=WITH_INPUT)
        first.send(wire.frame(Ask.DATA, exec_id, 0, b"one "))
        first.wait_output(exec_id, b"one ")
        second = server.attach()
        first.pump_to_end()
        assert first.error == "another client has taken over"
        assert first.execs[exec_id].exit is None
        assert not second.known[exec_id].exited
        second.send(wire.frame(Ask.DATA, exec_id, 0, b"two"), wire.frame(Ask.CLOSE, exec_id, 0))
        assert second.wait_gone(exec_id)[1].endswith(b"two")

    def test_a_second_attach_is_malformed(self, server: Server) -> None:
        client = server.attach()
        client.send(wire.attach_frame(TOKEN, 60))
        client.pump_to_end()
        assert client.error

    def test_what_is_malformed_costs_the_connection_only(self, server: Server) -> None:
        first = server.attach()
        exec_id = first.start("cat", fds=WITH_INPUT)
        first.send(wire.frame(99))
        first.pump_to_end()
        assert first.error
        second = server.attach()
        second.send(wire.frame(Ask.CLOSE, exec_id, 0))
        assert second.wait_gone(exec_id).ended.code == 0

    def test_attach_and_forget_where_nobody_serves(self, c_agent: str) -> None:
        with AgentClient([c_agent]) as agent:
            agent.greet()
            exec_id = agent.start("cat", fds=WITH_INPUT)
            agent.send(wire.frame(Ask.FORGET, exec_id), wire.frame(Ask.CLOSE, exec_id, 0))
            assert agent.wait_gone(exec_id).ended.code == 0
            agent.send(wire.attach_frame(TOKEN, 60))
            agent.pump_to_end()
            assert agent.error


class TestWhatIsKept:
    def test_what_was_said_meanwhile_and_the_end(self, server: Server, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "go")
        first = server.attach()
        exec_id = first.shell(f"echo before; read < {tmp_path}/go; echo after; exit 7")
        first.wait_output(exec_id, b"before\n")
        first.leave()
        (tmp_path / "go").write_text("\n")
        second = server.attach()
        outcome = second.wait_gone(exec_id)
        start = second.position(exec_id, 1)
        assert b"before\nafter\n"[start:] == outcome[1]
        assert (outcome.ended.cause, outcome.ended.code) == (Cause.ENDED, 7)

    def test_a_file_is_written_on_while_clients_change(self, server: Server) -> None:
        first = server.attach()
        fds = [Fd(0, INPUT), Fd(1, OUTPUT), Fd(5, FdKind.FILE)]
        exec_id = first.shell("echo before >&5; echo up; read; echo after >&5", fds=fds)
        first.wait_output(exec_id, b"up\n")
        first.leave()
        second = server.attach()
        second.send(wire.frame(Ask.CLOSE, exec_id, 0))
        assert second.wait_gone(exec_id)[5] == b"before\nafter\n"

    def test_an_end_is_told_until_it_is_forgotten(self, server: Server) -> None:
        first = server.attach()
        exec_id = first.shell("echo out; echo file >&5; exit 5", fds=[*PLAIN, Fd(5, FdKind.FILE)])
        first.wait_gone(exec_id)
        first.leave()
        for _ in range(3):
            client = server.attach()
            assert client.known[exec_id].exited
            outcome = client.wait_gone(exec_id)
            assert outcome.ended.code == 5
            assert outcome[1] == b"out\n"[client.position(exec_id, 1) :]
            assert outcome[5] == b"file\n"[client.position(exec_id, 5) :]
            client.leave()
        client = server.attach()
        forget(client, exec_id)
        client.run("true")
        client.leave()
        assert exec_id not in server.attach().known

    def test_what_was_credited_is_not_sent_again(self, server: Server) -> None:
        first = server.attach()
        first.auto_credit = False
        fds = [Fd(0, INPUT), Fd(1, OUTPUT), Fd(5, FdKind.FILE)]
        exec_id = first.shell("head -c 500000 /dev/zero | tr '\\0' x; read", fds=fds)
        first.pump_until(lambda: len(first.execs[exec_id][1]) == 500_000)
        first.send(wire.credit(Ask.CREDIT, exec_id, 1, 300_000))
        first.run("true")
        first.leave()
        second = server.attach()
        assert second.position(exec_id, 1) == 300_000
        second.send(wire.frame(Ask.CLOSE, exec_id, 0))
        assert second.wait_gone(exec_id)[1] == b"x" * 200_000

    def test_a_process_does_not_wait_for_a_client_that_is_not_there(
        self, server: Server, tmp_path: Path
    ) -> None:
        os.mkfifo(tmp_path / "done")
        first = server.attach()
        exec_id = first.shell(f"for i in {{1..400000}}; do echo $i; done; echo > {tmp_path}/done; exit 4")
        first.wait_output(exec_id, b"\n")
        first.leave()
        (tmp_path / "done").read_text()
        second = server.attach()
        outcome = second.wait_gone(exec_id)
        assert outcome.ended.code == 4
        whole = b"".join(b"%d\n" % i for i in range(1, 400_001))
        assert outcome[1] == whole[second.position(exec_id, 1) :]
        assert len(outcome[1]) == wire.OUTPUT_CREDIT

    def test_a_file_goes_on_where_it_was_credited(self, server: Server) -> None:
        first = server.attach()
        first.auto_credit = False
        content = b"".join(b"%7d\n" % i for i in range(400_000))
        script = "python3 -c 'import os\nfor i in range(400000): os.write(5, b\"%7d\\n\" % i)'"
        exec_id = first.shell(script, fds=[*PLAIN, Fd(5, FdKind.FILE)])
        first.pump_until(lambda: len(first.execs[exec_id][5]) == wire.OUTPUT_CREDIT)
        first.send(wire.credit(Ask.CREDIT, exec_id, 5, 100_000))
        first.run("true")
        first.leave()
        for expected in (100_000, 100_000 + wire.OUTPUT_CREDIT // 2):
            client = server.connect()
            client.auto_credit = False
            client.attach()
            assert client.known[exec_id].exited
            assert client.position(exec_id, 5) == expected
            pump_some(client, exec_id, wire.OUTPUT_CREDIT, 5)
            client.send(wire.credit(Ask.CREDIT, exec_id, 5, wire.OUTPUT_CREDIT // 2))
            client.run("true")
            client.leave()
        last = server.attach()
        assert last.wait_gone(exec_id)[5] == content[100_000 + wire.OUTPUT_CREDIT :]

    def test_input_goes_on_where_it_was_taken(self, server: Server) -> None:
        first = server.attach()
        exec_id = first.shell("sleep 0.3; cat", fds=WITH_INPUT)
        first.send(wire.frame(Ask.DATA, exec_id, 0, b"a" * 200_000))
        first.run("true")
        first.leave()
        second = server.attach()
        assert second.position(exec_id, 0, INPUT) == 200_000
        outcome = second.execs[exec_id]
        second.pump_until(lambda: granted(outcome) >= wire.INPUT_CREDIT - 200_000)
        second.pump_until(lambda: granted(outcome) >= wire.INPUT_CREDIT - 65_536)
        second.send(
            wire.frame(Ask.DATA, exec_id, 0, b"b" * 100_000),
            wire.frame(Ask.CLOSE, exec_id, 0),
            wire.frame(Ask.CLOSE, exec_id, 0),
        )
        whole = b"a" * 200_000 + b"b" * 100_000
        assert second.wait_gone(exec_id)[1] == whole[second.position(exec_id, 1) :]

    def test_closed_channels_are_told_again(self, server: Server) -> None:
        first = server.attach()
        fds = [Fd(0, INPUT), Fd(1, OUTPUT), Fd(5, INPUT), Fd(6, OUTPUT)]
        exec_id = first.shell("exec 5<&- 6>&-; echo closed; read", fds=fds)
        first.pump_until(lambda: closed(first.execs[exec_id]) == {5, 6})
        first.leave()
        second = server.attach()
        second.pump_until(lambda: closed(second.execs[exec_id]) == {5, 6})
        second.send(wire.frame(Ask.CLOSE, exec_id, 0))
        assert second.wait_gone(exec_id).ended.code == 1

    def test_a_terminal(self, server: Server) -> None:
        first = server.attach()
        fds = [Fd.terminal(0, 24, 80), Fd.same_as(1, 0), Fd.same_as(2, 0)]
        exec_id = first.shell("stty -echo; echo ready; read x; echo got $x; stty size", fds=fds)
        first.wait_output(exec_id, b"ready", 0)
        first.leave()
        second = server.attach()
        assert {c.kind for c in second.known[exec_id].channels} == {INPUT, OUTPUT}
        second.send(
            wire.resize_frame(exec_id, 0, 30, 90),
            wire.frame(Ask.DATA, exec_id, 0, b"text\r"),
        )
        assert second.wait_gone(exec_id)[0].endswith(b"got text\r\n30 90\r\n")

    def test_the_background_runs_on(self, server: Server, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "done")
        first = server.attach()
        exec_id = first.shell(f"(sleep 0.2; head -c 3000000 /dev/zero; echo $? > {tmp_path}/done) & exit 0")
        first.wait_exit(exec_id)
        first.leave()
        assert (tmp_path / "done").read_text() == "0\n"
        assert server.attach().wait_gone(exec_id).ended.code == 0

    def test_a_timer_runs_without_a_client(self, server: Server) -> None:
        first = server.attach()
        exec_id = first.shell("echo $$; exec sleep 100")
        pid = int(first.wait_output(exec_id, b"\n")[1])
        first.send(wire.timer_frame(exec_id, 300, 0))
        first.run("true")
        first.leave()
        wait_dead([pid], 5)
        assert server.attach().wait_gone(exec_id).ended.cause is Cause.TIMER

    def test_transfers_end_with_their_client(self, server: Server, tmp_path: Path) -> None:
        first = server.attach()
        first.auto_credit = False
        (tmp_path / "large").write_bytes(bytes(3 << 20))
        reading, writing = first.new_id(), first.new_id()
        first.send(
            wire.read_frame(reading, bytes(tmp_path / "large")),
            wire.write_frame(writing, bytes(tmp_path / "new")),
            wire.frame(Ask.DATA, writing, 0, b"half"),
        )
        first.run("true")
        first.leave()
        second = server.attach()
        assert not {reading, writing} & set(second.known)
        assert not (tmp_path / "new").exists()
        second.send(wire.kill_frame(reading, 0), wire.frame(Ask.CLOSE, writing, 0))
        assert second.run("echo fine")[1] == b"fine\n"

    def test_a_bound_on_what_nobody_forgets(self, server: Server) -> None:
        first = server.attach()
        ids = [first.start("true") for _ in range(300)]
        for exec_id in ids:
            first.wait_gone(exec_id)
        first.leave()
        known = set(server.attach().known)
        assert len(known) == 256
        assert known == set(ids[-256:])

    def test_an_id_that_is_kept_is_in_use(self, server: Server) -> None:
        client = server.attach()
        exec_id = client.start("true")
        client.wait_gone(exec_id)
        client.send(wire.start_frame(exec_id, wire.Start([b"true"])))
        client.pump_to_end()
        assert client.error
        client = server.attach()
        forget(client, exec_id)
        client.run("true")
        client.execs[exec_id] = Outcome()
        client.send(wire.start_frame(exec_id, wire.Start([b"/bin/true"])))
        assert client.wait_gone(exec_id).ended.code == 0

    def test_what_runs_cannot_be_forgotten(self, server: Server) -> None:
        client = server.attach()
        exec_id = client.start("cat", fds=WITH_INPUT)
        forget(client, exec_id)
        client.send(wire.frame(Ask.CLOSE, exec_id, 0))
        assert client.wait_gone(exec_id).ended.code == 0

    @pytest.mark.parametrize("seed", range(3))
    def test_clients_that_come_and_go_lose_nothing(self, server: Server, seed: int) -> None:
        chance = random.Random(seed)
        client = server.attach()
        expected = b"".join(b"%d\n" % i for i in range(1, 150_001))
        exec_id = client.shell("for i in {1..150000}; do echo $i; done; exit 9", fds=PLAIN)
        received = bytearray()
        while True:
            outcome = pump_some(client, exec_id, chance.randrange(1, 400_000))
            begin = client.position(exec_id, 1)
            assert begin <= len(received), "a gap, though nobody was slow"
            received[begin:] = outcome[1]
            if outcome.exit is not None:
                break
            if chance.random() < 0.5:
                client.leave()
            client = server.attach()
        assert outcome.ended.code == 9
        assert received == expected


def pump_some(client: Attached, exec_id: int, least: int, channel: int = 1) -> Outcome:
    """So many bytes of output, unless it ends before."""
    outcome = client.execs[exec_id]
    client.pump_until(lambda: len(outcome[channel]) >= least or outcome.exit is not None)
    return outcome


def granted(outcome: Outcome) -> int:
    return sum(wire.parse_u32(frame.payload) for frame in outcome.frames if frame.type == Tell.CREDIT)


def closed(outcome: Outcome) -> set[int]:
    return {frame.channel for frame in outcome.frames if frame.type == Tell.CLOSE}


class TestEnd:
    def busy(self, client: Attached) -> int:
        exec_id = client.shell("trap '' TERM; setsid sleep 100 & echo $!; wait")
        return int(client.wait_output(exec_id, b"\n")[1])

    def test_a_lease_without_a_client(self, serve: Serve) -> None:
        server = serve()
        client = server.attach(lease=1)
        pid = self.busy(client)
        client.leave()
        assert server.process.wait(10) == 0
        assert not is_alive(pid)
        assert not server.path.exists()

    def test_a_lease_without_a_word(self, serve: Serve) -> None:
        server = serve()
        pid = self.busy(server.attach(lease=1))
        assert server.process.wait(10) == 0
        assert not is_alive(pid)

    def test_a_lease_before_anybody_came(self, serve: Serve) -> None:
        assert serve("--lease", "1").process.wait(10) == 0

    def test_each_attach_sets_it_anew(self, serve: Serve) -> None:
        server = serve("--lease", "1")
        server.attach(lease=60).leave()
        time.sleep(1.5)  # longer than the first one
        assert server.attach().run("echo fine")[1] == b"fine\n"

    def test_signs_of_life_keep_it(self, serve: Serve) -> None:
        client = serve().attach(lease=1)
        for _ in range(6):
            client.send(wire.frame(Ask.PING))
            client.pump_for(0.3)  # a silence is what is tested
        assert client.run("echo fine")[1] == b"fine\n"

    def test_terminated(self, serve: Serve) -> None:
        server = serve()
        client = server.attach()
        pid = self.busy(client)
        client.leave()
        server.process.terminate()
        assert server.process.wait(10) == 0
        assert not is_alive(pid)
        assert not server.path.exists()

    def test_killed(self, serve: Serve) -> None:
        server = serve()
        pid = self.busy(server.attach())
        server.process.kill()
        server.process.wait()
        wait_dead([pid], 5)

    def test_the_relay_ends_with_either_side(self, serve: Serve) -> None:
        server = serve()
        client = server.attach()
        client.hang_up()
        assert client.process.wait(5) == 0
        client = server.attach()
        server.process.terminate()
        assert client.process.wait(10) == 0
