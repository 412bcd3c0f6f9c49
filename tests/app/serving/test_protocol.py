"""Tensors of the protocol: what is declared is what is read, and everything else is refused."""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("msgspec", reason="the extra `serve` is not installed")

from starlette.exceptions import HTTPException

from dropbayes.app.serving import protocol
from dropbayes.app.serving.protocol import InferenceRequest, Parameters, decode_request, response, tensors


def read(inputs, binary=b"", max_rows=100, n_columns=2):
    text = json.dumps({"inputs": inputs}).encode()
    request, behind = decode_request(text + binary, str(len(text)))
    return tensors(request, behind, max_rows=max_rows, n_columns=n_columns)


def entry(datatype, data, shape, name="a"):
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20))
def test_numbers_come_back_bit_for_bit(values):
    assert read([entry("FP64", values, [len(values)])])["a"].tolist() == values
    body = response(InferenceRequest(inputs=[]), {}, {"a": np.array(values, dtype=float)}).body
    assert json.loads(body)["outputs"][0]["data"] == values


def test_nested_and_flat_data_are_the_same_tensor():
    flat, nested = entry("INT32", [1, 2, 3, 4], [2, 2]), entry("INT32", [[1, 2], [3, 4]], [2, 2])
    assert read([flat])["a"].tolist() == read([nested])["a"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("datatype", [name for name in protocol.DATATYPES if name != "BYTES"])
def test_raw_bytes_are_read_little_endian(datatype):
    values = np.array([0, 1, 1], protocol.DATATYPES[datatype])
    raw = {"name": "a", "shape": [3], "datatype": datatype, "parameters": {"binary_data_size": values.nbytes}}
    assert read([raw], values.tobytes())["a"].tolist() == values.tolist()


def test_texts_travel_behind_their_lengths_and_in_order():
    texts = np.array(["Oslo", "", "Åre"], dtype=object)
    asked = InferenceRequest(inputs=[], parameters=Parameters(binary_data_output=True))
    answer = response(asked, {}, {"a": texts, "b": np.array([1.5])})
    body, length = answer.body, int(answer.headers[protocol.HEADER_LENGTH])
    head, behind = body[:length], body[length:]
    inputs = json.loads(head)["outputs"]
    found = read(inputs, behind)
    assert found["a"].tolist() == texts.tolist() and found["b"].tolist() == [1.5]


@pytest.mark.parametrize("datatype", ["FP64", "FP32", "INT8", "BOOL", "BYTES"])
def test_null_is_a_missing_value_of_any_type(datatype):
    value = "a" if datatype == "BYTES" else 1
    found = read([entry(datatype, [True if datatype == "BOOL" else value, None], [2])])["a"].tolist()
    assert found[0] == value and (found[1] is None or found[1] != found[1])


@pytest.mark.parametrize(
    "data", [b"[[],[],", b"[1,1,", b'["","",', b"[null,"], ids=["lists", "numbers", "texts", "null"]
)
def test_data_of_another_size_are_refused_before_they_fill_the_memory(data):
    first, _, rest = data.partition(b",")
    text = first + b"," + (rest or first[1:] + b",") * 100_000 + (rest or first[1:] + b",").rstrip(b",") + b"]"
    datatype, shape = ("BYTES", [2, 2]) if data[:2] == b"[[" else ("FP64", [3])
    body = b'{"inputs":[{"name":"a","shape":%s,"datatype":"%s","data":%s}]}' % (
        json.dumps(shape).encode(), datatype.encode(), text,
    )  # fmt: skip
    tracemalloc.start()
    with pytest.raises(HTTPException):
        tensors(*decode_request(body, None), max_rows=100, n_columns=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * len(body)


REFUSED = {
    "not a number": ([entry("FP64", ["1.5"], [1])], 400, "no FP64"),
    "a truth for a number": ([entry("INT64", [True], [1])], 400, "no INT64"),
    "too few values": ([entry("FP64", [1.0], [2])], 400, "has 1 values, where the shape [2] needs 2"),
    "ragged rows": ([entry("FP64", [[1.0], [1.0, 2.0]], [2, 1])], 400, "has 3 values"),
    "another shape": ([entry("FP64", [[1.0, 2.0]], [2, 1])], 400, "length <= 1"),
    "too large for its type": ([entry("INT8", [300], [1])], 400, "no INT8"),
    "too large a single": ([entry("FP32", [1e300], [1])], 400, "too large for FP32"),
    "half precision as text": ([entry("FP16", [1.0], [1])], 400, "FP16"),
    "a missing number too large": ([entry("INT8", [300, None], [2])], 400, "no INT8"),
    "unknown type": ([entry("FP128", [1.0], [1])], 400, "known are BOOL"),
    "three axes": ([entry("FP64", [1.0], [1, 1, 1])], 400, "[rows] or [rows, 2]"),
    "a negative axis": ([entry("FP64", [], [-1])], 400, "[rows] or [rows, 2]"),
    "too many rows": ([entry("FP64", [], [101])], 413, "at most 100"),
    "a name twice": ([entry("FP64", [1.0], [1])] * 2, 400, "given twice"),
    "no data": ([{"name": "a", "shape": [1], "datatype": "FP64"}], 400, "has no `data`"),
    "no inputs": ([], 400, "length >= 1"),
    "an unknown field": ([{**entry("FP64", [1.0], [1]), "colour": 1}], 400, "colour"),
    "bytes that are not there": ([{"name": "a", "shape": [1], "datatype": "FP64", "parameters": {"binary_data_size": 8}}], 400, "claims 8 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_a_tensor_is_refused_with_its_reason(case):
    inputs, status, message = REFUSED[case]
    with pytest.raises(HTTPException) as error:
        read(inputs)
    assert error.value.status_code == status and message in str(error.value)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"inputs": 1}', b"\xff\xfe", b'{"inputs":[NaN]}', b"[" * 100_000, b'{"inputs":[],"x":1e999}'],
    ids=lambda body: repr(body[:12]),
)  # fmt: skip
def test_what_is_no_request_is_refused(body):
    with pytest.raises(HTTPException, match="no inference request"):
        decode_request(body, None)


@pytest.mark.parametrize("length", ["-1", "x", "999", "1.0", "²", "9" * 5000])
def test_an_impossible_length_of_the_json_is_refused(length):
    with pytest.raises(HTTPException, match="must be at most"):
        decode_request(b"{}", length)


def test_bytes_that_belong_to_nothing_are_refused():
    with pytest.raises(HTTPException, match="3 bytes behind the JSON belong to no input"):
        read([entry("FP64", [1.0], [1])], b"abc")


@pytest.mark.parametrize("data", [b"\x05\x00\x00\x00ab", b"\x02\x00\x00\x00\xff\xff", b"\x01"])
def test_raw_texts_that_are_cut_or_no_utf8_are_refused(data):
    raw = {"name": "a", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}
    with pytest.raises(HTTPException):
        read([raw], data)
