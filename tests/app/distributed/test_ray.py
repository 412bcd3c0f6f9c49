"""Ray: the same rows and bits as one process."""

import pytest
from pyarrow import parquet

pytest.importorskip("ray", reason="the extra `ray` is not installed")

from dropbayes.app.distributed import ENGINES, predict_parquet, predict_ray
from dropbayes.app.distributed.parts import Part
from tests.app.distributed.kills import killed_at_random, ray_worker
from tests.app.distributed.rows import Failing, digest, rows, written

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")]


def test_a_cluster_writes_the_bits_of_one_process(predictor, models, tmp_path):
    predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", engine="ray", n_workers=2, part_rows=250)
    assert digest(written(tmp_path / "out")) == digest(predictor.add_columns(rows(1000)))


def test_a_dataset_gets_the_columns_of_a_prediction(predictor):
    import pyarrow as pa
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        dataset = predict_ray(ray.data.from_arrow(rows(60)), predictor, n_workers=1)
        found = pa.concat_tables(ray.get(dataset.to_arrow_refs()))
    finally:
        ray.shutdown()
    assert digest(found) == digest(predictor.add_columns(rows(60)))


def test_every_row_is_there_once_after_workers_were_killed(predictor, tmp_path):
    parquet.write_table(rows(100_000), tmp_path / "rows.parquet")
    with killed_at_random(8, ray_worker) as killer:
        predict_parquet(
            predictor, tmp_path / "rows.parquet", tmp_path / "out", engine="ray", n_workers=2, part_rows=1000
        )
    assert killer.killed == 8
    assert digest(written(tmp_path / "out")) == digest(predictor.add_columns(rows(100_000)))


def test_an_error_is_raised_and_not_tried_again(tmp_path):
    with pytest.raises(ValueError, match="row 3 is wrong"):
        list(ENGINES["ray"](Failing(str(tmp_path / "trials")), [Part("a", 0, 1, "b")], 1, None))
    assert (tmp_path / "trials").read_text() == "tried\n"
