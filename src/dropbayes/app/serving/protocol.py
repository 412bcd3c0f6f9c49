"""Messages of the Open Inference Protocol, version 2: tensors from requests, and predictions as responses.

Numbers travel as JSON or, as Triton's clients send them, as raw little-endian bytes behind the JSON (the extension
"binary_tensor_data", with the length of the JSON in the header `Inference-Header-Content-Length`).
"""

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, NoReturn

import msgspec
import numpy as np
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dropbayes.runtime.validation import NumpyArray, quote

HEADER_LENGTH = "inference-header-content-length"

DATATYPES = {f"{name}{8 * n}": np.dtype(f"<{k}{n}") for name, k in (("UINT", "u"), ("INT", "i")) for n in (1, 2, 4, 8)}
DATATYPES |= {f"FP{8 * n}": np.dtype(f"<f{n}") for n in (2, 4, 8)} | {"BOOL": np.dtype("?"), "BYTES": np.dtype("O")}
"""The datatypes of the protocol, as arrays hold them; BYTES are texts in UTF-8."""


class _Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An object without unknown fields: a typing error must not change an answer silently."""


class _Codec(_Strict):
    """How MLServer's codecs would decode a value; the datatype says as much."""

    content_type: str | None = None
    headers: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class Parameters(_Codec):
    n_draws: int | None = None
    seed: int | None = None
    coverage: float | None = None
    method: Literal["sampling", "linear", "moments"] | None = None
    defer_above: float | None = None
    allow_new: bool | None = None
    binary_data_output: bool = False


class InputParameters(_Codec):
    """The number of bytes of an input behind the JSON."""

    binary_data_size: int | None = None


class InputTensor(_Strict):
    """One input: its data as JSON, or the number of its bytes behind the JSON."""

    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    parameters: InputParameters = msgspec.field(default_factory=InputParameters)

    def refuse(self, what: str, status: int = 400) -> NoReturn:
        raise HTTPException(status, f"input {quote(self.name)} {what}.")


class OutputParameters(_Codec):
    """Whether an output is sent as raw bytes; by default as `binary_data_output` says."""

    binary_data: bool | None = None


class OutputRequest(_Strict):
    name: str
    parameters: OutputParameters = msgspec.field(default_factory=OutputParameters)


class InferenceRequest(_Strict):
    """A request to predict; without `outputs` it is answered with all of them."""

    inputs: Annotated[list[InputTensor], msgspec.Meta(min_length=1, max_length=10_000)]
    id: str | None = None
    model_name: str | None = None
    model_version: str | None = None
    parameters: Parameters = msgspec.field(default_factory=Parameters)
    outputs: list[OutputRequest] = []

    def check(self, name: str, version: str, outputs: Collection[str]) -> None:
        """Raises unless the request is for this model and some of these outputs."""
        if self.model_name not in (None, name) or self.model_version not in (None, version):
            rule = f"must be those of the path, {name} and {version}."
            raise HTTPException(400, f"`model_name` and `model_version` {rule}")
        for output in self.outputs:
            if output.name not in outputs:
                raise HTTPException(400, f"there is no output {quote(output.name)}; there are {', '.join(outputs)}.")
            if output.name == "deferred" and self.parameters.defer_above is None:
                raise HTTPException(400, "the output 'deferred' needs the parameter `defer_above`.")


def decode_json(body: bytes | memoryview, kind: Any, what: str) -> Any:
    """The message of some kind in JSON; an error begins with `what`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except RecursionError:
        raise HTTPException(400, f"{what}: nested too deeply.") from None
    except ValueError as error:  # msgspec's and Unicode's errors are ValueErrors
        raise HTTPException(400, f"{what}: {str(error).splitlines()[0][:200]}.") from None


def decode_request(body: bytes, header_length: str | None) -> tuple[InferenceRequest, bytes]:
    """The request in a body, and the bytes behind its JSON; `header_length` is the value of the header, if any."""
    end = len(body)
    if header_length is not None:
        is_number = header_length.isascii() and header_length.isdigit() and len(header_length) <= len(str(end))
        if not is_number or int(header_length) > end:
            raise HTTPException(400, f"{HEADER_LENGTH} must be at most the length of the body, {end}.")
        end = int(header_length)
    return decode_json(memoryview(body)[:end], InferenceRequest, "the body is no inference request"), body[end:]


def tensors(request: InferenceRequest, binary: bytes, *, max_rows: int, n_columns: int) -> dict[str, NumpyArray]:
    """The inputs of a request by name, each shaped `[row]` or `[row, column]`, from JSON or the bytes behind it."""
    arrays: dict[str, NumpyArray] = {}
    start = 0
    for entry in request.inputs:
        if entry.name in arrays:
            entry.refuse("is given twice")
        # The type and the size must be such as the model could read before a byte of the data is decoded.
        if entry.datatype not in DATATYPES:
            entry.refuse(f"has the datatype {quote(entry.datatype)}; known are {', '.join(sorted(DATATYPES))}")
        if not 1 <= len(entry.shape) <= 2 or entry.shape[0] < 0 or entry.shape[1:] not in ([], [1], [n_columns]):
            entry.refuse(f"must be shaped [rows] or [rows, {n_columns}]; got {entry.shape[:4]}")
        if entry.shape[0] > max_rows:
            entry.refuse(f"has {entry.shape[0]} rows; at most {max_rows} are taken", 413)
        if (size := entry.parameters.binary_data_size) is None:
            array = _json_tensor(entry)
        elif bytes(entry.data):
            entry.refuse("must have either `data` or `binary_data_size`")
        elif not 0 <= size <= len(binary) - start:
            entry.refuse(f"claims {size} bytes behind the JSON, where {len(binary) - start} are left")
        else:
            array = _binary_tensor(entry, binary[start : start + size])
            start += size
        if array.size != math.prod(entry.shape):
            entry.refuse(f"has {array.size} values, where the shape {entry.shape} needs {math.prod(entry.shape)}")
        arrays[entry.name] = array.reshape(entry.shape)
    if start != len(binary):
        raise HTTPException(400, f"{len(binary) - start} bytes behind the JSON belong to no input.")
    return arrays


def _json_tensor(entry: InputTensor) -> NumpyArray:
    """JSON data, flat or nested, validated against the declared type and size; null is a missing value."""
    dtype, count, data = DATATYPES[entry.datatype], math.prod(entry.shape), bytes(entry.data)
    if not data:
        entry.refuse("has no `data`")
    if dtype == np.float16:
        entry.refuse("is FP16, which JSON cannot hold; send FP32, or raw bytes")
    found = data.count(b",") + 1
    if dtype.kind != "O" and count and found != count:  # counted first: a body of small objects fills the memory
        entry.refuse(f"has {found} values, where the shape {entry.shape} needs {count}")
    kind: Any = {"b": bool, "f": float, "O": str}.get(dtype.kind, int) | None
    if len(entry.shape) == 2 and data[1:].lstrip()[:1] == b"[":
        kind = Annotated[list[kind], msgspec.Meta(min_length=entry.shape[1], max_length=entry.shape[1])]
    values = decode_json(data, list[kind], f"input {quote(entry.name)} is no {entry.datatype}")
    has_null = dtype.kind in "iub" and b"null" in data  # numpy has no missing integer, and NaN for a missing float
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, object if has_null else dtype)
            if has_null:
                np.array([value for value in array.flat if value is not None], dtype)  # raises for one too large
    except (ValueError, OverflowError):
        entry.refuse(f"has values that are no {entry.datatype}")
    if dtype.kind == "f" and np.isinf(array).any():
        entry.refuse(f"has a number too large for {entry.datatype}")
    return array


def _binary_tensor(entry: InputTensor, data: bytes) -> NumpyArray:
    if (dtype := DATATYPES[entry.datatype]).kind != "O":
        if len(data) % dtype.itemsize:
            entry.refuse(f"has {len(data)} bytes, no multiple of the {dtype.itemsize} of {entry.datatype}")
        return np.frombuffer(data, dtype)
    texts, start = [], 0
    while start < len(data):  # each text is preceded by its length in four bytes
        length = int.from_bytes(data[start : start + 4], "little")
        if start + 4 + length > len(data):
            entry.refuse("ends inside a text")
        try:
            texts.append(data[start + 4 : start + 4 + length].decode())
        except UnicodeDecodeError:
            entry.refuse("holds a text that is no UTF-8")
        start += 4 + length
    return np.array([*texts, None], dtype=object)[:-1]  # the last keeps numpy from guessing


def datatype_of(array: NumpyArray) -> str:
    return {"b": "BOOL", "f": "FP64", "i": "INT64"}.get(array.dtype.kind, "BYTES")


def response(request: InferenceRequest, head: Mapping[str, Any], outputs: Mapping[str, NumpyArray]) -> Response:
    """The response with the outputs asked for, some of them perhaps as raw bytes behind its JSON."""
    wanted = request.outputs or [OutputRequest(name=name) for name in outputs]
    entries: list[dict[str, Any]] = []
    behind: list[bytes] = []
    for name, is_binary in {output.name: output.parameters.binary_data for output in wanted}.items():
        array, datatype = outputs[name], datatype_of(outputs[name])
        values = [*map(str, array.flat)] if datatype == "BYTES" else array.ravel().tolist()
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(array.shape)}
        if not (request.parameters.binary_data_output if is_binary is None else is_binary):
            entry["data"] = values
        else:
            texts = (len(text).to_bytes(4, "little") + text for text in map(str.encode, values))
            behind.append(b"".join(texts) if datatype == "BYTES" else array.astype(DATATYPES[datatype]).tobytes())
            entry["parameters"] = {"binary_data_size": len(behind[-1])}
        entries.append(entry)
    text = msgspec.json.encode({**head, **({} if request.id is None else {"id": request.id}), "outputs": entries})
    if not behind:
        return Response(text, media_type="application/json")
    headers = {HEADER_LENGTH: str(len(text))}
    return Response(b"".join([text, *behind]), headers=headers, media_type="application/octet-stream")
