"""The page in a browser, and a visit that must end without an error or a request."""

import shutil
import types

import pytest

from dropbayes.app.page import page_html
from tests.app.page.browsing import RECORDER, wait_until


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page_html())
    return path.as_uri()


@pytest.fixture
def visit(chromium, address):
    """Opens the page; at the end there must have been no error, no policy violation and no request but its own."""
    visits = []

    def open_page(fragment="", *, at=address, until="!!window.last_band", **options):
        context = chromium.new_context(**({"viewport": {"width": 1100, "height": 760}} | options))
        page = context.new_page()
        heard = types.SimpleNamespace(errors=[], requests=[])
        page.on(
            "console",
            lambda message: heard.errors.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: heard.errors.append(str(error)))
        page.on("request", lambda request: heard.requests.append(request.url))
        page.add_init_script(RECORDER)
        page.goto(f"{at}#{fragment}")
        wait_until(page, until)
        visits.append((page, heard, at))
        return page

    yield open_page
    for page, heard, at in visits:
        assert heard.errors == []
        assert page.evaluate("window.violations") == []
        assert {url.split("#")[0] for url in heard.requests if not url.startswith(("blob:", "data:"))} <= {at}
        page.context.close()
