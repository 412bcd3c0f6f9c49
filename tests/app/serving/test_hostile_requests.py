"""Generated requests, most of them wrong: each is answered with a status below 500, and the server stays as it was."""

import contextlib
import json
import re
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from dropbayes.app.serving.protocol import DATATYPES
from tests.app.serving.live import columns_request
from tests.app.serving.test_application import COLUMNS

INFER = "/v2/models/numbers/infer"
GOOD = columns_request(COLUMNS)

# --- what is sent --------------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec=None), max_size=8) | st.sampled_from(
    ["", "size", "x", "NaN", "\ud800", "\x00", "../"]
)
numbers = (
    st.integers() | st.floats() | st.sampled_from([0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**400, 1e308, 5e-324])
)
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(scalars, lambda s: st.lists(s, max_size=4) | st.dictionaries(texts, s, max_size=4), max_leaves=12)
shapes = st.lists(st.integers(-2, 4) | st.sampled_from([10**9, 2**40, 2**64]), max_size=4) | values
datatypes = st.sampled_from([*DATATYPES, "FP128", "fp64", ""]) | values
tensors = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["size", "city", "new", "x"]) | values,
        "shape": shapes,
        "datatype": datatypes,
        "data": st.lists(scalars, max_size=6) | values,
        "parameters": st.dictionaries(st.sampled_from(["binary_data_size", "other"]), values, max_size=2) | values,
    },
)
parameters = st.dictionaries(
    st.sampled_from(["n_draws", "seed", "coverage", "defer_above", "allow_new", "binary_data_output", "other"]),
    values,
    max_size=4,
)
outputs = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from(["mean", "std", "deferred", "?"]) | values}), max_size=3
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "inputs": st.lists(tensors, max_size=4) | values,
        "id": values,
        "parameters": parameters | values,
        "outputs": outputs | values,
        "more": values,
    },
)


@st.composite
def nearly_right(draw):
    """A request that the server would answer, with one thing in it replaced."""
    request = json.loads(json.dumps(GOOD))
    place = draw(st.sampled_from(["tensor", "parameters", "outputs", "id", "nothing"]))
    if place == "tensor":
        entry = draw(st.sampled_from(request["inputs"]))
        field = draw(st.sampled_from(["name", "shape", "datatype", "data"]))
        entry[field] = draw({"shape": shapes, "datatype": datatypes}.get(field, values))
    elif place != "nothing":
        request[place] = draw({"parameters": parameters, "outputs": outputs}.get(place, values))
    return request


def as_json(value):
    return json.dumps(value, ensure_ascii=True).encode()


@st.composite
def bodies(draw):
    body = as_json(draw(nearly_right() | requests | values))
    damage = draw(st.sampled_from(["none"] * 6 + ["cut", "flip", "encoding", "nesting", "twice", "noise", "digits"]))
    if damage == "cut":
        body = body[: draw(st.integers(0, len(body)))]
    elif damage == "flip" and body:
        place = draw(st.integers(0, len(body) - 1))
        body = body[:place] + bytes([draw(st.integers(0, 255))]) + body[place + 1 :]
    elif damage == "encoding":
        body = body.decode().encode(draw(st.sampled_from(["utf-16", "utf-32", "utf-8-sig"])))
    elif damage == "nesting":
        body = draw(st.sampled_from([b"[", b'{"inputs":', b'{"inputs":[{"data":'])) * draw(
            st.sampled_from([10, 1000, 5000])
        )
    elif damage == "twice":
        body = body[:-1] + b"," + body[1:] if len(body) > 2 else body
    elif damage == "noise":
        body = draw(st.binary(max_size=200))
    elif damage == "digits":
        body = body.replace(b"0.5", b"9" * draw(st.sampled_from([20, 400, 5000])))
    return body


@st.composite
def wires(draw):
    """The bytes of one request."""
    body = draw(bodies())
    method = draw(st.sampled_from(["POST"] * 8 + ["GET", "PUT", "HEAD", "OPTIONS", "BREW", ""]))
    path = draw(
        st.sampled_from(
            [INFER] * 12
            + ["/", "/v2", "/v2/models/%00/infer", "/metrics", "/" + "a" * 9000, "*", "x", "/v2/../..", "//"]
        )
    )
    length = draw(st.sampled_from([None] * 8 + [-1, 0, 1, len(body) + 5, 10**12, "x", "1,2"]))
    headers = [
        ("Host", draw(st.sampled_from(["localhost"] * 9 + ["here"]))),
        ("Connection", "close"),
        ("Content-Length", len(body) if length is None else length),
    ]
    headers += draw(st.lists(st.sampled_from([
        ("Transfer-Encoding", "chunked"), ("Content-Encoding", "gzip"), ("Inference-Header-Content-Length", "7"),
        ("Inference-Header-Content-Length", "-1"), ("Content-Length", "3"), ("Expect", "100-continue"),
        ("Authorization", "Bearer \xff"), ("X" * 300, "y" * 3000), ("Content-Type", "text/plain"), ("Upgrade", "websocket"),
        ("Connection", "upgrade"), ("bad header", "x"), ("Cookie", "a=b\x01"),
    ]), max_size=2))  # fmt: skip
    version = draw(st.sampled_from(["HTTP/1.1"] * 9 + ["HTTP/1.0", "HTTP/9.9", ""]))
    head = "".join([f"{method} {path} {version}\r\n", *(f"{name}: {value}\r\n" for name, value in headers), "\r\n"])
    return head.encode("latin-1", "replace") + body


def answer(server, wire):
    """The status of the server's answer; None where it closed the connection without one."""
    received = b""
    with (
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
        socket.create_connection((server.host, server.port), timeout=60) as connection,
    ):
        connection.sendall(wire)
        connection.shutdown(socket.SHUT_WR)
        while chunk := connection.recv(65536):
            received += chunk
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", received)
    return int(found[1]) if found else None


def check(server, wire):
    status = answer(server, wire)
    assert status is None or status < 500, (status, wire[:2000])


QUIET = [
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.large_base_example,
    HealthCheck.function_scoped_fixture,
]


@given(wire=wires())
@settings(max_examples=100, deadline=None, suppress_health_check=QUIET)
def test_generated_requests_are_answered_or_refused(server, wire):
    check(server, wire)


def test_the_server_is_as_it_was_afterwards(server):
    status, found = server.infer(GOOD)
    assert status == 200 and len(found["outputs"]) == 7


@pytest.mark.slow
def test_ten_thousand_generated_requests_leave_no_trace_in_memory(server):
    expected = server.infer(GOOD)
    statuses = []

    @given(wire=wires())
    @settings(max_examples=2000, deadline=None, suppress_health_check=QUIET, database=None)
    def send(wire):
        statuses.append(answer(server, wire))
        assert statuses[-1] is None or statuses[-1] < 500, wire[:2000]

    send()
    memory = server.memory
    for _ in range(4):
        send()
    assert len(statuses) >= 10_000 and {200, 400, 404, 405, 413} <= set(statuses)
    assert server.memory < 1.2 * memory + 20 * 2**20
    assert server.infer(GOOD) == expected
