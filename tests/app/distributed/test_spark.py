"""Spark: the same rows and bits as one process."""

import shutil

import pytest
from pyarrow import parquet

from dropbayes.app.distributed import ENGINES, predict_parquet, predict_spark
from dropbayes.app.distributed.parts import Part
from tests.app.distributed.kills import killed_at_random, spark_worker
from tests.app.distributed.rows import Failing, digest, rows, written

pytest.importorskip("pyspark", reason="the extra `spark` is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:PySpark does not yet:FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java, which is not installed"),
]


def test_a_cluster_writes_the_bits_of_one_process(predictor, models, tmp_path):
    predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", engine="spark", n_workers=2, part_rows=250)
    assert digest(written(tmp_path / "out")) == digest(predictor.add_columns(rows(1000)))


def test_a_data_frame_gets_the_columns_of_a_prediction(predictor):
    from pyspark.sql import SparkSession

    session = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        frame = predict_spark(session.createDataFrame(rows(60)), predictor)
        assert frame.columns == predictor.add_columns(rows(60)).column_names
        found = frame.toArrow()
    finally:
        session.stop()
    assert digest(found) == digest(predictor.add_columns(rows(60)))


def test_every_row_is_there_once_after_workers_were_killed(predictor, tmp_path):
    parquet.write_table(rows(100_000), tmp_path / "rows.parquet")
    with killed_at_random(8, spark_worker) as killer:
        predict_parquet(
            predictor, tmp_path / "rows.parquet", tmp_path / "out", engine="spark", n_workers=2, part_rows=1000
        )
    assert killer.killed == 8
    assert digest(written(tmp_path / "out")) == digest(predictor.add_columns(rows(100_000)))


def test_an_error_is_raised_and_not_tried_again(tmp_path):
    with pytest.raises(ValueError, match="row 3 is wrong"):
        list(ENGINES["spark"](Failing(str(tmp_path / "trials")), [Part("a", 0, 1, "b")], 1, None))
    assert (tmp_path / "trials").read_text() == "tried\n"
