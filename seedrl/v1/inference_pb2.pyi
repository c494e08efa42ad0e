from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StreamRequest(_message.Message):
    __slots__ = ("hello", "ready", "step", "report")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ready: Ready
    step: Step
    report: Report
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ...) -> None: ...

class StreamResponse(_message.Message):
    __slots__ = ("welcome", "act", "control", "memory")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACT_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    act: Act
    control: Control
    memory: Memory
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., act: _Optional[_Union[Act, _Mapping]] = ..., control: _Optional[_Union[Control, _Mapping]] = ..., memory: _Optional[_Union[Memory, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "actor_name", "host", "instance", "epoch", "env_failure", "redirects")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ACTOR_NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENV_FAILURE_FIELD_NUMBER: _ClassVar[int]
    REDIRECTS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    actor_name: str
    host: str
    instance: str
    epoch: int
    env_failure: str
    redirects: int
    def __init__(self, protocol_version: _Optional[int] = ..., actor_name: _Optional[str] = ..., host: _Optional[str] = ..., instance: _Optional[str] = ..., epoch: _Optional[int] = ..., env_failure: _Optional[str] = ..., redirects: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "session_id", "env", "num_envs", "group_size", "seed")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    NUM_ENVS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    session_id: int
    env: Env
    num_envs: int
    group_size: int
    seed: int
    def __init__(self, protocol_version: _Optional[int] = ..., session_id: _Optional[int] = ..., env: _Optional[_Union[Env, _Mapping]] = ..., num_envs: _Optional[int] = ..., group_size: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class Env(_message.Message):
    __slots__ = ("id", "options_json", "processes", "wrappers", "players")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    WRAPPERS_FIELD_NUMBER: _ClassVar[int]
    PLAYERS_FIELD_NUMBER: _ClassVar[int]
    id: str
    options_json: str
    processes: bool
    wrappers: _containers.RepeatedScalarFieldContainer[str]
    players: int
    def __init__(self, id: _Optional[str] = ..., options_json: _Optional[str] = ..., processes: bool = ..., wrappers: _Optional[_Iterable[str]] = ..., players: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("observation", "action")
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    observation: _containers.RepeatedCompositeFieldContainer[Array]
    action: _containers.RepeatedCompositeFieldContainer[Action]
    def __init__(self, observation: _Optional[_Iterable[_Union[Array, _Mapping]]] = ..., action: _Optional[_Iterable[_Union[Action, _Mapping]]] = ...) -> None: ...

class Array(_message.Message):
    __slots__ = ("shape", "dtype", "name", "values")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    name: str
    values: int
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., name: _Optional[str] = ..., values: _Optional[int] = ...) -> None: ...

class Action(_message.Message):
    __slots__ = ("name", "shape", "choices", "low", "high")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedScalarFieldContainer[int]
    low: _containers.RepeatedScalarFieldContainer[float]
    high: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[int]] = ..., low: _Optional[_Iterable[float]] = ..., high: _Optional[_Iterable[float]] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("path", "token", "buffers", "buffer_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    token: bytes
    buffers: int
    buffer_bytes: int
    def __init__(self, path: _Optional[str] = ..., token: _Optional[bytes] = ..., buffers: _Optional[int] = ..., buffer_bytes: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("request_id", "env_id", "observation", "reward", "flags", "buffer")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENV_ID_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    env_id: bytes
    observation: _containers.RepeatedScalarFieldContainer[bytes]
    reward: bytes
    flags: bytes
    buffer: int
    def __init__(self, request_id: _Optional[int] = ..., env_id: _Optional[bytes] = ..., observation: _Optional[_Iterable[bytes]] = ..., reward: _Optional[bytes] = ..., flags: _Optional[bytes] = ..., buffer: _Optional[int] = ...) -> None: ...

class Act(_message.Message):
    __slots__ = ("request_id", "action")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    request_id: _containers.RepeatedScalarFieldContainer[int]
    action: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, request_id: _Optional[_Iterable[int]] = ..., action: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("steps", "env_seconds", "wait_seconds", "requests", "round_trip_seconds", "cpu_seconds", "reconnects")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ENV_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECONNECTS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    env_seconds: float
    wait_seconds: float
    requests: int
    round_trip_seconds: float
    cpu_seconds: float
    reconnects: int
    def __init__(self, steps: _Optional[int] = ..., env_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., requests: _Optional[int] = ..., round_trip_seconds: _Optional[float] = ..., cpu_seconds: _Optional[float] = ..., reconnects: _Optional[int] = ...) -> None: ...

class Control(_message.Message):
    __slots__ = ("command", "reason", "address")
    class Command(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        COMMAND_UNSPECIFIED: _ClassVar[Control.Command]
        COMMAND_DRAIN: _ClassVar[Control.Command]
        COMMAND_END: _ClassVar[Control.Command]
        COMMAND_RESET: _ClassVar[Control.Command]
        COMMAND_PAUSE: _ClassVar[Control.Command]
        COMMAND_RESUME: _ClassVar[Control.Command]
        COMMAND_REDIRECT: _ClassVar[Control.Command]
    COMMAND_UNSPECIFIED: Control.Command
    COMMAND_DRAIN: Control.Command
    COMMAND_END: Control.Command
    COMMAND_RESET: Control.Command
    COMMAND_PAUSE: Control.Command
    COMMAND_RESUME: Control.Command
    COMMAND_REDIRECT: Control.Command
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    command: Control.Command
    reason: str
    address: str
    def __init__(self, command: _Optional[_Union[Control.Command, str]] = ..., reason: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class ControlRequest(_message.Message):
    __slots__ = ("actor", "temperature", "epsilon", "command", "options_json", "open")
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    actor: str
    temperature: float
    epsilon: float
    command: Control.Command
    options_json: str
    open: bool
    def __init__(self, actor: _Optional[str] = ..., temperature: _Optional[float] = ..., epsilon: _Optional[float] = ..., command: _Optional[_Union[Control.Command, str]] = ..., options_json: _Optional[str] = ..., open: bool = ...) -> None: ...

class ControlResponse(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[MemberResult]
    def __init__(self, members: _Optional[_Iterable[_Union[MemberResult, _Mapping]]] = ...) -> None: ...

class MemberResult(_message.Message):
    __slots__ = ("name", "outcome", "reason")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[MemberResult.Outcome]
        OUTCOME_DONE: _ClassVar[MemberResult.Outcome]
        OUTCOME_REFUSED: _ClassVar[MemberResult.Outcome]
    OUTCOME_UNSPECIFIED: MemberResult.Outcome
    OUTCOME_DONE: MemberResult.Outcome
    OUTCOME_REFUSED: MemberResult.Outcome
    NAME_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    outcome: MemberResult.Outcome
    reason: str
    def __init__(self, name: _Optional[str] = ..., outcome: _Optional[_Union[MemberResult.Outcome, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("state", "version", "env_id", "device", "run_dir", "metrics_address", "goal_env_steps", "goal_return", "row", "verdict", "trouble", "actors", "address", "rank", "ranks", "node", "algorithm", "learning")
    class RowEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TroubleEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENV_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GOAL_ENV_STEPS_FIELD_NUMBER: _ClassVar[int]
    GOAL_RETURN_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    ACTORS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    LEARNING_FIELD_NUMBER: _ClassVar[int]
    state: str
    version: str
    env_id: str
    device: str
    run_dir: str
    metrics_address: str
    goal_env_steps: int
    goal_return: float
    row: _containers.ScalarMap[str, float]
    verdict: Verdict
    trouble: _containers.ScalarMap[str, int]
    actors: _containers.RepeatedCompositeFieldContainer[ActorStatus]
    address: str
    rank: int
    ranks: int
    node: str
    algorithm: str
    learning: Learning
    def __init__(self, state: _Optional[str] = ..., version: _Optional[str] = ..., env_id: _Optional[str] = ..., device: _Optional[str] = ..., run_dir: _Optional[str] = ..., metrics_address: _Optional[str] = ..., goal_env_steps: _Optional[int] = ..., goal_return: _Optional[float] = ..., row: _Optional[_Mapping[str, float]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., trouble: _Optional[_Mapping[str, int]] = ..., actors: _Optional[_Iterable[_Union[ActorStatus, _Mapping]]] = ..., address: _Optional[str] = ..., rank: _Optional[int] = ..., ranks: _Optional[int] = ..., node: _Optional[str] = ..., algorithm: _Optional[str] = ..., learning: _Optional[_Union[Learning, _Mapping]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("bottleneck", "evidence", "change")
    BOTTLENECK_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    bottleneck: str
    evidence: str
    change: str
    def __init__(self, bottleneck: _Optional[str] = ..., evidence: _Optional[str] = ..., change: _Optional[str] = ...) -> None: ...

class Learning(_message.Message):
    __slots__ = ("verdict", "evidence", "change", "mood")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    MOOD_FIELD_NUMBER: _ClassVar[int]
    verdict: str
    evidence: str
    change: str
    mood: str
    def __init__(self, verdict: _Optional[str] = ..., evidence: _Optional[str] = ..., change: _Optional[str] = ..., mood: _Optional[str] = ...) -> None: ...

class ActorStatus(_message.Message):
    __slots__ = ("name", "session", "peer", "transport", "envs", "steps", "steps_per_second", "round_trip_seconds", "wait_fraction", "policy_lag", "reconnects", "connected_seconds", "silent_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ENVS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FRACTION_FIELD_NUMBER: _ClassVar[int]
    POLICY_LAG_FIELD_NUMBER: _ClassVar[int]
    RECONNECTS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    session: int
    peer: str
    transport: str
    envs: int
    steps: int
    steps_per_second: float
    round_trip_seconds: float
    wait_fraction: float
    policy_lag: int
    reconnects: int
    connected_seconds: float
    silent_seconds: float
    def __init__(self, name: _Optional[str] = ..., session: _Optional[int] = ..., peer: _Optional[str] = ..., transport: _Optional[str] = ..., envs: _Optional[int] = ..., steps: _Optional[int] = ..., steps_per_second: _Optional[float] = ..., round_trip_seconds: _Optional[float] = ..., wait_fraction: _Optional[float] = ..., policy_lag: _Optional[int] = ..., reconnects: _Optional[int] = ..., connected_seconds: _Optional[float] = ..., silent_seconds: _Optional[float] = ...) -> None: ...
