"""What is served and how: the settings of a server, and its models, of columns or records in, predictions out."""

import functools
import hashlib
import importlib
import ipaddress
import pathlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import msgspec
import numpy as np
from starlette.exceptions import HTTPException

from dropbayes.app.models.model import load
from dropbayes.app.models.predictor import MATRIX, Predictor, location, uncertainty
from dropbayes.app.serving import protocol
from dropbayes.app.serving.protocol import Parameters, datatype_of
from dropbayes.estimators.columns import Encoded
from dropbayes.estimators.ensembles import check_finite
from dropbayes.runtime.validation import NumpyArray


@dataclass(frozen=True)
class Settings:
    """How models are served."""

    paths: Sequence[pathlib.Path]  #: The model folders; MODULE:NAME is a `Predictor` that a module of Python holds.
    host: str = "127.0.0.1"  #: The address to listen on.
    port: int = 8000  #: The port; 0 takes a free one.
    workers: int = 1  #: The number of processes.
    token: str | None = None  #: The bearer token that requests must carry, if any.
    allow_new: bool = False  #: Whether unseen categories are encoded as all zeros where a request does not say.
    method: str | None = None  #: "sampling", "linear" or "moments" where a request does not say; None as the model.
    further_hosts: Sequence[str] = ()  #: Names in the header `Host` to answer besides those of this machine.
    log_level: str = "warning"  #: The least severity that is logged; "info" logs every request.
    max_body: int = 16 * 2**20  #: The most bytes of a request's body.
    max_rows: int = 10_000  #: The most rows of a request.
    max_draws: int = 1000  #: The most draws of each network.
    body_seconds: float = 20.0  #: The longest a body may take to arrive.
    answer_seconds: float = 60.0  #: The longest a request may wait for its prediction.

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def hosts(self) -> list[str]:
        """The names in the header `Host` that are answered."""
        # A page of another site could read from a server of this machine by a name of its own that leads here, unless
        # there is a token it does not know.
        if not self.further_hosts and (self.token is not None or not self.is_local):
            return ["*"]
        return [*self.further_hosts, self.host, "localhost", "127.0.0.1", "::1", "[::1]"]


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model: its name is that of its folder or variable, its version a digest of what it is."""

    name: str
    version: str
    predictor: Predictor
    percentiles: Mapping[str, float]
    outputs: Mapping[str, NumpyArray]  #: All outputs for one row: the type and the shape of each.

    @classmethod
    def load(cls, path: pathlib.Path) -> Self:
        """The model in a folder, or a network's `Predictor` named MODULE:NAME, checked by a first prediction."""
        module, colon, name = str(path).partition(":")
        if colon and not path.exists():
            if "" not in sys.path:
                sys.path.insert(0, "")  # where the server was started
            sys.modules.pop(module, None)  # a module that was changed since is run again
            try:
                predictor = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError) as error:
                raise ValueError(f"'{module}:{name}' cannot be imported: {error}.") from None
            if not isinstance(predictor, Predictor) or MATRIX in predictor.inputs:
                raise ValueError(f"'{module}:{name}' must be a dropbayes.Predictor with named `columns`.")
            version, percentiles, x = predictor.fingerprint[:12], {}, np.zeros((1, predictor.n_inputs))
        else:
            model = load(path)
            version = hashlib.sha256(repr((model.schema, model.origin, model.digest)).encode()).hexdigest()[:12]
            predictor, name, percentiles = Predictor(model), path.resolve().name, model.uncertainty_percentiles
            mean = model.ensemble.population_.x_mean  # far from it, as zero is from a year, a prediction may overflow
            x = mean[:1, : predictor.n_inputs].double().cpu().numpy()
        row = Encoded(x)
        outputs = all_outputs(predictor.predict_inputs(row.x), row, predictor, defer_above=0.0)
        return cls(name, version, predictor, percentiles, outputs)

    @property
    def metadata(self) -> dict[str, Any]:
        columns = self.predictor.inputs
        read = {"number": "FP64", "boolean": "BOOL"}
        inputs = [{"name": n, "datatype": read.get(kind, "BYTES"), "shape": [-1]} for n, kind in columns.items()]
        if MATRIX not in columns:
            datatype = "BYTES" if {"category", "date"} & set(columns.values()) else "FP64"
            inputs.append({"name": MATRIX, "datatype": datatype, "shape": [-1, len(columns)]})
        given = self.outputs.items()
        outputs = [{"name": n, "datatype": datatype_of(v), "shape": [-1, *v.shape[1:]]} for n, v in given]
        about = {"name": self.name, "versions": [self.version], "platform": "dropbayes"}
        classes = self.predictor.classes
        known = {} if classes is None else {"parameters": {"classes": [str(label) for label in classes]}}
        return {**about, "inputs": inputs, "outputs": outputs, **known}

    @functools.cached_property
    def records_type(self) -> type[msgspec.Struct]:
        """A request of plain records: objects with a value for each column, and settings."""
        cells = {"number": float | str | None, "boolean": bool | str | None, "date": str | int | None}
        kinds = [cells.get(kind, str | float | bool | None) for kind in self.predictor.inputs.values()]
        fields = [(f"column_{index}", kind) for index, kind in enumerate(kinds)]
        rename = {field: name for (field, _), name in zip(fields, self.predictor.inputs, strict=True)}
        record: Any = msgspec.defstruct(f"{self.name}_record", fields, rename=rename, forbid_unknown_fields=True)
        records: Any = Annotated[list[record], msgspec.Meta(min_length=1)]
        settings = ("parameters", Parameters, msgspec.field(default_factory=Parameters))
        return msgspec.defstruct(f"{self.name}_records", [("records", records), settings], forbid_unknown_fields=True)

    def records(self, body: bytes, *, max_rows: int) -> tuple[Any, dict[str, list[Any]]]:
        """A request of plain records, and its columns: it is answered with those that `dropbayes predict` adds."""
        asked = protocol.decode_json(body, self.records_type, "the body is no records")
        if asked.parameters.binary_data_output:
            raise HTTPException(400, "records are answered as JSON; leave the parameter `binary_data_output` out.")
        if len(asked.records) > max_rows:
            raise HTTPException(413, f"{len(asked.records)} records; at most {max_rows} are taken.")
        values = zip(*map(msgspec.structs.astuple, asked.records), strict=True)
        return asked, dict(zip(self.predictor.inputs, map(list, values), strict=True))

    def tensors(self, body: bytes, header_length: str | None, *, max_rows: int) -> tuple[Any, dict[str, NumpyArray]]:
        """A request of tensors, and its columns."""
        asked, binary = protocol.decode_request(body, header_length)
        asked.check(self.name, self.version, self.outputs)
        return asked, protocol.tensors(asked, binary, max_rows=max_rows, n_columns=len(self.predictor.inputs))

    def encode(self, columns: Mapping[str, Any], *, allow_new: bool | None) -> Encoded:
        """The rows of some columns as inputs of the networks, with those beyond training."""
        names = list(self.predictor.inputs)
        if len(columns) == 1 and np.shape(next(iter(columns.values())))[1:] == (len(names),) != (1,):
            columns = {MATRIX: next(iter(columns.values()))}  # MLServer's codec of arrays has a name of its own
        if unknown := [name for name in columns if name not in names and name != MATRIX]:
            raise ValueError(f"the model has no input {unknown[0][:40]!r}; its inputs are in its metadata.")
        if MATRIX in columns and MATRIX not in names and len(columns) > 1:
            raise ValueError(f"the input '{MATRIX}' holds all columns; send it alone, or the columns by name.")
        return self.predictor.encode_rows(columns, allow_new=allow_new)


def all_outputs(
    prediction: Mapping[str, NumpyArray], rows: Encoded, predictor: Predictor, *, defer_above: float | None
) -> dict[str, NumpyArray]:
    """The prediction for some rows, its remarks and, with a threshold, which rows are deferred."""
    check_finite(prediction, location)
    outputs = {**prediction, **predictor.remarks(prediction, rows)}
    if defer_above is not None:
        outputs["deferred"] = uncertainty(prediction) > defer_above
    return outputs
