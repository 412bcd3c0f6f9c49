"""The two tiny models of the command line, fitted once for every package of the application."""

import shutil

import pytest

from tests.command_line import make_models


@pytest.fixture(scope="session")
def fitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fitted")
    make_models(folder)
    return folder


@pytest.fixture(scope="module")
def models(fitted, tmp_path_factory):
    """The models in a folder of the module's own, which may add to it."""
    return shutil.copytree(fitted, tmp_path_factory.mktemp("models"), dirs_exist_ok=True)
