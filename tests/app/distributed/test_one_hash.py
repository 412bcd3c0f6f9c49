"""One SHA-256 for 200,000 rows: plainly, in blocks, in processes, on every engine, over HTTP and by the command line."""

import importlib.util
import shutil
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dropbayes.app.distributed import predict_parquet
from tests.app.distributed.rows import digest, rows, written
from tests.app.serving.live import live_server
from tests.command_line import run

N_ROWS = 200_000
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def table():
    return rows(N_ROWS)


@pytest.fixture(scope="module")
def source(table, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    parquet.write_table(table, path)
    return path


@pytest.fixture(scope="module")
def expected(predictor, table):
    return digest(predictor.add_columns(table))


def test_in_blocks(predictor, table, expected):
    edges = [0, 1, 2, 4099, 70_000, 70_001, N_ROWS]
    parts = [predictor.add_columns(table.slice(a, b - a)) for a, b in pairwise(edges)]
    assert digest(pa.concat_tables(parts)) == expected


@pytest.mark.parametrize("engine", ["processes", "dask", "ray", "spark"])
def test_on_an_engine(predictor, source, expected, tmp_path, engine):
    package = {"dask": "distributed", "spark": "pyspark"}.get(engine, engine)
    if engine != "processes" and importlib.util.find_spec(package) is None:
        pytest.skip(f"the extra `{engine}` is not installed")
    if engine == "spark" and shutil.which("java") is None:
        pytest.skip("Spark needs Java, which is not installed")
    predict_parquet(predictor, source, tmp_path / "out", engine=engine, n_workers=2)
    assert digest(written(tmp_path / "out")) == expected


def test_by_the_command_line(models, source, expected, tmp_path):
    result = run("predict", models / "numbers", source, "-o", tmp_path / "out.csv")
    assert result.code == 0
    import pandas

    assert digest(pa.Table.from_pandas(pandas.read_csv(tmp_path / "out.csv"))) == expected


def test_over_http(models, table, expected):
    triton = pytest.importorskip("tritonclient.http", reason="the client of the protocol is not installed")
    parts = []
    with live_server(models / "numbers") as live:
        client = triton.InferenceServerClient(f"{live.host}:{live.port}", network_timeout=300, connection_timeout=300)
        for start in range(0, N_ROWS, 10_000):
            block = table.slice(start, 10_000)
            inputs = []
            for name, kind, values in (
                ("size", "FP64", block["size"].to_numpy()), ("city", "BYTES", block["city"].to_numpy().astype(object)),
                ("new", "BOOL", block["new"].to_numpy(zero_copy_only=False)),
            ):  # fmt: skip
                inputs.append(triton.InferInput(name, [len(values)], kind))
                inputs[-1].set_data_from_numpy(values)
            found = client.infer("numbers", inputs)
            columns = {n: found.as_numpy(n) for n in ("mean", "std", "epistemic", "aleatoric", "lower", "upper")}
            parts.append(pa.table({"row": block["row"], **columns}))
        client.close()
    joined = pa.concat_tables(parts)
    deviations = {f"{name}_std": [float(f"{v:.12g}") for v in np.sqrt(joined[name].to_numpy())] for name in ("epistemic", "aleatoric")}  # fmt: skip
    for name, values in deviations.items():
        joined = joined.append_column(name, pa.array(values))
    assert digest(joined, prefix="") == expected
