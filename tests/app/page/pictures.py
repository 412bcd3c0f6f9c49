"""Pictures of every scene to look at: python -m tests.app.page.pictures FOLDER [NAME ...]

On a desktop and a phone, light and dark, after a while of training. `documentation` is the picture in docs/images.
"""

import pathlib
import shutil
import sys
import tempfile

from dropbayes.app.page import page_html

SCENES = ("gap", "clusters", "step", "noise", "co2", "solar", "figure2")
DEVICES = {
    "desktop": {"viewport": {"width": 1280, "height": 800}},
    "phone": {"viewport": {"width": 360, "height": 740}, "has_touch": True},
}
DOCUMENTATION = "scene=gap&draws=1&oneDraw=1&process=1"
TRAINED = 1500
"""Steps after which a band looks as it will."""


def shots():
    """The name of each picture with its address and what the browser is."""
    for device, options in DEVICES.items():
        for scheme in ("light", "dark"):
            look = options | {"color_scheme": scheme}
            for scene in SCENES:
                yield f"{scene}_{device}_{scheme}", f"scene={scene}", look
            yield f"world_{device}_{scheme}", "tab=world", look
            yield f"digit_{device}_{scheme}", "tab=digit", look
    yield "documentation", DOCUMENTATION, {"viewport": {"width": 1240, "height": 860}, "color_scheme": "light"}


def photograph(browser, address, fragment, options, path):
    page = browser.new_page(**options)
    page.goto(f"{address}#{fragment}")
    if "tab=world" in fragment:
        page.fill("#speed", "8")
        page.click("#world-run")
        page.wait_for_timeout(8000)
    elif "tab=digit" in fragment:
        page.fill("#angle", "50")
        page.wait_for_timeout(500)
    else:
        for _ in range(100):
            words = page.inner_text("#status").split()
            if "settled" in words or (words and int(words[-1]) >= TRAINED):
                break
            page.wait_for_timeout(250)
        page.click("#run")
        page.wait_for_timeout(400)
    # That of the documentation ends between two lines of text.
    clip = {"x": 0, "y": 0, "width": 1240, "height": 826} if path.stem == "documentation" else None
    page.screenshot(path=path, clip=clip, full_page="phone" in path.name)
    page.close()


def main(folder, names):
    from playwright.sync_api import sync_playwright

    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as running:
        file = pathlib.Path(temporary) / "page.html"
        file.write_text(page_html())
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, fragment, options in shots():
            if not names or name in names:
                photograph(browser, file.as_uri(), fragment, options, folder / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
