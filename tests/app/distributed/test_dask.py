"""Dask: the same rows and bits as one process."""

import pytest
from pyarrow import parquet

pytest.importorskip("distributed", reason="the extra `dask` is not installed")

from dropbayes.app.distributed import ENGINES, predict_dask, predict_parquet
from dropbayes.app.distributed.parts import Part
from tests.app.distributed.kills import killed_at_random, spawned
from tests.app.distributed.rows import Failing, digest, rows, written


def test_a_data_frame_gets_the_columns_of_a_prediction_partition_by_partition(predictor):
    import dask.dataframe as dd
    import pyarrow as pa

    table = rows(60)
    frame = predict_dask(dd.from_pandas(table.to_pandas(), npartitions=3), predictor)
    assert list(frame.columns) == predictor.add_columns(table).column_names
    found = pa.Table.from_pandas(frame.compute(scheduler="synchronous"), preserve_index=False)
    assert digest(found) == digest(predictor.add_columns(table))


@pytest.mark.slow
def test_a_cluster_writes_the_bits_of_one_process(predictor, models, tmp_path):
    predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", engine="dask", n_workers=2, part_rows=250)
    assert digest(written(tmp_path / "out")) == digest(predictor.add_columns(rows(1000)))


@pytest.mark.slow
def test_every_row_is_there_once_after_workers_were_killed(predictor, tmp_path):
    parquet.write_table(rows(100_000), tmp_path / "rows.parquet")

    with killed_at_random(8, spawned) as killer:
        predict_parquet(
            predictor, tmp_path / "rows.parquet", tmp_path / "out", engine="dask", n_workers=2, part_rows=1000
        )
    assert killer.killed == 8
    assert digest(written(tmp_path / "out")) == digest(predictor.add_columns(rows(100_000)))


@pytest.mark.slow
def test_an_error_is_raised_and_not_tried_again(tmp_path):
    parts = [Part("a", 0, 1, "b")]
    with pytest.raises(ValueError, match="row 3 is wrong"):
        list(ENGINES["dask"](Failing(str(tmp_path / "trials")), parts, 1, None))
    assert (tmp_path / "trials").read_text() == "tried\n"
