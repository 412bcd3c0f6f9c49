import pandas as pd
import pytest

from tests.command_line import make_models, table

N_ROWS = 300


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    (folder / "new.csv").write_text(table(N_ROWS, seed=5))
    return folder


@pytest.fixture(scope="module")
def columns(models):
    return pd.read_csv(models / "new.csv")[["size", "city", "new"]].to_dict("series")
