"""Waiting for what a page shows, and where its plot is."""

import pytest

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


def plot_position(page, x, y):
    """Pixels of a share of the plot, from its top left corner."""
    box = page.locator("#plot").bounding_box()
    return box["x"] + x * box["width"], box["y"] + y * box["height"]
