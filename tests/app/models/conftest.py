import pandas as pd
import pytest

from tests.command_line import table

N_ROWS = 60


@pytest.fixture(scope="module")
def models(models):
    (models / "new.csv").write_text(table(N_ROWS, seed=5))
    return models


@pytest.fixture(scope="module")
def columns(models):
    return pd.read_csv(models / "new.csv")[["size", "city", "new"]].to_dict("series")
