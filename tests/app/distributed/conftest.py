import pytest
from pyarrow import parquet

import dropbayes as db
from tests.app.distributed.rows import rows


@pytest.fixture(scope="module")
def models(models):
    parquet.write_table(rows(1000), models / "rows.parquet", row_group_size=300)
    return models


@pytest.fixture(scope="module")
def predictor(models):
    return db.Predictor.load(models / "numbers")
