import pytest

from tests.app.serving.live import live_server
from tests.command_line import make_models


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    make_models(folder)
    return folder


@pytest.fixture(scope="session")
def server(models):
    with live_server(models / "numbers", fresh=True) as live:
        yield live
