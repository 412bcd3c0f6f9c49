"""Every engine: the rows and bits of one process, also when workers are killed, and no second trial after an error."""

import importlib.util
import shutil
import subprocess
import sys
import time

import psutil
import pyarrow as pa
import pytest
from pyarrow import parquet

from dropbayes.app.distributed import ENGINES, engines, predict_dask, predict_parquet, predict_ray, predict_spark
from dropbayes.app.distributed.parts import Part
from tests.app.distributed.kills import killed_at_random, ray_worker, spark_worker, spawned
from tests.app.distributed.rows import Failing, digest, rows, written

PACKAGES = {"processes": "dropbayes", "ray": "ray", "dask": "distributed", "spark": "pyspark"}
WORKERS = {"processes": spawned, "ray": ray_worker, "dask": spawned, "spark": spark_worker}
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:PySpark does not yet:FutureWarning"
)


@pytest.fixture(params=ENGINES)
def engine(request):
    if importlib.util.find_spec(PACKAGES[request.param]) is None:
        pytest.skip(f"the extra `{request.param}` is not installed")
    if request.param == "spark" and shutil.which("java") is None:
        pytest.skip("Spark needs Java, which is not installed")
    return request.param


@pytest.mark.slow
def test_workers_write_the_bits_of_one_process(engine, predictor, models, tmp_path):
    predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", engine=engine, n_workers=2, part_rows=250)
    assert digest(written(tmp_path / "out")) == digest(predictor.add_columns(rows(1000)))


@pytest.mark.slow
def test_every_row_is_there_once_after_workers_were_killed(engine, predictor, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "_MAX_FRUITLESS_POOLS", 100)
    n_kills, n_rows = (20, 200_000) if engine == "processes" else (8, 100_000)
    parquet.write_table(rows(n_rows), tmp_path / "rows.parquet")
    with killed_at_random(n_kills, WORKERS[engine]) as killer:
        predict_parquet(
            predictor,
            tmp_path / "rows.parquet",
            tmp_path / "out",
            engine=engine,
            n_workers=2,
            part_rows=n_rows // 100,
        )
    assert killer.killed == n_kills
    assert digest(written(tmp_path / "out")) == digest(predictor.add_columns(rows(n_rows)))


def test_workers_that_never_finish_a_part_end_the_run_with_what_may_kill_them():
    with pytest.raises(
        ChildProcessError, match=r"workers died 10 times: out of memory, or run without a __main__ guard"
    ):
        list(engines._with_pools(lambda waiting: iter(()), ["part"]))


@pytest.mark.slow
def test_a_cluster_of_dask_whose_workers_die_while_they_start_is_replaced(monkeypatch):
    distributed = pytest.importorskip("distributed")
    started, start = [], distributed.LocalCluster

    def cluster(**settings):
        started.append(settings)
        if len(started) == 1:
            raise RuntimeError("Nanny failed to start.")
        return start(**settings)

    monkeypatch.setattr(distributed, "LocalCluster", cluster)
    assert sorted(engines.on_dask(abs, [-1, -2, -3], 1, None)) == [1, 2, 3]
    assert len(started) == 2


@pytest.mark.slow
def test_an_error_is_raised_and_not_tried_again(engine, tmp_path):
    with pytest.raises(ValueError, match="row 3 is wrong"):
        list(ENGINES[engine](Failing(str(tmp_path / "trials")), [Part("a", 0, 1, "b")], 1, None))
    assert (tmp_path / "trials").read_text() == "tried\n"


@pytest.mark.parametrize(("name", "package"), [("ray", "ray"), ("dask", "distributed"), ("spark", "pyspark")])
def test_an_engine_that_is_not_installed_is_told_with_its_extra(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark.sql" if name == "spark" else package, None)
    said = rf"the engine {name.title()} needs {package}, .*pip install -e '\.\[{name}\]' in a clone"
    with pytest.raises(ModuleNotFoundError, match=said):
        list(ENGINES[name](abs, [-1], 1, None))


def test_processes_have_no_address(predictor, models, tmp_path):
    with pytest.raises(ValueError, match="`address` must be None"):
        predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", address="host:1")


DRIVER = """
import sys
import dropbayes as db
from dropbayes.app.distributed import predict_parquet

if __name__ == "__main__":
    predict_parquet(db.Predictor.load(sys.argv[1]), sys.argv[2], sys.argv[3], n_workers=2, part_rows=10)
"""


@pytest.mark.slow
def test_workers_end_with_a_driver_that_was_killed(models, tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    arguments = [tmp_path / "driver.py", models / "numbers", models / "rows.parquet", tmp_path / "out"]
    with subprocess.Popen([sys.executable, *map(str, arguments)]) as driver:
        while not any((tmp_path / "out").glob("part-*")):
            assert driver.poll() is None
            time.sleep(0.05)
        workers = [child for child in psutil.Process(driver.pid).children() if spawned(child)]
        driver.kill()
    assert workers and psutil.wait_procs(workers, timeout=60)[1] == []


@pytest.mark.slow
def test_a_dask_frame_gets_the_columns_of_a_prediction_partition_by_partition(predictor):
    frames = pytest.importorskip("dask.dataframe", reason="the extra `dask` is not installed")
    table = rows(60)
    frame = predict_dask(frames.from_pandas(table.to_pandas(), npartitions=3), predictor)
    assert list(frame.columns) == predictor.add_columns(table).column_names
    found = pa.Table.from_pandas(frame.compute(scheduler="synchronous"), preserve_index=False)
    assert digest(found) == digest(predictor.add_columns(table))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_ray_dataset_gets_the_columns_of_a_prediction(predictor):
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        dataset = predict_ray(ray.data.from_arrow(rows(60)), predictor, n_workers=1)
        found = pa.concat_tables(ray.get(dataset.to_arrow_refs()))
    finally:
        ray.shutdown()
    assert digest(found) == digest(predictor.add_columns(rows(60)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:PySpark does not yet:FutureWarning", "ignore::ResourceWarning")
@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java, which is not installed")
def test_a_spark_frame_gets_the_columns_of_a_prediction(predictor, monkeypatch):
    pytest.importorskip("pyspark", reason="the extra `spark` is not installed")
    from pyspark.sql import SparkSession

    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)

    session = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        frame = predict_spark(session.createDataFrame(rows(60)), predictor)
        assert frame.columns == predictor.add_columns(rows(60)).column_names
        found = frame.toArrow()
    finally:
        session.stop()
    assert digest(found) == digest(predictor.add_columns(rows(60)))
