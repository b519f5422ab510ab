"""Figures, the timeline and the keyboard of the page, on answers that are made up."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.fake_server import faking, pairs

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.browser]

# How two texts compare, of which each has the lengths of passes in ms, and a share of passes with
# drafts that make two more tokens.
COMPARED = """async ([times, drafted, plain]) => {
  const { Figures, compared } = await import("/page/figures.js");
  const made = (lengths, share) => {
    const figures = new Figures();
    let end_ms = 0;
    lengths.forEach((ms, at) => {
      end_ms += ms;
      const has = at % 10 < 10 * share;
      figures.pass({ end_ms, drafted: has ? 3 : 0, accepted: has ? 2 : 0, tokens: has ? 3 : 1,
        cause: has ? "ready" : "resting" });
    });
    return figures;
  };
  return compared(made(times, drafted), made(plain, 0));
}"""
# Why passes had no drafts, of which there were so many of each cause, beside others with drafts.
WHY = """async ([causes, others]) => {
  const { Figures, whyAlone } = await import("/page/figures.js");
  const figures = new Figures();
  const add = (times, cause, drafted) => {
    for (let at = 0; at < times; at += 1) {
      figures.pass({ end_ms: figures.passes, drafted, accepted: 0, tokens: 1, cause });
    }
  };
  add(1, "quiet", 0); // it reads the prompt
  for (const [cause, times] of Object.entries(causes)) add(times, cause, 0);
  add(others, "ready", 3);
  return whyAlone(figures);
}"""
NOTHING = "\u2013"  # a dash, in the place of a figure
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


def test_where_the_drafter_rests_it_is_said_in_view_and_drafts_are_one_click_away(
    open_page: Open, keep: Callable[[Any, str], None]
) -> None:
    with faking(pairs(40), 5, rests=True) as url:
        page = open_page(url)
        page.click("#go")
        says(page, "Done: 80 tokens")
        words = page.locator("#rest:visible p").text_content()
        assert words == (
            "The drafter rests: plain decoding was measured to be faster here. 39 of 39 passes had "
            "no drafts."
        )
        keep(page, "resting")
        page.click("#show-drafts")
        says(page, "Done: 80 tokens at .* of the drafts accepted")
        assert page.input_value("#policy") == "tree"
        assert page.locator("#rest").is_hidden()


def test_drafts_of_a_chat_are_shown_without_a_second_turn(open_page: Open) -> None:
    with faking(pairs(40), 5, rests=True) as url:
        page = open_page(url)
        page.locator("label", has_text="Chat").click()
        page.fill("#prompt", "hello")
        page.click("#go")
        says(page, "Done: 80 tokens")
        page.click("#show-drafts")
        says(page, "Done: 80 tokens at .* of the drafts accepted")
        assert page.locator("#turns li").count() == 2


def test_two_texts_of_plain_decoding_are_not_compared(open_page: Open) -> None:
    with faking(pairs(40), 5, plain=pairs(40), rests=True) as url:
        page = open_page(url)
        page.click("#go")
        says(page, "Done: 80 tokens")
        page.click("#compare")
        page.locator("#verdict", has_text="so their speeds are not compared").wait_for()
        assert page.locator("#against").text_content() == NOTHING


@pytest.mark.parametrize(
    ("times", "share", "plain", "expected"),
    [
        ([10.0] * 40, 1.0, [10.0] * 120, (2.5, 3, 3.5)),  # 3 tokens a pass for one
        ([10.0] * 40, 0.1, [10.0] * 40, "plain decoding"),
        ([10.0] * 20, 1.0, [10.0] * 120, "too short"),
        ([10.0, 50.0] * 20, 1.0, [10.0] * 120, (0.8, 1, 1.3)),
    ],
)
def test_a_ratio_has_an_interval_or_is_not_shown(
    open_page: Open, times: list[float], share: float, plain: list[float], expected: Any
) -> None:
    with faking([]) as url:
        found = open_page(url).evaluate(COMPARED, [times, share, plain])
    if isinstance(expected, str):
        assert expected in found["why"]
        return
    least, ratio, most = expected
    assert found["ratio"] == pytest.approx(ratio, rel=0.05)
    assert least < found["low"] < ratio < found["high"] < most


@pytest.mark.parametrize(
    ("causes", "others", "why"),
    [
        ({"resting": 30, "late": 40}, 30, "The drafter rests"),
        ({"resting": 30}, 70, "The drafter rests"),
        ({"resting": 10, "late": 15}, 75, None),
        ({"late": 30}, 70, None),
        ({"late": 60}, 40, "The drafts came too late"),
        ({"alone": 100}, 0, "Nobody drafted"),
        ({"resting": 7}, 0, None),  # it is too early to say
    ],
)
def test_it_is_said_why_drafts_are_missing_where_many_are(
    open_page: Open, causes: dict[str, int], others: int, why: str | None
) -> None:
    with faking([]) as url:
        found = open_page(url).evaluate(WHY, [causes, others])
    if why is None:
        assert found is None
        return
    assert found["why"].startswith(why)
    assert found["canShow"] is (why != "Nobody drafted")
    assert found["counts"].startswith(f"{sum(causes.values())} of {sum(causes.values()) + others} ")


def test_a_ratio_that_may_be_noise_is_called_unclear(open_page: Open) -> None:
    """Both write two tokens a pass, at the same speed."""
    with faking(pairs(60), 8, plain=pairs(60)) as url:
        page = open_page(url)
        page.click("#go")
        says(page, "Done")
        page.click("#compare")
        page.locator("#verdict", has_text="do not differ by more than noise").wait_for()
        shown = page.locator("#against").text_content()
        assert re.fullmatch(r"unclear0\.\d\d to 1\.\d\d \u00d7", shown)


@pytest.mark.parametrize("rests", [False, True])
def test_in_a_narrow_window_the_answer_is_in_view(
    open_page: Open, keep: Callable[[Any, str], None], *, rests: bool
) -> None:
    with faking(pairs(40), 5, rests=rests) as url:
        page = open_page(url, 400)
        page.set_viewport_size({"width": 400, "height": 700})
        assert page.locator("#temperature").is_hidden()  # the settings are folded
        page.click("#go")
        says(page, "Done")
        box = page.locator("#answer").bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= 700
        if rests:
            words = page.locator("#rest").bounding_box()
            assert 0 <= words["y"] < box["y"]
        keep(page, f"narrow-{rests}")
        page.locator("#settings summary").click()
        assert page.locator("#temperature").is_visible()


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
