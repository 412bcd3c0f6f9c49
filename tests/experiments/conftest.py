"""The tests use what dependencies carry, so that they are the same everywhere."""

import pytest


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("DROPBAYES_DATA", raising=False)
