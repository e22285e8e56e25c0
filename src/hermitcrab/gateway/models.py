"""What goes over the wire, as models: they check what comes in, and describe both ways in /openapi.json."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Annotated, Any, Self

from pydantic import (
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel

from hermitcrab.core.protocols import STDERR, STDIN, STDOUT
from hermitcrab.gateway.records import ExecRecord, ExecRequest, SandboxRecord, SandboxState, SnapshotRecord
from hermitcrab.gateway.records import Program as ProgramRecord
from hermitcrab.gateway.wire import LEAST_IDLE_MS, LIFE_MS, Status

LONGEST_PATH = 4096
_LARGEST = 2**53 - 1  # what every JSON reader takes for the same number
_NO_NUL = r"^[^\x00]*$"
EXEC_ID = r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$"

Text = Annotated[str, StringConstraints(pattern=_NO_NUL)]
Path = Annotated[str, StringConstraints(pattern=_NO_NUL, max_length=LONGEST_PATH)]
Whole = Annotated[int, Field(gt=0, le=_LARGEST)]
Variable = Annotated[str, StringConstraints(pattern=r"^[^\x00=]+=[^\x00]*$")]
Descriptor = Annotated[int, Field(ge=0, le=250)]
_MOST_DESCRIPTORS = 16


class Message(BaseModel):
    """On the wire names are written like `timeoutMs`; what is not known is ignored."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True)


class Create(Message):
    """A sandbox that a client wants."""

    image: Annotated[str, StringConstraints(pattern=_NO_NUL, max_length=512)] | None = None
    """Empty: the operator's own choice."""
    cwd: Path | None = None
    cpu: Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)] | None = None
    memory_mib: Annotated[Whole | None, Field(alias="memoryMiB")] = None
    disk_mib: Annotated[Whole | None, Field(alias="diskMiB")] = None
    timeout_ms: Whole = LIFE_MS
    """Of its whole life."""
    idle_timeout_ms: Whole = LEAST_IDLE_MS
    """Less than 300 000 counts as that."""
    persistent_filesystem: bool = False
    logical_key: Annotated[str, StringConstraints(pattern=_NO_NUL, max_length=256)] | None = None
    network: bool | None = None
    """Absent: as the operator has it."""
    snapshot: Annotated[str, StringConstraints(pattern=_NO_NUL, max_length=128)] | None = None
    """Begin with one of your own."""


class Program(Message):
    """What is run in place of a command, exactly so."""

    argv: Annotated[list[Text], Field(min_length=1, max_length=4096)]
    path: Path = ""
    """Of its file, where that is not `argv[0]`."""
    env: Annotated[list[Variable], Field(max_length=65536)] = []
    """`NAME=value`, and nothing else."""
    given: Annotated[dict[Descriptor, Base64Bytes], Field(max_length=_MOST_DESCRIPTORS)] = {}
    """Descriptors and what is in them, in base64."""
    told: Annotated[list[Descriptor], Field(max_length=_MOST_DESCRIPTORS)] = []
    """Descriptors to write to; what is in them at its end is in the answer."""

    @model_validator(mode="after")
    def _apart(self) -> Self:
        numbers = [*self.given, *self.told]
        if len(set(numbers)) < len(numbers) or {STDOUT, STDERR} & set(numbers) or STDIN in self.told:
            raise ValueError("given and told take each descriptor once, told none below 3, given not 1 or 2")
        return self

    def record(self) -> ProgramRecord:
        return ProgramRecord(
            argv=tuple(self.argv),
            path=self.path,
            env=tuple(self.env),
            given=self.given,
            told=tuple(self.told),
        )


class Start(Message):
    """A command that a client wants run, under an id of its own choice."""

    exec_id: Annotated[str, StringConstraints(pattern=EXEC_ID)]
    """A UUID, say. The same one never runs twice."""
    command: Text
    timeout_ms: Whole = LIFE_MS
    stdin_data: str | None = None
    stdin_base64: str | None = None
    """In place of `stdinData`: any bytes."""
    cwd: Path | None = None
    program: Program | None = None
    """In place of the command, which then is what people call it; has its stdin among what it is given."""

    @field_validator("stdin_base64")
    @classmethod
    def _is_base64(cls, value: str | None) -> str | None:
        if value is not None:
            b64decode(value, validate=True)
        return value

    def request(self) -> ExecRequest:
        if self.stdin_base64 is not None:
            stdin = b64decode(self.stdin_base64)
        else:
            stdin = (self.stdin_data or "").encode()
        return ExecRequest(
            exec_id=self.exec_id,
            command=self.command,
            timeout_ms=self.timeout_ms,
            stdin=stdin,
            cwd=self.cwd or "",
            program=self.program.record() if self.program is not None else None,
        )


class Signal(Message):
    signal: Annotated[int, Field(ge=1, le=64)]


class Terminate(Message):
    snapshot_before_terminate: bool = False


class Fork(Message):
    count: Annotated[int, Field(ge=1, le=64)] = 1


class Network(Message):
    allowed: bool


class Sandbox(Message):
    """What is known of a sandbox."""

    id: str
    state: SandboxState
    tenant: str
    engine: str
    image: str
    cwd: str
    cpu: float | None
    memory_mib: Annotated[int | None, Field(alias="memoryMiB")]
    disk_mib: Annotated[int | None, Field(alias="diskMiB")]
    timeout_ms: int
    idle_timeout_ms: int
    persistent_filesystem: bool
    logical_key: str
    network: bool | None
    snapshot: str
    """What it began with."""
    created: float
    """Seconds since 1970, as the next."""
    used: float
    parent: str
    """Of a fork: the sandbox that it was copied from."""
    reason: str
    """Why it is lost, or could not be created."""


class Sandboxes(Message):
    sandboxes: list[Sandbox]


class ExecUsage(Message):
    """What a command and all that it waited for have used."""

    user_seconds: float
    system_seconds: float
    peak_memory_bytes: int
    """Of the largest of its processes."""


class Exec(Message):
    """How far a command is. What is absent is not known yet."""

    exec_id: str
    status: Status
    output: str | None = None
    """What was printed and kept, decoded as UTF-8; only of a command that is over."""
    returncode: int | None = None
    output_bytes: int | None = None
    """How many were printed; more than in `output` when only the last were kept."""
    reason: str | None = None
    told: dict[str, str] | None = None
    """What a program left in its descriptors, in base64."""
    usage: ExecUsage | None = None
    """What a command has used that is over, where its sandbox tells."""
    out_of_memory: bool | None = None
    """Something of it was killed because the sandbox's memory ran out."""


class ListedExec(Message):
    exec_id: str
    status: Status
    command: str
    created: float
    started: float | None
    ended: float | None
    returncode: int | None
    output_bytes: int
    reason: str


class Execs(Message):
    execs: list[ListedExec]


class File(Message):
    """One entry of a directory."""

    name: str
    kind: str
    """`file`, `directory`, `link` or `other`."""
    size: int
    mode: int
    modified: float
    """Seconds since 1970."""
    target: str
    """Where a link leads."""


class Files(Message):
    path: str
    files: list[File]


class Written(Message):
    path: str


class Snapshot(Message):
    snapshot: str
    """Its id, for a create."""


class ListedSnapshot(Message):
    """A sandbox as it was."""

    id: str
    sandbox: str
    engine: str
    created: float


class Snapshots(Message):
    snapshots: list[ListedSnapshot]


class NetworkIs(Message):
    allowed: bool


class Health(Message):
    status: str


class Refusal(Message):
    """Every error."""

    error: str
    """For people."""
    code: str
    """For programs."""


def sandbox_answer(record: SandboxRecord) -> dict[str, Any]:
    """As `Sandbox` describes it."""
    request = record.request
    return {
        "id": record.id,
        "state": record.state,
        "tenant": record.tenant,
        "engine": record.engine,
        "image": request.image,
        "cwd": request.cwd,
        "cpu": request.cpu,
        "memoryMiB": request.memory_mib,
        "diskMiB": request.disk_mib,
        "timeoutMs": request.timeout_ms,
        "idleTimeoutMs": request.idle_timeout_ms,
        "persistentFilesystem": request.persistent_filesystem,
        "logicalKey": request.logical_key,
        "network": request.network,
        "snapshot": request.snapshot,
        "created": record.created,
        "used": record.used,
        "parent": record.parent,
        "reason": record.reason,
    }


def listed_snapshot(record: SnapshotRecord) -> dict[str, Any]:
    """As `ListedSnapshot` describes it."""
    names = ("id", "sandbox", "engine", "created")
    return {name: getattr(record, name) for name in names}


def listed_exec(record: ExecRecord) -> dict[str, Any]:
    """As `ListedExec` describes it."""
    return {
        "execId": record.id,
        "status": record.status,
        "command": record.command,
        "created": record.created,
        "started": record.started,
        "ended": record.ended,
        "returncode": record.returncode,
        "outputBytes": record.output_bytes,
        "reason": record.reason,
    }


def exec_answer(record: ExecRecord, output: bytes | None = None) -> dict[str, Any]:
    """As `Exec` describes it: an old client looks at no more than it knows."""
    answer: dict[str, Any] = {"execId": record.id, "status": record.status}
    if record.status.over:
        answer["returncode"] = record.returncode if record.returncode is not None else 1
        answer["outputBytes"] = record.output_bytes
        if output is not None:
            answer["output"] = output.decode(errors="replace")
        if record.reason:
            answer["reason"] = record.reason
        if record.told:
            answer["told"] = {str(number): b64encode(data).decode() for number, data in record.told.items()}
        if record.usage is not None:
            answer["usage"] = {
                "userSeconds": record.usage.user_seconds,
                "systemSeconds": record.usage.system_seconds,
                "peakMemoryBytes": record.usage.peak_memory_bytes,
            }
        if record.out_of_memory:
            answer["outOfMemory"] = True
    return answer
