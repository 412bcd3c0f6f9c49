"""The tests use what dependencies carry, so that they are the same everywhere, unless they ask for the data folder."""

import os
import pathlib

import pytest

NAMED = os.environ.get("DROPBAYES_DATA")


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("DROPBAYES_DATA", raising=False)


@pytest.fixture
def data_folder(no_data_folder, monkeypatch):
    if not NAMED:
        pytest.skip("DROPBAYES_DATA names no folder of data")
    monkeypatch.setenv("DROPBAYES_DATA", NAMED)
    return pathlib.Path(NAMED)
