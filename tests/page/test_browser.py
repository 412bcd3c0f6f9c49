"""The page in a real browser: every control, hands and keys, sizes, paper, no connection; never an error or a request."""

import io
import pathlib
import random
import shutil
import threading
import types
from typing import Any

import numpy as np
import pytest

from dropbayes.page import PageServer, page_html

RECORDER = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
const Plain = window.Worker;
window.Worker = class extends Plain {
  constructor(...values) {
    super(...values);
    this.addEventListener("message", ({ data }) => { window[`last_${data.task}`] = data; });
  }
};
"""
TABS = ("points", "world", "digit")


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


def wait_until(page, condition, arg=None):
    """Waits for a condition. Playwright's own way needs `eval` in the page, which its policy forbids."""
    for _ in range(600):
        if page.evaluate(condition, arg):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"waited in vain for {condition}")


def told(page, condition):
    """Waits until what the worker last said of the band fulfils a condition."""
    wait_until(page, f"(() => {{ const band = window.last_band; return {condition}; }})()")


def status_says(page, text):
    wait_until(page, "text => document.getElementById('status').textContent.includes(text)", arg=text)


def place(page, x, y):
    """Pixels of a share of the plot, from its top left corner."""
    box = page.locator("#plot").bounding_box()
    return box["x"] + x * box["width"], box["y"] + y * box["height"]


# What is on the screen ------------------------------------------------------------------------------------------------


def test_the_band_is_there_and_trains(visit):
    page = visit("scene=gap")
    status_says(page, "24 points")
    step = page.evaluate("window.last_band.step")
    told(page, f"band.step > {step}")
    assert page.evaluate("window.last_band.mean.every(Number.isFinite)")


def test_every_scene_opens_with_its_points_and_note(visit):
    page = visit()
    for scene in ("clusters", "step", "noise", "co2", "solar", "figure2", "gap"):
        page.click(f"[data-scene={scene}]")
        wait_until(page, f"new URLSearchParams(location.hash.slice(1)).get('scene') === '{scene}'")
        assert page.get_attribute(f"[data-scene={scene}]", "aria-current") == "true"
        assert page.locator("#scenes [aria-current=true]").count() == 1
        assert len(page.inner_text("#note")) > 60
        assert int(page.inner_text("#status").split()[0]) >= 20


def test_every_slider_reaches_the_network_and_the_address(visit):
    page = visit()
    for name in ("dropProb", "width", "depth", "precision", "lengthScale", "nDraws"):
        before, shown = page.evaluate(f"window.last_band.settings.{name}"), page.inner_text(f"#{name}-value")
        page.focus(f"#{name}")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        told(page, f"band.settings.{name} > {before}")
        assert page.inner_text(f"#{name}-value") != shown
        wait_until(page, f"new URLSearchParams(location.hash.slice(1)).has('{name}')")


def test_checkboxes_choices_and_numbers_reach_the_network(visit):
    page = visit()
    for name in ("total", "epistemic", "mean", "draws", "oneDraw", "standard", "process", "learnPrecision"):
        before = page.is_checked(f"#{name}")
        page.click(f"#{name}")
        told(page, f"band.settings.{name} === {str(not before).lower()}")
    wait_until(page, "!!window.last_process")
    assert page.is_visible("#ratio") and page.is_disabled("#precision")
    for name, value in (("activation", "tanh"), ("covariance", "cosine"), ("covariance", "erf")):
        page.select_option(f"#{name}", value)
        told(page, f"band.settings.{name} === '{value}'")
    for name, value in (("seed", 11), ("draw", 2)):
        page.fill(f"#{name}", str(value))
        told(page, f"band.settings.{name} === {value}")


def test_buttons_erase_clear_restart_and_pause(visit):
    page = visit()
    page.click("#erase")
    assert page.get_attribute("#erase", "aria-pressed") == "true"
    page.click("#restart")
    told(page, "band.settings.seed === 4")
    page.click("#run")
    status_says(page, "paused")
    page.click("#clear")
    status_says(page, "click to add points")
    page.click("#why")
    assert page.is_visible("#limits")
    page.keyboard.press("Escape")
    assert not page.is_visible("#limits")


def test_learning_the_noise_finds_its_level(visit):
    page = visit("scene=noise&depth=1&width=20&nDraws=5")
    residual = 0.18 * 2 + 0.03  # the deviation in the middle of the scene
    told(page, f"Math.abs(Math.log(band.precision * {residual**2})) < 1 && band.step > 300")


# Hands and keys -------------------------------------------------------------------------------------------------------


def test_a_click_adds_a_point_a_drag_moves_it_and_a_right_click_erases_it(visit):
    page = visit("points=0_0")
    x, y = place(page, 0.7, 0.3)
    page.mouse.click(x, y)
    status_says(page, "2 points")
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(*place(page, 0.8, 0.6), steps=5)
    page.mouse.up()
    wait_until(page, "/points=0_0\\.[1-9]\\d+_-/.test(decodeURIComponent(location.hash))")  # now below zero
    status_says(page, "2 points")
    page.mouse.click(*place(page, 0.8, 0.6), button="right")
    status_says(page, "1 point ")


def test_the_eraser_wipes_points_away(visit):
    page = visit("points=" + ".".join(f"{x}_0" for x in range(-2000, 2001, 500)))
    page.click("#erase")
    x, y = page.evaluate(
        "(() => { const b = document.getElementById('plot').getBoundingClientRect(); return [b.left, b.top + 10 + (b.height - 36) / 2]; })()"
    )
    page.mouse.move(x + 50, y)
    page.mouse.down()
    page.mouse.move(x + page.locator("#plot").bounding_box()["width"] - 20, y, steps=150)
    page.mouse.up()
    status_says(page, "click to add points")


def test_a_finger_adds_points_and_erases_one_by_holding(visit):
    page = visit("points=0_0", has_touch=True, viewport={"width": 360, "height": 700})
    page.locator("#plot").scroll_into_view_if_needed()
    page.touchscreen.tap(*place(page, 0.3, 0.4))
    status_says(page, "2 points")
    x, y = place(page, 0.3, 0.4)
    page.evaluate(
        "([x, y]) => document.getElementById('plot').dispatchEvent("
        "new PointerEvent('pointerdown', { pointerId: 9, pointerType: 'touch', clientX: x, clientY: y, button: 0 }))",
        [x, y],
    )
    status_says(page, "1 point ")


def test_the_keyboard_alone_adds_and_erases_points_and_hears_about_them(visit):
    page = visit("points=0_0")
    page.focus("#plot")
    for key in ("Shift+ArrowRight", "ArrowUp", "Enter"):
        page.keyboard.press(key)
    status_says(page, "2 points")
    assert "Point added, 2 in all" in page.inner_text("#spoken")
    page.keyboard.press("ArrowLeft")
    assert "epistemic deviation" in page.inner_text("#spoken")
    page.keyboard.press("Delete")
    status_says(page, "1 point ")


def test_a_thousand_random_events_do_no_harm(visit):
    page, chance = visit(), random.Random(5)
    keys = ["Tab", "Shift+Tab", "Enter", " ", "Delete", "Escape", "Home", "End", "a", "7", "-", "PageDown"]
    keys += ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"]
    for _ in range(1000):
        kind = chance.random()
        if kind < 0.35:
            page.keyboard.press(chance.choice(keys))
        elif kind < 0.75:
            page.mouse.move(chance.uniform(0, 1100), chance.uniform(0, 760))
        else:
            chance.choice([page.mouse.down, page.mouse.up])(button=chance.choice(["left", "left", "right"]))
    page.mouse.up()
    page.keyboard.press("Escape")
    page.click("#tab-points")
    page.click("[data-scene=gap]")
    status_says(page, "24 points")


def test_pens_that_leave_and_fingers_that_cross_do_no_harm(visit):
    page = visit()
    page.evaluate("""() => {
      const plot = document.getElementById("plot");
      const box = plot.getBoundingClientRect();
      let state = 12345;
      const random = () => (state = (state * 1103515245 + 12345) % 2147483648) / 2147483648;
      const names = ["pointerdown", "pointermove", "pointerup", "pointercancel"];
      for (let k = 0; k < 1000; k += 1) {
        plot.dispatchEvent(new PointerEvent(names[Math.floor(random() * 4)], {
          pointerId: Math.floor(random() * 4), pointerType: ["mouse", "touch", "pen"][Math.floor(random() * 3)],
          clientX: box.left + (random() * 1.4 - 0.2) * box.width, clientY: box.top + (random() * 1.4 - 0.2) * box.height,
          button: Math.floor(random() * 3), bubbles: true,
        }));
      }
    }""")
    page.click("[data-scene=gap]")
    status_says(page, "24 points")


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
    page.click("#digit-turn")
    wait_until(page, "document.getElementById('angle-value').textContent !== '55°'")


def test_a_digit_drawn_by_hand_is_read(visit):
    page = visit("tab=digit")
    page.locator("#digit-pad").scroll_into_view_if_needed()
    box = page.locator("#digit-pad").bounding_box()
    wait_until(page, "document.getElementById('digit-read').textContent !== ''")  # the digit it opens with
    page.click("#digit-clear")
    wait_until(page, "document.getElementById('digit-read').textContent === ''")
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
    for width in (360, 768, 1280, 2560, 3840):
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
