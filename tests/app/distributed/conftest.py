import pytest
from pyarrow import parquet

import dropbayes as db
from tests.app.distributed.rows import rows
from tests.command_line import make_models


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    make_models(folder)
    parquet.write_table(rows(1000), folder / "rows.parquet", row_group_size=300)
    return folder


@pytest.fixture(scope="session")
def predictor(models):
    return db.Predictor.load(models / "numbers")
