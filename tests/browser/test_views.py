"""Figures, the timeline and the keyboard of the page, on answers that are made up."""

import re
from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.fake_server import faking, pairs

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.browser]

OVERLAP = """async () => {
  const { Timeline } = await import("/page/timeline.js");
  const made = new Timeline(document.createElement("canvas"), document.createElement("p"));
  const span = (device, begin_ms, end_ms) =>
    ({ device, begin_ms, end_ms, number: begin_ms, steps: 1, tokens: 1, depth: 1, decided: [] });
  made.add([span("target", 0, 4), span("target", 4, 8), span("target", 8, 12)]);
  made.add([span("drafter", 9, 11), span("drafter", 0, 12)]);
  return made.overlap();
}"""

WIDE = """() => {
  document.getElementById("acceptance").textContent = "100\u00a0% of 24576";
  const isWide = (one) => one.scrollWidth > one.clientWidth;
  return [...document.querySelectorAll("dd")].filter(isWide).length;
}"""
KEEPS = """([id, key, held]) => {
  const event = new KeyboardEvent("keydown", { key, [held]: true, cancelable: true });
  return document.getElementById(id).dispatchEvent(event);
}"""


def says(page: Any, words: str) -> None:
    """Wait until the page's line of state begins with these words."""
    page.locator("#state", has_text=re.compile(f"^{words}")).wait_for()


def test_tokens_per_pass_and_overlap_are_what_their_names_say(open_page: Open) -> None:
    with faking(pairs(4), 10) as url:
        page = open_page(url, device_scale_factor=1.1)
        page.click("#go")
        says(page, "Done: 8 tokens")
        page.locator("#per-pass", has_text="2.00").wait_for()
        # Of two drafters, whose spans lie over each other, both have computed beside passes only.
        assert page.evaluate(OVERLAP) == 1
        page.evaluate("document.getElementById('timeline').getContext('2d').lineCap = 'round'")
        page.click("#nearer")
        page.evaluate("new Promise((done) => setTimeout(done, 200))")
        # A canvas whose size is set anew forgets its pen.
        pen = "document.getElementById('timeline').getContext('2d').lineCap"
        assert page.evaluate(pen) == "round"


def test_a_new_answer_is_followed_and_the_button_says_so(open_page: Open) -> None:
    with faking(pairs(2), 10) as url:
        page = open_page(url)
        page.click("#follow")
        assert page.get_attribute("#follow", "aria-pressed") == "false"
        page.click("#go")
        says(page, "Done")
        assert page.get_attribute("#follow", "aria-pressed") == "true"


@pytest.mark.parametrize("width", [1280, 1200, 400])
def test_figures_of_a_long_answer_fit(open_page: Open, width: int) -> None:
    with faking([]) as url:
        assert open_page(url, width).evaluate(WIDE) == 0


def test_keys_of_the_browser_are_left_to_it(open_page: Open) -> None:
    token = {"id": 1, "text": "word", "origin": "recovered", "rejected": " no"}
    with faking([[token]]) as url:
        page = open_page(url)
        page.click("#go")
        says(page, "Done")
        for where, key, held in (
            ("timeline", "+", "ctrlKey"),
            ("timeline", "ArrowLeft", "altKey"),
            ("answer", "ArrowLeft", "altKey"),
        ):
            assert page.evaluate(KEEPS, [where, key, held])
