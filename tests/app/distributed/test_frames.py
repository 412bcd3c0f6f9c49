"""Frames of engines get the columns and the bits of one process."""

import shutil
import sys

import pyarrow as pa
import pytest

from dropbayes.app.distributed import predict_dask, predict_ray, predict_spark
from tests.app.distributed.rows import digest, rows


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
