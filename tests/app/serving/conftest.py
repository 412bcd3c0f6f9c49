import pytest

from tests.app.serving.live import live_server


@pytest.fixture(scope="session")
def server(fitted):
    with live_server(fitted / "numbers") as live:
        yield live
