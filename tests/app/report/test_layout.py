"""Tests of the page as it is laid out, most of them in a real browser."""

import re
import shutil
from importlib.resources import files

import numpy as np
import pytest

from dropbayes.app.report import report
from dropbayes.app.report.layout import csv_address
from tests.app.report.pages import NASTY, Page, class_rows, regression_rows, tables

WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium on this machine")
    options = [
        "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--disable-quic",
    ]  # fmt: skip
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=path, args=options)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory, regressor, one_feature, classifier):
    """Pages of every kind, with long and nasty names among them."""
    folder = tmp_path_factory.mktemp("pages")
    x, y = regression_rows(120, seed=5)
    names = np.array(["ant", "bee", "cat"])[class_rows(120)[1]]
    nasty = {text: [text] * 120 for text in NASTY[:4]}
    pages = {
        "sorted": report(regressor, x, y, target="height", columns=nasty, provenance={NASTY[0]: NASTY[1], "To repeat": "dropbayes " + "x" * 300}),
        "band": report(one_feature, x[:, :1], y, target="y" * 200, title="t" * 500, training=(x[:50, :1], y[:50])),
        "along": report(regressor, x, y, target="t", band_feature=1, unknown=2 * x),
        "classes": report(classifier, class_rows(120)[0], names, target=NASTY[0]),
        "two": report(regressor, x[:2], y[:2], target="t"),
    }  # fmt: skip
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


# The contrast of a colour with the first opaque background behind it [WCAG 2.2, 1.4.3].
CONTRAST = r"""() => {
  const parse = c => c.match(/[\d.]+/g).map(Number);
  const light = c => { const f = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(c[0]) + 0.7152 * f(c[1]) + 0.0722 * f(c[2]); };
  const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] === 1) return c; } return [255, 255, 255]; };
  const found = [];
  for (const e of document.querySelectorAll("h1,h2,h3,p,a,td,th,caption,figcaption,li,dt,dd,code,svg.chart text:not(.cell)")) {
    if (!e.getClientRects().length || !e.textContent.trim()) continue;
    const style = getComputedStyle(e), ink = parse(e.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(ink), light(behind(e))].sort((p, q) => q - p);
    found.push([(a + 0.05) / (b + 0.05), e.tagName + " " + e.textContent.trim().slice(0, 40)]);
  }
  return found.sort((p, q) => p[0] - q[0]).slice(0, 1)[0];
}"""


@pytest.mark.parametrize("name", ["sorted", "band", "along", "classes", "two"])
@pytest.mark.slow
def test_a_browser_shows_the_page_without_errors_requests_or_sideways_scrolling(browser, written, name):
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        tab = context.new_page()
        errors, requests = [], []
        tab.on("console", lambda message, errors=errors: errors.append(message.text))
        tab.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
        tab.on("dialog", lambda dialog, errors=errors: errors.append("dialog"))
        tab.on("request", lambda request, requests=requests: requests.append(request.url))
        tab.goto((written / f"{name}.html").as_uri())
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 900})
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, (scheme, width)
            wide = tab.evaluate(
                "[...document.querySelectorAll('body *')].filter(e => !e.closest('svg, .scroll, thead') && "
                "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + ' ' + e.className)"
            )
            assert not wide, (scheme, width, wide)
            sections = tab.locator("section")
            assert sections.count() >= 8 and all(sections.nth(k).is_visible() for k in range(sections.count()))
            assert all(tab.locator("figure").nth(k).locator("svg.chart:visible").count() == 1
                       for k in range(tab.locator("figure").count()))  # fmt: skip
            smallest = tab.evaluate(
                "Math.min(...[...document.querySelectorAll('svg.chart text')].map(e => e.getBoundingClientRect().height)"
                ".filter(h => h > 0))"
            )
            assert smallest >= 9, "letters too small to read"
            worst, where = tab.evaluate(CONTRAST)
            assert worst >= 4.5, (scheme, width, worst, where)
        assert errors == [] and [url for url in requests if not url.startswith(("file:", "data:"))] == []
        assert len(requests) == 1 + sum(url == "data:," for url in requests)
        context.close()


@pytest.mark.parametrize("name", ["classes.html", "sorted.html"])
@pytest.mark.slow
def test_a_page_prints_on_white_with_the_wide_charts(browser, written, tmp_path, name):
    context = browser.new_context(color_scheme="dark")
    tab = context.new_page()
    tab.set_viewport_size({"width": 700, "height": 1000})  # about the width of a sheet of paper
    tab.goto((written / name).as_uri())
    tab.emulate_media(media="print", color_scheme="dark")
    wide = "[...document.querySelectorAll('body *')].filter(e => !e.closest('svg, thead') && e.getBoundingClientRect().right > 701)"
    assert tab.evaluate(f"{wide}.length") == 0  # paper does not scroll
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.evaluate("getComputedStyle(document.querySelector('h2')).color") == "rgb(0, 0, 0)"
    assert tab.locator(".on-wide:visible").count() == tab.locator("figure").count()
    assert tab.locator(".on-narrow:visible").count() == 0
    tab.pdf(path=tmp_path / "page.pdf", format="A4")
    assert (tmp_path / "page.pdf").read_bytes()[:5] == b"%PDF-"
    context.close()


def test_paper_is_white_and_only_a_narrow_screen_has_the_narrow_charts():
    style = files("dropbayes.app.report").joinpath("style.css").read_text(encoding="utf-8")
    rules = dict(re.findall(r"\n@media ([^{]*) \{\n(.*?)\n\}", style, re.DOTALL)[::-1])  # of two alike the first
    assert "--page: #ffffff" in rules["print"] and "--ink: #000000" in rules["print"]
    assert re.search(r"\n\.on-narrow \{ display: none; \}", style)
    shown = [where for where, rule in rules.items() if ".on-narrow { display: block; }" in rule]
    assert shown == [where for where, rule in rules.items() if ".on-wide { display: none; }" in rule]
    assert shown and all(where.startswith("screen and ") for where in shown)


def test_every_table_downloads_as_it_is_shown(regressor):
    x, y = regression_rows(120, seed=5)
    text = report(regressor, x, y, target="t", training=regression_rows(80))
    measured = tables(text)
    assert set(measured) == {
        "scores.csv",
        "baselines.csv",
        "dropout.csv",
        "importance.csv",
        "segments.csv",
        "training.csv",
        "uncertain.csv",
    }
    page = Page(text)
    assert [row["row"] for row in measured["uncertain.csv"]] == page.column("row")
    assert {row["score"]: row["value"] for row in measured["scores.csv"]}["RMSE"][:6] == page.scores["RMSE"][0][:6]


@pytest.mark.slow
def test_a_table_wider_than_its_card_keeps_its_caption_in_view_while_it_scrolls(browser, tmp_path, regressor):
    x, y = regression_rows(60)
    wide = {f"a column with a long name {k}": [1e5 * k + 0.123456] * 60 for k in range(4)}
    (tmp_path / "wide.html").write_text(report(regressor, x, y, target="t", columns=wide), encoding="utf-8")
    tab = browser.new_page()
    tab.set_viewport_size({"width": 940, "height": 900})
    tab.goto((tmp_path / "wide.html").as_uri())
    inside = """() => { const box = document.querySelector("#table-uncertain").closest(".scroll");
      const text = box.querySelector("caption span").getBoundingClientRect(), frame = box.getBoundingClientRect();
      return [box.scrollWidth - box.clientWidth, text.left - frame.left, frame.right - text.right]; }"""
    hidden, left, right = tab.evaluate(inside)
    assert hidden > 20 and left > -1 and right > -1
    tab.evaluate("document.querySelector('#table-uncertain').closest('.scroll').scrollLeft = 1000")
    hidden, left, right = tab.evaluate(inside)
    assert left > -1 and right > -1
    tab.close()


@pytest.mark.slow
def test_the_bars_of_the_features_can_be_compared_at_any_width(browser, tmp_path, regressor):
    x, y = regression_rows(60)
    (tmp_path / "page.html").write_text(report(regressor, x, y, target="t"), encoding="utf-8")
    tab = browser.new_page()
    tab.goto((tmp_path / "page.html").as_uri())
    for width, least in ((1280, 200), (390, 70)):
        tab.set_viewport_size({"width": width, "height": 900})
        bars = tab.evaluate("""() => [...document.querySelectorAll("#table-importance .share")].map(bar =>
          [...bar.children].map(part => part.getBoundingClientRect().width).concat(parseFloat(bar.nextSibling.textContent)))""")
        for whole, part, percent in bars:
            assert whole >= least and part == pytest.approx(whole * percent / 100, abs=0.1)
        assert tab.evaluate("document.documentElement.scrollWidth") == width
    tab.close()


def test_a_cell_of_a_download_starts_no_formula():
    assert csv_address(["a"], [["=1"]]) == "data:text/csv;charset=utf-8,a%0D%0A%27%3D1%0D%0A"
