"""Messages survive the wire, and nothing a peer sends gets past `decode_*` unchecked."""

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from seedrl.errors import InvalidMessage, Mismatch, NotGranted, Refused
from seedrl.rows import RESET, TERMINATED, TRUNCATED, Rows
from seedrl.specs import DTYPES, ArraySpec, EnvSpec, discrete
from seedrl.status import ActorStatus, Learning, Mood, Status, Verdict
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire import codec
from seedrl.wire.control import (
    describe_request,
    parse_control_request,
    parse_control_response,
    serialize_control_request,
    serialize_control_response,
)
from seedrl.wire.framing import parse, serialize
from seedrl.wire.messages import (
    PROTOCOL_VERSION,
    Act,
    Command,
    Control,
    ControlRequest,
    Hello,
    MemberResult,
    Outcome,
    Ready,
    Report,
    StepParts,
)
from seedrl.wire.spaces import decode_spaces
from seedrl.wire.status import parse_status, serialize_status
from tests.fakes import make_job, make_spec
from tests.fuzz.decoder import examples, feed

NUM_ENVS = 8
SPEC = make_spec(shape=(3,), dtype="float32")

specs = st.builds(
    make_spec,
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from(DTYPES),
    num_actions=st.integers(2, 100),
)


def make_rows(n: int = 3, spec: EnvSpec = SPEC) -> Rows:
    return Rows(
        env_id=np.arange(n, dtype=np.int32)[::-1].copy(),
        observation=np.arange(n * np.prod(spec.observation.shape))
        .astype(spec.observation.dtype)
        .reshape(n, *spec.observation.shape),
        reward=np.linspace(-1, 1, n, dtype=np.float32),
        flags=np.array([0, TERMINATED, TRUNCATED, RESET, RESET | TERMINATED], np.uint8)[np.arange(n) % 5],
    )


def make_ready(shape: Any = (2,), dtype: str = "uint8", choices: Any = (3,)) -> pb.Ready:
    return pb.Ready(observation=[pb.Array(shape=shape, dtype=dtype)], action=[pb.Action(choices=choices)])


def leaf(name: str = "", shape: Any = (), dtype: str = "uint8") -> pb.Array:
    return pb.Array(name=name, shape=shape, dtype=dtype)


def ready_of(*observation: pb.Array, action: pb.Action | None = None) -> pb.Ready:
    return pb.Ready(observation=observation, action=[action or pb.Action(choices=[3])])


def make_step(n: int = 3, **changes: Any) -> StepParts:
    """A well-formed step as it arrives, but for the changes."""
    step: StepParts = through_the_wire(codec.encode_step(1, make_rows(n)))
    return step._replace(**changes)


def through_the_wire(message: Any) -> Any:
    if isinstance(message, StepParts):
        return parse(serialize(message))
    return type(message).FromString(message.SerializeToString())


@st.composite
def steps(draw: st.DrawFn) -> tuple[EnvSpec, Rows]:
    spec = draw(specs)
    n = draw(st.integers(1, NUM_ENVS))
    finite = {} if np.dtype(spec.observation.dtype).kind != "f" else {"allow_nan": False, "allow_infinity": False}
    elements = hnp.from_dtype(np.dtype(spec.observation.dtype), **finite)
    return spec, Rows(
        env_id=np.array(draw(st.permutations(range(NUM_ENVS)))[:n], np.int32),
        observation=draw(hnp.arrays(spec.observation.dtype, (n, *spec.observation.shape), elements=elements)),
        reward=draw(hnp.arrays(np.float32, n, elements=st.floats(width=32, allow_nan=False, allow_infinity=False))),
        flags=draw(hnp.arrays(np.uint8, n, elements=st.integers(0, 7))),
    )


@settings(deadline=None)
@given(step=steps(), request_id=st.integers(0, 2**64 - 1))
def test_step_roundtrip_gives_same_rows(step: tuple[EnvSpec, Rows], request_id: int) -> None:
    spec, rows = step
    received = through_the_wire(codec.encode_step(request_id, rows))
    assert received.request_id == request_id
    for seen, sent in zip(codec.decode_step(received, spec, NUM_ENVS), rows, strict=True):
        assert seen.dtype == sent.dtype
        np.testing.assert_array_equal(seen, sent)


@settings(deadline=None)
@given(spec=specs)
def test_ready_roundtrip_gives_same_spec(spec: EnvSpec) -> None:
    assert codec.parse_request(codec.serialize_request(Ready(spec))) == Ready(spec)


@settings(deadline=None)
@given(
    groups=st.integers(1, 8),
    group_size=st.integers(1, 512),
    session_id=st.integers(0, 2**64 - 1),
    seed=st.integers(0, 2**32 - 1),
    options=st.dictionaries(st.text(max_size=9), st.booleans() | st.integers() | st.text(max_size=9), max_size=3),
)
def test_welcome_roundtrip_gives_same_job(groups: int, group_size: int, **fields: Any) -> None:
    job = make_job(groups * group_size, group_size, env_id="Pong-v5", **fields)
    assert codec.parse_response(codec.serialize_response(job)) == job


@settings(deadline=None)
@given(action=hnp.arrays(np.int32, st.integers(0, 16)), request_id=st.integers(0, 2**64 - 1))
def test_act_roundtrip_gives_same_actions(action: np.ndarray, request_id: int) -> None:
    act = codec.parse_response(codec.serialize_response(codec.encode_act([request_id, 7], action)))
    assert isinstance(act, Act)
    assert act.request_id == [request_id, 7]
    np.testing.assert_array_equal(codec.decode_act(act, SPEC, len(action)), action)


def test_hello_control_and_report_roundtrip_keep_their_fields() -> None:
    hello = Hello("näme", "host/0", "instance", 2**64 - 1, "it broke")
    report = Report(5, 0.25, 1.5, requests=3, round_trip_seconds=0.5, cpu_seconds=2.0, reconnects=1)
    for request in (hello, report):
        assert codec.parse_request(codec.serialize_request(request)) == request
    for command in set(Command) - {Command.REDIRECT}:
        control = Control(command, "why")
        assert codec.parse_response(codec.serialize_response(control)) == control


def test_commands_have_the_names_and_numbers_of_the_protocol() -> None:
    assert {f"COMMAND_{command.name}": int(command) for command in Command} == dict(pb.Control.Command.items())


@pytest.mark.parametrize("wrong", [{"env_seconds": -1.0}, {"wait_seconds": math.nan}, {"cpu_seconds": math.inf}])
def test_decode_report_with_a_number_that_cannot_be_is_refused_by_name(wrong: dict[str, float]) -> None:
    data = codec.serialize_request(Report(**wrong))
    with pytest.raises(InvalidMessage, match=next(iter(wrong))):
        codec.parse_request(data)


@pytest.mark.parametrize("goal", [None, 18.0])
def test_status_roundtrip_keeps_everything(goal: float | None) -> None:
    actor = ActorStatus("näme", 3, "ipv4:1", "memory", 32, 10, 2.5, 0.01, 0.5, 4, 1, 60.0, 0.25)
    status = Status(
        *("running", "0.1", "Pong-v5", "cpu", "runs/x", "127.0.0.1:50051", "127.0.0.1:9464", 2**40),
        goal_return=goal,
        row={"seconds": 1.5, "cycle/env": 0.25},
        verdict=Verdict("env", "because", "do this"),
        learning=Learning("flat", "it is flat", "try this", Mood.bad),
        trouble={"rows dropped: session_ended": 2},
        actors=[actor, actor],
        algorithm="ppo (4 passes × 8 minibatches)",
    )
    assert parse_status(serialize_status(status)) == status


def test_encode_step_other_integer_width_and_strides_gives_wire_layout() -> None:
    rows = make_rows()
    odd = Rows(
        rows.env_id.astype(np.int64),
        np.asfortranarray(rows.observation),
        rows.reward.astype(np.float64),
        np.repeat(rows.flags, 2)[::2],
    )
    assert serialize(codec.encode_step(1, odd)) == serialize(codec.encode_step(1, rows))


def test_decode_step_rows_are_views_of_the_message() -> None:
    data = serialize(codec.encode_step(1, make_rows()))
    step = parse(data)
    assert isinstance(step, StepParts)
    for array in codec.decode_step(step, SPEC, NUM_ENVS):
        assert np.shares_memory(array, np.frombuffer(data, np.uint8))


def make_welcome(**fields: Any) -> pb.Welcome:
    return pb.Welcome(protocol_version=PROTOCOL_VERSION, **fields)


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


@pytest.mark.parametrize(
    ("changes", "error", "field", "expected", "seen"),
    [
        ({"flags": b""}, InvalidMessage, "flags", "1 to 8 rows", "saw 0"),
        ({"flags": bytes(9)}, InvalidMessage, "flags", "1 to 8 rows", "saw 9"),
        ({"flags": b"\0\0\x10"}, InvalidMessage, "flags", "a sum of 1, 2, 4 and 8", "saw 16"),
        ({"env_id": ints(0, 1)}, InvalidMessage, "env_id", "12 bytes (3 rows of int32)", "saw 8"),
        ({"env_id": b""}, InvalidMessage, "env_id", "12 bytes", "saw 0"),
        ({"env_id": ints(0, 1, 8)}, NotGranted, "env_id", "0 to 7", "saw 8"),
        ({"env_id": ints(0, -1, 1)}, NotGranted, "env_id", "0 to 7", "saw -1"),
        ({"env_id": ints(0, -5, 9)}, NotGranted, "env_id", "0 to 7", "saw -5"),
        ({"reward": floats(0) + b"\0"}, InvalidMessage, "reward", "12 bytes (3 rows of float32)", "saw 5"),
        ({"reward": floats(0, np.nan, 0)}, InvalidMessage, "reward", "finite", "row 1"),
        ({"reward": floats(0, 0, np.inf)}, InvalidMessage, "reward", "finite", "row 2"),
        ({"reward": floats(np.inf, -np.inf, 0)}, InvalidMessage, "reward", "finite", "row 0"),
        ({"observation": [floats(0, 1)]}, InvalidMessage, "observation", "36 bytes (3 rows of float32[3])", "saw 8"),
        ({"observation": [b""]}, InvalidMessage, "observation", "36 bytes", "saw 0"),
        ({"observation": []}, InvalidMessage, "observation", "1 blobs", "saw 0"),
        ({"observation": [floats(*[0] * 8, np.nan)]}, InvalidMessage, "observation", "finite", "row 2"),
        ({"observation": [floats(*[0] * 3, -np.inf, *[0] * 5)]}, InvalidMessage, "observation", "finite", "row 1"),
    ],
)
def test_decode_step_malformed_names_field_expected_and_seen(
    changes: dict[str, Any], error: type[Refused], field: str, expected: str, seen: str
) -> None:
    with pytest.raises(error) as caught:
        codec.decode_step(make_step(**changes), SPEC, NUM_ENVS)
    message = str(caught.value)
    assert message.startswith(f"{field}: expected ")
    assert expected in message
    assert seen in message


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_decode_step_finite_numbers_with_overflowing_sum_are_accepted(dtype: str) -> None:
    spec = make_spec(shape=(3,), dtype=dtype)
    rows = make_rows(spec=spec)
    rows.observation[:] = np.finfo(dtype).max
    rows.reward[:] = np.finfo(np.float32).max
    decoded = codec.decode_step(through_the_wire(codec.encode_step(1, rows)), spec, NUM_ENVS)
    np.testing.assert_array_equal(decoded.observation, rows.observation)
    np.testing.assert_array_equal(decoded.reward, rows.reward)


BOUNDS = codec.Bounds(observation=1e6, reward=100.0)


@pytest.mark.parametrize(
    ("dtype", "field", "value", "words"),
    [
        ("float32", "reward", 3e38, "between -100 and 100, saw one of size 3e+38 in row 1; serving.max_reward on"),
        ("float32", "reward", -101.0, "between -100 and 100, saw one of size 101 in row 1; serving.max_reward on"),
        ("float32", "observation", 1e20, "between -1e+06 and 1e+06, saw one of size 1e+20 in row 1; serving.max_obs"),
        ("float64", "observation", -1e200, "saw one of size 1e+200 in row 1"),
        ("int64", "observation", -(2**63), "saw one of size 9.22337e+18 in row 1"),
        ("int32", "observation", 2**31 - 1, "saw one of size 2.14748e+09 in row 1"),
    ],
)
def test_decode_step_absurd_but_finite_number_is_refused_with_the_setting(
    dtype: str, field: str, value: float, words: str
) -> None:
    spec = make_spec(shape=(3,), dtype=dtype)
    rows = make_rows(spec=spec)
    getattr(rows, field)[1] = value
    step = through_the_wire(codec.encode_step(1, rows))
    with pytest.raises(InvalidMessage) as caught:
        codec.decode_step(step, spec, NUM_ENVS, bounds=BOUNDS)
    assert str(caught.value).startswith(f"{field}: expected numbers")
    assert words in str(caught.value)
    codec.decode_step(step, spec, NUM_ENVS)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64", "uint8"])
def test_decode_step_numbers_at_the_bounds_are_accepted(dtype: str) -> None:
    spec = make_spec(shape=(300,), dtype=dtype)
    rows = make_rows(spec=spec)
    largest = float(np.finfo(dtype).max) if np.dtype(dtype).kind == "f" else np.iinfo(dtype).max
    rows.observation[:] = min(largest, BOUNDS.observation)
    rows.reward[:] = -BOUNDS.reward
    codec.decode_step(through_the_wire(codec.encode_step(1, rows)), spec, NUM_ENVS, bounds=BOUNDS)


@pytest.mark.parametrize(
    ("ready", "field"),
    [
        (make_ready(shape=[2], dtype="object"), "observation.dtype"),
        (make_ready(shape=[2], dtype=""), "observation.dtype"),
        (make_ready(shape=[2, 0]), "observation.shape"),
        (make_ready(shape=[1] * 9), "observation.shape"),
        (make_ready(choices=[1]), "action.choices"),
        (
            pb.Ready(observation=[pb.Array(dtype="uint8")], action=[pb.Action(choices=[2], low=[0], high=[1])]),
            "action.choices",
        ),
        (pb.Ready(), "observation"),
        (ready_of(*(leaf(f"{number:02}") for number in range(65))), "observation"),
        (ready_of(leaf("b"), leaf("a")), "observation.name"),
        (ready_of(leaf("a"), leaf("a")), "observation.name"),
        (ready_of(leaf("\U00010000"), leaf("\uff5e")), "observation.name"),
        (ready_of(leaf(129 * "x")), "observation.name"),
        (ready_of(leaf(""), leaf("a")), "observation.name"),
        (ready_of(leaf("a\n")), "observation.name"),
        (make_ready(choices=[65_537]), "action.choices"),
        (ready_of(leaf("x"), action=pb.Action(shape=[2], choices=[65_535, 2])), "action"),
        (ready_of(leaf("action_mask", [2])), "observation.action_mask"),
        (ready_of(leaf("action_mask", [3], "float32")), "observation.action_mask"),
        (ready_of(leaf("a/action_mask", [4]), leaf("action_mask", [3])), "observation.action_mask"),
    ],
)
def test_decode_ready_malformed_names_field(ready: pb.Ready, field: str) -> None:
    with pytest.raises(InvalidMessage, match=rf"^{re.escape(field)}: expected .*, saw "):
        decode_spaces(ready)


@pytest.mark.parametrize(
    "ready",
    [
        ready_of(*(leaf(f"{number:02}") for number in range(64))),
        ready_of(leaf(128 * "x")),
        ready_of(leaf("\uff5e"), leaf("\U00010000")),  # by code points; JavaScript would have them the other way round
        make_ready(choices=[65_536]),
        ready_of(leaf("x"), action=pb.Action(shape=[32_768], low=[0.0] * 32_768, high=[1.0] * 32_768)),
        ready_of(leaf("action_mask", [3], "bool")),
        ready_of(leaf("action_mask", [3]), leaf("b/action_mask", [7], "float32")),  # only the first is the mask
    ],
)
def test_decode_ready_at_the_limits_is_accepted(ready: pb.Ready) -> None:
    spec = decode_spaces(ready)
    assert spec.mask in (None, "action_mask")


def test_decode_ready_with_too_many_continuous_entries_says_how_they_count() -> None:
    count = 32_768
    actions = [pb.Action(name="a", choices=[2]), pb.Action(name="b", shape=[count], low=count * [0], high=count * [1])]
    with pytest.raises(InvalidMessage, match=r"a continuous entry counted as two, saw 2 choices and 32768 continuous"):
        decode_spaces(pb.Ready(observation=[leaf()], action=actions))


@pytest.mark.parametrize(
    ("welcome", "field"),
    [
        (make_welcome(env=pb.Env(options_json="[]"), num_envs=2, group_size=1), "env.options_json"),
        (make_welcome(env=pb.Env(options_json="{"), num_envs=2, group_size=1), "env.options_json"),
        (make_welcome(env=pb.Env(options_json="[" * 100_000), num_envs=2, group_size=1), "env.options_json"),
        (make_welcome(num_envs=3, group_size=2), "group_size"),
        (make_welcome(num_envs=3, group_size=0), "group_size"),
        (make_welcome(num_envs=0, group_size=1), "num_envs"),
    ],
)
def test_decode_welcome_malformed_names_field(welcome: pb.Welcome, field: str) -> None:
    with pytest.raises(InvalidMessage, match=rf"^{field}: expected .*, saw "):
        codec.decode_welcome(welcome)


@pytest.mark.parametrize("address", ["10.0.0.1:50051", "learner-1.example:1", "[fe80::1]:50051", "unix:/run/a"])
def test_redirect_survives_the_wire(address: str) -> None:
    redirect = Control(Command.REDIRECT, "why", address)
    assert codec.parse_response(codec.serialize_response(redirect)) == redirect


@pytest.mark.parametrize(
    "address",
    [
        *("", "host", "host:", ":1", "host:1:2", "a b:1", "a,b:1", "host:1\n", "h" * 300 + ":1", "host:123456"),
        *("dns:///host:1", "dns://8.8.8.8/host:1", "dns:1", "xds:///a:1", "XDS:1", "ipv4:1.2.3.4:5", "vsock:1:2"),
        *("unix:relative", "unix:1", "unix-abstract:1"),
    ],
)
def test_decode_redirect_of_what_is_no_address_says_so(address: str) -> None:
    with pytest.raises(InvalidMessage, match=r"^address: expected HOST:PORT or unix:PATH, saw "):
        codec.parse_response(codec.serialize_response(Control(Command.REDIRECT, "why", address)))


def test_order_to_move_all_or_to_open_survives_the_wire() -> None:
    for order, words in (
        (ControlRequest(command=Command.REDIRECT, open=False), "move, take no new actors"),
        (ControlRequest("a", command=Command.REDIRECT), "move"),
        (ControlRequest(open=True), "open"),
    ):
        assert parse_control_request(serialize_control_request(order)) == order
        assert describe_request(order) == words


def test_results_of_a_request_survive_the_wire() -> None:
    results = [MemberResult("a"), MemberResult("b", Outcome.refused, "no room")]
    assert parse_control_response(serialize_control_response(results)) == results


def test_decode_hello_and_welcome_of_another_version_name_both_sides() -> None:
    """B6."""
    with pytest.raises(Mismatch, match=r"^protocol_version: this learner has 3, the actor 7; install the same"):
        codec.decode_hello(pb.Hello(protocol_version=7))
    with pytest.raises(Mismatch, match=r"^protocol_version: this actor has 3, the learner 0; install the same"):
        codec.decode_welcome(pb.Welcome(num_envs=1, group_size=1))


def test_decode_hello_words_for_people_are_short_and_printable() -> None:
    long = "\x1b[2J\n" + "x" * 1000
    greeting = codec.decode_hello(pb.Hello(protocol_version=PROTOCOL_VERSION, actor_name=long, env_failure=long))
    assert greeting.name == "?[2J?" + "x" * (codec.MAX_NAME - 5)
    assert greeting.env_failure == "?[2J?" + "x" * (codec.MAX_REASON - 5)


def test_decode_hello_instance_that_is_no_id_is_refused_by_name() -> None:
    with pytest.raises(InvalidMessage, match=r"^instance: expected at most 64 characters, saw 65"):
        codec.decode_hello(pb.Hello(protocol_version=PROTOCOL_VERSION, instance=65 * "x"))


def test_decode_hello_host_that_is_too_long_is_refused_by_name() -> None:
    with pytest.raises(InvalidMessage, match=r"^host: expected at most 128 characters, saw 129"):
        codec.decode_hello(pb.Hello(protocol_version=PROTOCOL_VERSION, host=129 * "x"))


def test_hello_with_a_long_failure_is_shortened_by_the_actor() -> None:
    """A traceback of any length has to fit the limit of Hello."""
    hello = codec.parse_request(codec.serialize_request(Hello("a", env_failure=100_000 * "x")))
    assert hello == Hello("a", env_failure=codec.MAX_REASON * "x")


@pytest.mark.parametrize(("values", "seen"), [([0, 5, -1], -1), ([0, 6, 2], 6), ([-3, 9, 0], -3)])
def test_decode_step_with_a_category_outside_names_the_offending_one(values: list[int], seen: int) -> None:
    spec = EnvSpec(ArraySpec((), "int64", 6), discrete(3))
    rows = make_rows(3)._replace(observation=np.array(values))
    with pytest.raises(InvalidMessage, match=rf"^observation: expected categories 0 to 5, saw {seen}$"):
        codec.decode_step(through_the_wire(codec.encode_step(1, rows)), spec, NUM_ENVS)


def test_decode_act_wrong_length_names_field() -> None:
    with pytest.raises(InvalidMessage, match=r"^action: expected 8 bytes \(2 rows of int32\), saw 12"):
        codec.decode_act(Act([1], [ints(0, 1, 2)]), SPEC, rows=2)


BLOBS = ("env_id", "observation", "reward", "flags")


@settings(deadline=None, max_examples=300)
@given(
    n=st.integers(1, 4),
    changes=st.dictionaries(st.sampled_from(BLOBS), st.binary(max_size=64), min_size=1),
    flips=st.lists(st.tuples(st.sampled_from(BLOBS), st.integers(0, 63), st.integers(1, 255)), max_size=3),
    replace=st.booleans(),
)
def test_decode_step_random_bytes_raises_only_refused(
    n: int, changes: dict[str, bytes], flips: list[tuple[str, int, int]], replace: bool
) -> None:
    def as_sent(field: str, blob: bytes) -> Any:
        return [blob] if field == "observation" else blob

    changed = {field: as_sent(field, blob) for field, blob in changes.items()} if replace else {}
    step = make_step(n, **changed)
    for field, position, mask in flips:  # single bytes: lengths stay right, so the deeper checks are reached
        value = getattr(step, field)
        blob = bytearray(value[0] if field == "observation" else value)
        if position < len(blob):
            blob[position] ^= mask
            step = step._replace(**{field: as_sent(field, bytes(blob))})
    try:
        rows = codec.decode_step(step, SPEC, NUM_ENVS)
    except Refused:
        return
    assert ((rows.env_id >= 0) & (rows.env_id < NUM_ENVS)).all()
    assert (rows.flags <= 7).all()
    assert np.isfinite(rows.reward).all()
    assert np.isfinite(rows.observation).all()


@settings(deadline=None, max_examples=200)
@given(blob=st.binary(max_size=64), text=st.text(max_size=20), numbers=st.lists(st.integers(0, 2**32 - 1), max_size=10))
def test_decode_others_random_fields_raises_only_refused(blob: bytes, text: str, numbers: list[int]) -> None:
    first, last = (numbers[0], numbers[-1]) if numbers else (0, 0)
    attempts = [
        lambda: decode_spaces(make_ready(shape=numbers, dtype=text, choices=[first])),
        lambda: decode_spaces(make_ready(shape=numbers, choices=[last])),
        lambda: codec.decode_welcome(make_welcome(env=pb.Env(options_json=text), num_envs=first, group_size=last)),
        lambda: codec.decode_act(Act([1], [blob]), SPEC, rows=len(numbers)),
    ]
    for attempt in attempts:
        try:
            decoded = attempt()
        except Refused:
            continue
        assert decoded is not None


@settings(deadline=None, max_examples=500)
@given(
    example=st.sampled_from(examples()),
    cuts=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 8), st.binary(max_size=8)), max_size=4),
)
def test_decode_anything_near_a_good_message_raises_only_refused(
    example: bytes, cuts: list[tuple[int, int, bytes]]
) -> None:
    """B5: as tests/fuzz does a million times."""
    data = example
    for at, length, replacement in cuts:
        data = data[:at] + replacement + data[at + length :]
    feed(data)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_decode_any_bytes_raises_only_refused(data: bytes) -> None:
    """B5."""
    feed(data)


def test_spec_printed_reads_as_a_type() -> None:
    assert str(EnvSpec(ArraySpec((1, 84, 84), "uint8"), discrete(6))) == "observation uint8[1, 84, 84], 6 actions"
