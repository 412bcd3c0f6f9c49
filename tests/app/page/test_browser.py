"""The tab of points in a real browser: every control, hands and keys; never an error or a request."""

import random

import pytest

from tests.app.page.browsing import plot_position, status_says, told, wait_until

pytestmark = pytest.mark.slow  # minutes of a real browser

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
    x, y = plot_position(page, 0.7, 0.3)
    page.mouse.click(x, y)
    status_says(page, "2 points")
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(*plot_position(page, 0.8, 0.6), steps=5)
    page.mouse.up()
    wait_until(page, "/points=0_0\\.[1-9]\\d+_-/.test(decodeURIComponent(location.hash))")  # now below zero
    status_says(page, "2 points")
    page.mouse.click(*plot_position(page, 0.8, 0.6), button="right")
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
    page.touchscreen.tap(*plot_position(page, 0.3, 0.4))
    status_says(page, "2 points")
    x, y = plot_position(page, 0.3, 0.4)
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


@pytest.mark.parametrize("n_events", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_events_do_no_harm(visit, n_events):
    page, chance = visit(), random.Random(5)
    keys = ["Tab", "Shift+Tab", "Enter", " ", "Delete", "Escape", "Home", "End", "a", "7", "-", "PageDown"]
    keys += ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"]
    for _ in range(n_events):
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
