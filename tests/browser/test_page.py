"""The page in Chromium: what it shows of a text, and that it leaves nothing behind."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from coordinator.api.pair import Pair
from tests.browser.conftest import Open
from tests.browser.fake_server import faking, pairs
from tests.process.served import Served, serving

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.browser]

KEY = "a-key-of-enough-letters"
PROMPT = "class Reader:\n    def __init__(self, path):\n        "
WIDTHS = (1280, 400)
NUM_COLOURS = (
    "canvas => new Set(new Uint32Array(canvas.getContext('2d')"
    ".getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size"
)
FITS = "document.documentElement.scrollWidth <= innerWidth"
HOSTILE = "<img src=x onerror=alert(1)></div><script>alert(2)</script>\x07\x1b[31m\u202e\u061c\xad"
SHOWN = "<img src=x onerror=alert(1)></div><script>alert(2)</script>␇␛[31m[U+202E][U+061C][U+00AD]"


@pytest.fixture(autouse=True)
def _nothing_is_left(server: Served) -> Iterator[None]:
    yield
    server.wait_until_idle()


def says(page: Any, words: str) -> None:
    """Wait until the page's line of state begins with these words."""
    page.locator("#state", has_text=re.compile(f"^{words}")).wait_for()


def generate(page: Any, prompt: str = PROMPT, **settings: Any) -> None:
    """Fill in the form and send it."""
    page.fill("#prompt", prompt)
    for name, value in settings.items():
        page.fill(f"#{name.replace('_', '-')}", str(value))
    page.click("#go")


def lines_of(page: Any, box: str) -> str:
    """The text in a box of an answer."""
    return "\n".join(page.locator(f"{box} .line").all_text_contents())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("scheme", "motion"), [("light", "no-preference"), ("dark", "reduce")])
def test_a_text_is_shown_with_origins_and_timeline_and_compared_with_plain_decoding(
    server: Served,
    open_page: Open,
    keep: Callable[[Any, str], None],
    width: int,
    scheme: str,
    motion: str,
) -> None:
    page = open_page(server.url, width, color_scheme=scheme, reduced_motion=motion)
    blank = page.locator("#timeline").evaluate(NUM_COLOURS)
    if width < 860:
        page.locator("#settings summary").click()
    page.select_option("#policy", "sync")  # under it drafts are waited for, also on a busy machine
    generate(page, max_tokens=160)
    says(page, "Done: 160 tokens")
    expected = server.complete(PROMPT, temperature=0, max_tokens=160)["choices"][0]["text"]
    assert lines_of(page, "#answer") == expected
    assert page.locator("#answer .token.model").count() > 0
    assert page.locator("#answer .token.own").count() > 0
    assert page.locator("#timeline").evaluate(NUM_COLOURS) > blank + 3
    page.locator("#answer").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip:visible").text_content().startswith("rejected ")
    keep(page, f"answer-{scheme}-{width}")
    page.locator("#timeline").press("ArrowRight")
    assert page.locator("#moment").text_content().startswith("Pass ")
    page.click("#compare")
    page.locator("#verdict", has_text="Same text").wait_for()
    assert lines_of(page, "#plain") == expected
    assert page.locator("#plain .token.model").count() == 0
    assert page.locator("#nodes tr", has_text="ready").count() == 2
    assert page.evaluate(FITS)
    keep(page, f"compared-{scheme}-{width}")


def test_a_generation_that_is_stopped_leaves_no_text(server: Served, open_page: Open) -> None:
    page = open_page(server.url)
    generate(page, max_tokens=1900)
    page.locator("#answer .token").first.wait_for()
    page.click("#stop")
    says(page, "Stopped")
    server.wait_until_idle()
    assert page.locator("#compare").is_disabled()
    page.locator("#prompt").press("Control+Enter")
    page.locator("#answer .token").first.wait_for()
    page.keyboard.press("Escape")
    says(page, "Stopped")
    generate(page, max_tokens=8)
    says(page, "Done: 8 tokens")


def test_how_far_a_long_prompt_was_read_is_shown_until_the_text_comes(open_page: Open) -> None:
    with faking(pairs(3), pass_ms=700.0) as url:
        page = open_page(url)
        generate(page)
        says(page, "Reading the prompt: 6,144 of 8,000 tokens")
        says(page, "Generating")
        says(page, "Done: 6 tokens")
        assert lines_of(page, "#answer").startswith("word")


def test_where_plain_decoding_differs_is_shown(open_page: Open) -> None:
    tokens = [{"id": 1, "text": text, "origin": "bonus"} for text in ("one ", "two ", "three")]
    other = {**tokens[2], "text": "<b>four\u202e</b>"}
    with faking([tokens], plain=[[*tokens[:2], other]]) as url:
        page = open_page(url)
        generate(page)
        says(page, "Done")
        page.click("#compare")
        line = page.locator("#verdict", has_text="Different after 8 characters").text_content()
    assert '"three" with speculation, "<b>four[U+202E]</b>" without' in line


def test_a_model_with_a_chat_template_opens_in_a_chat_with_a_question(open_page: Open) -> None:
    for has_one in (True, False):
        with faking(pairs(3), has_chat_template=has_one) as url:
            page = open_page(url)
            page.locator("#model", has_text="fake").wait_for()
            assert page.is_checked("input[value=chat]") == has_one
            assert page.input_value("#prompt").startswith("How do tides") == has_one
            page.click("#go")
            says(page, "Done: 6 tokens")
            assert page.locator("#turns li").count() == (2 if has_one else 0)


def test_html_and_control_characters_are_text_in_prompts_and_answers(
    server: Served, open_page: Open
) -> None:
    page = open_page(server.url)
    page.locator("label", has_text="Chat").click()
    generate(page, HOSTILE, max_tokens=4)
    says(page, "Done")
    assert SHOWN in page.locator("#turns").text_content()
    token = {"id": 1, "text": HOSTILE, "origin": "recovered", "rejected": HOSTILE}
    with faking([[token]]) as url:
        other = open_page(url)
        generate(other)
        says(other, "Done")
        assert lines_of(other, "#answer") == SHOWN
        other.locator("#answer .missed").hover()
        assert SHOWN in other.locator("#tip").text_content()
        for opened in (page, other):
            assert opened.locator("main img, main script").count() == 0


def test_a_key_is_asked_for_and_kept_in_memory_alone(embedded: Pair, open_page: Open) -> None:
    with serving(embedded, keys=[KEY]) as served:
        page = open_page(served.url)
        generate(page, max_tokens=8)
        for key in ("not-the-key-of-this-server", "kein-Schlüssel-\u20ac", KEY):
            page.locator("#key-dialog[open]").wait_for()
            page.fill("#key", key)
            page.locator("#key-form button.main").click()
        says(page, "Done: 8 tokens")
        page.locator("#nodes tr").first.wait_for()
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0
        assert page.context.cookies() == []
        page.reload()
        generate(page, max_tokens=8)
        page.locator("#key-dialog[open]").wait_for()
