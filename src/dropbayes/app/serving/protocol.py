"""Messages of the Open Inference Protocol, version 2: tensors from requests, and predictions as responses.

Numbers travel as JSON or, as Triton's clients send them, as raw little-endian bytes behind the JSON (the extension
"binary_tensor_data", with the length of the JSON in the header `Inference-Header-Content-Length`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from dropbayes.runtime.arrays import NumpyArray

__all__ = [
    "DATATYPES", "EXTENSIONS", "HEADER_LENGTH", "InferenceRequest", "Parameters", "RequestError", "datatype_of",
    "decode_request", "encode_response", "tensors",
]  # fmt: skip

HEADER_LENGTH = "inference-header-content-length"
EXTENSIONS = ("binary_tensor_data",)

DATATYPES: dict[str, Any] = {
    "BOOL": np.dtype("?"), "UINT8": np.dtype("<u1"), "UINT16": np.dtype("<u2"), "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"), "INT8": np.dtype("<i1"), "INT16": np.dtype("<i2"), "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"), "FP16": np.dtype("<f2"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}  # fmt: skip
"""The datatypes of the protocol, as arrays hold them; BYTES are texts in UTF-8."""

_ELEMENT: dict[str, type] = {"b": bool, "u": int, "i": int, "f": float, "O": str}  # by the kind of the dtype
_MOST_AXES = 2
_MOST_INPUTS = 10_000


class RequestError(Exception):
    """A request that is refused, with the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Parameters(msgspec.Struct, forbid_unknown_fields=True):
    """What a request may ask for besides its outputs."""

    n_draws: int | None = None
    seed: int | None = None
    interval: float | None = None
    defer_above: float | None = None
    binary_data_output: bool = False


class InputTensor(msgspec.Struct, forbid_unknown_fields=True):
    """One input: its data as JSON, or the number of its bytes after the JSON."""

    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, Any] = {}


class OutputRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One output that is asked for."""

    name: str
    parameters: dict[str, Any] = {}


class InferenceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to predict; without `outputs` it is answered with all of them."""

    inputs: list[InputTensor]
    id: str | None = None
    parameters: Parameters = msgspec.field(default_factory=Parameters)
    outputs: list[OutputRequest] = []


_request_decoder = msgspec.json.Decoder(InferenceRequest)
_encoder = msgspec.json.Encoder()


# --- requests ------------------------------------------------------------------------------------------------------


def decode_request(body: bytes, header_length: str | None) -> tuple[InferenceRequest, bytes]:
    """The request in a body, and the bytes after its JSON.

    Args:
        body: The whole body.
        header_length: The value of the header `Inference-Header-Content-Length`, if the request has one.

    Raises:
        RequestError: The body is no request of this protocol.
    """
    end = len(body)
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit() and int(header_length) <= end):
            raise RequestError(400, f"{HEADER_LENGTH} must be at most the length of the body, {end}.")
        end = int(header_length)
    try:
        request = _request_decoder.decode(memoryview(body)[:end])
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise RequestError(400, f"the body is no inference request: {_reason(error)}") from None
    return request, body[end:]


def tensors(request: InferenceRequest, binary: bytes, *, max_rows: int) -> dict[str, NumpyArray]:
    """The inputs of a request by name, each shaped `[row]` or `[row, column]`.

    Args:
        request: The request.
        binary: The bytes after its JSON.
        max_rows: The most rows of an input.

    Raises:
        RequestError: An input is not what it says, or too long.
    """
    if not 0 < len(request.inputs) <= _MOST_INPUTS:
        raise RequestError(400, f"`inputs` must hold 1 to {_MOST_INPUTS} tensors; got {len(request.inputs)}.")
    arrays: dict[str, NumpyArray] = {}
    start = 0
    for entry in request.inputs:
        if entry.name in arrays:
            raise RequestError(400, f"input {_quote(entry.name)} is given twice.")
        _check_shape(entry, max_rows)
        size = entry.parameters.get("binary_data_size")
        if size is None:
            arrays[entry.name] = _json_tensor(entry)
            continue
        if entry.data is not msgspec.UNSET or isinstance(size, bool) or not isinstance(size, int):
            raise _input_error(entry, "must have either `data` or a whole number `binary_data_size`")
        if not 0 <= size <= len(binary) - start:
            raise _input_error(entry, f"claims {size} bytes behind the JSON, where {len(binary) - start} are left")
        arrays[entry.name] = _binary_tensor(entry, binary[start : start + size])
        start += size
    if start != len(binary):
        raise RequestError(400, f"{len(binary) - start} bytes behind the JSON belong to no input.")
    return arrays


def _check_shape(entry: InputTensor, max_rows: int) -> None:
    if entry.datatype not in DATATYPES:
        raise _input_error(entry, f"has the datatype {_quote(entry.datatype)}; known are {', '.join(DATATYPES)}")
    if not 1 <= len(entry.shape) <= _MOST_AXES or any(size < 0 for size in entry.shape):
        raise _input_error(entry, f"must be shaped [rows] or [rows, columns]; got {entry.shape[:4]}")
    if entry.shape[0] > max_rows:
        raise RequestError(413, f"input {_quote(entry.name)} has {entry.shape[0]} rows; at most {max_rows} are taken.")


def _json_tensor(entry: InputTensor) -> NumpyArray:
    """JSON data, flat or nested, validated against the declared type and size."""
    if entry.data is msgspec.UNSET:
        raise _input_error(entry, "has no `data`")
    dtype = DATATYPES[entry.datatype]
    if dtype == np.float16:
        raise _input_error(entry, "is FP16, which JSON cannot hold; send FP32, or raw bytes")
    element = _ELEMENT[dtype.kind]
    values = (
        _decode_data(entry, element, nested=False) if len(entry.shape) == 1 else _decode_nested_or_flat(entry, element)
    )
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype=dtype)
    except (ValueError, OverflowError, TypeError):
        raise _input_error(entry, f"has values that are no {entry.datatype}, or rows of unequal length") from None
    if array.size != math.prod(entry.shape) or (array.ndim > 1 and list(array.shape) != entry.shape):
        raise _input_error(
            entry, f"has {array.size} values, where the shape {entry.shape} needs {math.prod(entry.shape)}"
        )
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise _input_error(entry, f"has a number too large for {entry.datatype}")
    return array.reshape(entry.shape)


def _decode_nested_or_flat(entry: InputTensor, element: type) -> Any:
    try:
        return _decode_data(entry, element, nested=False)
    except RequestError:
        return _decode_data(entry, element, nested=True)


def _decode_data(entry: InputTensor, element: type, *, nested: bool) -> Any:
    assert isinstance(entry.data, msgspec.Raw)
    try:
        return _list_decoder(element, nested).decode(entry.data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise _input_error(entry, f"has data that are no {entry.datatype}: {_reason(error)}") from None


@functools.cache
def _list_decoder(element: Any, nested: bool) -> Any:
    return msgspec.json.Decoder(list[list[element]] if nested else list[element])


def _binary_tensor(entry: InputTensor, data: bytes) -> NumpyArray:
    dtype, count = DATATYPES[entry.datatype], math.prod(entry.shape)
    if dtype.kind == "O":
        array = np.array([*_texts(entry, data), None], dtype=object)[:-1]  # the last keeps numpy from guessing
    elif len(data) % dtype.itemsize:
        raise _input_error(entry, f"has {len(data)} bytes, no multiple of the {dtype.itemsize} of {entry.datatype}")
    else:
        array = np.frombuffer(data, dtype)
    if array.size != count:
        raise _input_error(entry, f"has {array.size} values, where the shape {entry.shape} needs {count}")
    return array.reshape(entry.shape)


def _texts(entry: InputTensor, data: bytes) -> list[str]:
    """Texts, each preceded by its length in four bytes."""
    texts, start = [], 0
    while start < len(data):
        length = int.from_bytes(data[start : start + 4], "little")
        if start + 4 + length > len(data):
            raise _input_error(entry, "ends inside a text")
        try:
            texts.append(data[start + 4 : start + 4 + length].decode())
        except UnicodeDecodeError:
            raise _input_error(entry, "holds a text that is no UTF-8") from None
        start += 4 + length
    return texts


def _input_error(entry: InputTensor, what: str) -> RequestError:
    return RequestError(400, f"input {_quote(entry.name)} {what}.")


def _quote(text: str) -> str:
    """A name for a message: short, and without characters that JSON could not carry."""
    return repr(text if len(text) <= 40 else text[:39] + "…").encode("ascii", "backslashreplace").decode()


def _reason(error: Exception) -> str:
    return "nested too deeply." if isinstance(error, RecursionError) else f"{str(error).splitlines()[0][:200]}."


# --- responses -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoded:
    """The body of a response, and the length of its JSON where raw bytes follow it."""

    body: bytes
    header_length: int | None = None


def datatype_of(array: NumpyArray) -> str:
    """The protocol's name for an array's type."""
    if array.dtype.kind in "OUS":
        return "BYTES"
    return {"b": "BOOL", "f": "FP64", "i": "INT64"}[array.dtype.kind]


def encode_response(
    head: Mapping[str, Any], outputs: Mapping[str, NumpyArray], *, binary: Sequence[str] | frozenset[str] = ()
) -> Encoded:
    """A response with the named outputs; those in `binary` as raw bytes after the JSON."""
    entries: list[dict[str, Any]] = []
    behind: list[bytes] = []
    for name, array in outputs.items():
        entry: dict[str, Any] = {"name": name, "datatype": datatype_of(array), "shape": list(array.shape)}
        if name in binary:
            behind.append(_raw(array))
            entry["parameters"] = {"binary_data_size": len(behind[-1])}
        else:
            entry["data"] = [str(v) for v in array.ravel()] if array.dtype.kind in "OUS" else array.ravel().tolist()
        entries.append(entry)
    text = _encoder.encode({**head, "outputs": entries})
    return Encoded(b"".join([text, *behind]), len(text)) if behind else Encoded(text)


def _raw(array: NumpyArray) -> bytes:
    if array.dtype.kind in "OUS":
        texts = [str(value).encode() for value in array.ravel()]
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return np.ascontiguousarray(array, DATATYPES[datatype_of(array)]).tobytes()
