"""The whole page in a real browser: its numbers, addresses, other tabs, sizes, paper, no connection."""

import io
import pathlib
import threading
from typing import Any

import numpy as np
import pytest

from dropbayes.app.page import PageServer, page_html
from tests.app.page.browsing import RECORDER, status_says, told, wait_until

pytestmark = pytest.mark.slow  # a minute of a real browser

TABS = ("points", "world", "digit")


# The same numbers as Python ---------------------------------------------------------------------------------------------


def test_the_copied_program_gives_the_draws_on_the_screen(chromium, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    with PageServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        context = chromium.new_context(permissions=["clipboard-read", "clipboard-write"])
        page = context.new_page()
        page.add_init_script(RECORDER)
        page.goto(f"{server.url}#scene=gap&nDraws=20&seed=3&depth=3")
        wait_until(page, "window.last_band && window.last_band.step > 100")
        page.click("#run")
        status_says(page, "paused")
        page.click("#copy-python")
        wait_until(page, "document.getElementById('copied').textContent.includes('clipboard')")
        code = page.evaluate("navigator.clipboard.readText()")
        draws = page.evaluate("Array.from(window.last_band.draws)")
        mean = page.evaluate("Array.from(window.last_band.mean)")
        page.click("#copy-link")
        wait_until(page, "document.getElementById('copied').textContent.includes('link')")
        link = page.evaluate("navigator.clipboard.readText()")
        context.close()
        server.shutdown()
    names: dict[str, Any] = {"__name__": "copied"}
    exec(compile(code, "copied.py", "exec"), names)
    prediction = names["prediction"]
    assert np.allclose(np.reshape(draws, (20, -1)), prediction.draws[..., 0], rtol=0, atol=1e-11)
    assert np.allclose(mean, prediction.mean[:, 0], rtol=0, atol=1e-11)
    assert len(names["POINTS"]) == 24
    assert link == f"{server.url}#tab=points&scene=gap&depth=3&nDraws=20"


def test_a_link_opens_what_was_seen(visit):
    page = visit("scene=step&dropProb=0.2&seed=9&points=100_200.-1500_300&draws=1")
    address = page.evaluate("location.hash")
    again = visit(address.lstrip("#"))
    same = ("dropProb", "seed", "draws", "activation", "lengthScale")
    for name in same:
        assert page.evaluate(f"window.last_band.settings.{name}") == again.evaluate(f"window.last_band.settings.{name}")
    assert np.allclose(
        page.evaluate("Array.from(window.last_band.grid)"), again.evaluate("Array.from(window.last_band.grid)")
    )
    status_says(again, "2 points")


def test_a_broken_address_opens_the_page_all_the_same(visit):
    page = visit()
    for fragment in (
        "points=.._._1_2_3.x_y.9e9_0.NaN_1",
        "scene=__proto__&width=1e99&depth=-3",
        "tab=%00&dropProb=&seed=1.7",
        "%%%&points=" + "1_1." * 5000,
    ):
        page.evaluate("window.last_band = null")
        page.evaluate("fragment => { location.hash = fragment; }", fragment)
        wait_until(page, "window.last_band?.mean.every(Number.isFinite)")
        assert page.is_visible("#plot")


# World and digit --------------------------------------------------------------------------------------------------------


def test_the_agents_live_when_told_to_and_rest_when_not_seen(visit):
    page = visit("tab=world", until="!!window.last_world")
    assert page.evaluate("window.last_world.step") == 0
    page.fill("#speed", "8")
    page.click("#world-run")
    wait_until(page, "window.last_world.step > 450")  # beyond the random phase of the short schedule
    wait_until(page, "document.getElementById('reward-thompson').textContent.includes('reward')")
    page.click("#tab-digit")
    page.wait_for_timeout(300)
    step = page.evaluate("window.last_world.step")
    page.wait_for_timeout(300)
    assert page.evaluate("window.last_world.step") == step
    page.click("#tab-world")
    page.click("#world-run")  # a pause
    page.click("#world-restart")
    wait_until(page, "window.last_world.step === 0")
    place_of_food = "JSON.stringify(window.last_world.lives[0].items)"
    before = page.evaluate(place_of_food)
    page.fill("#world-seed", "5")
    wait_until(page, f"before => {place_of_food} !== before", before)
    page.select_option("#schedule", "paper")
    page.click("#eyes")
    page.click("#world-run")
    wait_until(page, "window.last_world.step > 20")


def test_a_written_digit_is_read_and_doubted_when_it_turns(visit):
    page = visit("tab=digit")
    for digit in range(10):
        page.click(f"#samples button:nth-child({digit + 1})")
        wait_until(page, f"document.getElementById('digit-read').textContent === '{digit}'")
    page.click("#samples button:nth-child(2)")
    upright = float(page.inner_text("#entropy").split()[0])
    page.fill("#angle", "55")
    wait_until(page, f"parseFloat(document.getElementById('entropy').textContent) > {upright} + 0.3")
    assert float(page.inner_text("#mutual").split()[0]) > 0.05
    for end in ("180", "-180"):
        page.fill("#angle", end)
        assert page.input_value("#angle") == end, "the slider stays at its end"
    page.click("#digit-turn")
    wait_until(page, "document.getElementById('angle-value').textContent !== '−180°'")


def test_a_digit_drawn_by_hand_is_read(visit):
    page = visit("tab=digit")
    page.locator("#digit-pad").scroll_into_view_if_needed()
    box = page.locator("#digit-pad").bounding_box()
    wait_until(page, "document.getElementById('digit-read').textContent !== ''")  # the digit it opens with
    page.click("#digit-clear")
    wait_until(page, "document.getElementById('digit-read').textContent === ''")
    assert page.inner_text("#scatter-legend") == "", "classes of nothing"
    stroke = [(0.3, 0.25), (0.7, 0.25), (0.45, 0.8)]  # a seven
    page.mouse.move(box["x"] + stroke[0][0] * box["width"], box["y"] + stroke[0][1] * box["height"])
    page.mouse.down()
    for x, y in stroke[1:]:
        page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=12)
    page.mouse.up()
    wait_until(page, "document.getElementById('digit-read').textContent === '7'")
    page.focus("#digit-pad")
    for key in ("3", "ArrowLeft", "Shift+ArrowRight", "Delete"):
        page.keyboard.press(key)


# Everyone, everywhere ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tab", TABS)
def test_every_control_has_a_name_and_a_visible_focus(visit, tab):
    page = visit(f"tab={tab}", until="document.readyState === 'complete'")
    unnamed = page.evaluate(f"""() => [...document.querySelectorAll("#{tab} :is(button, input, select, canvas), [role=tab]")].filter((one) => {{
      const label = [...(one.labels ?? [])].map((label) => label.textContent).join("");
      return !(one.getAttribute("aria-label") ?? (label || one.textContent)).trim();
    }}).map((one) => one.id)""")
    assert unnamed == []
    widths = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        widths.add(page.evaluate("getComputedStyle(document.activeElement).outlineWidth"))
    assert widths == {"3px"}


def test_nothing_is_wider_than_the_window(visit):
    page = visit(color_scheme="dark")
    for width in (280, 360, 768, 1280, 2560, 3840):
        page.set_viewport_size({"width": width, "height": 740})
        for tab in ("world", "digit", "points"):
            page.click(f"#tab-{tab}")
            assert page.evaluate("document.scrollingElement.scrollWidth") <= width
        sharp = "(() => { const c = document.getElementById('plot'); return Math.abs(c.width - c.getBoundingClientRect().width) < 2; })()"
        wait_until(page, sharp)


def brightness(page):
    """The mean brightness of the plot, 0 to 255."""
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(page.locator("#plot").screenshot()))
    return float(np.asarray(image.convert("L")).mean())


def test_the_picture_follows_the_colour_scheme_and_paper_is_light(visit, tmp_path):
    page = visit(color_scheme="dark")
    assert brightness(page) < 100
    page.emulate_media(color_scheme="light")
    page.wait_for_timeout(200)
    assert brightness(page) > 155
    page.emulate_media(color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert brightness(page) > 155
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert brightness(page) < 100
    page.pdf(path=tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").stat().st_size > 10_000
    page.emulate_media(media="print")
    assert not page.is_visible("#controls") and page.is_visible("#plot")


def test_the_page_works_without_a_connection(visit):
    page = visit()
    page.context.set_offline(True)
    page.reload()
    wait_until(page, "!!window.last_band")
    page.click("#tab-digit")
    wait_until(page, "document.getElementById('digit-read').textContent === '1'")


def test_motion_is_reduced_where_that_is_asked(visit):
    page = visit(reduced_motion="reduce")
    told(page, "band.step > 60")
    page.evaluate("""() => {
      window.frames_drawn = 0;
      const context = CanvasRenderingContext2D.prototype, plain = context.clearRect;
      context.clearRect = function (...values) { if (this.canvas.id === "plot") window.frames_drawn += 1; return plain.apply(this, values); };
    }""")
    page.wait_for_timeout(1000)
    assert page.evaluate("window.frames_drawn") <= 4


def test_the_file_opened_is_the_one_that_is_written(address):
    assert pathlib.Path(address.removeprefix("file://")).read_text() == page_html()
