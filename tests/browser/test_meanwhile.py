"""The page while an answer comes, and where the server goes: nothing is lost, nothing is wrong."""

import re
from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.fake_server import faking, pairs

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.browser]

NODE = {
    "name": "target-1",
    "health": "ready",
    "doing": "ready",
    "texts": 0,
    "max_texts": 8,
    "model": "large",
    "device": "cpu:0",
    "dtype": "float32",
    "round_trip_ms": 0.5,
    "round_trip_at_start_ms": 0.5,
}


def begin(page: Any, prompt: str) -> None:
    """Ask, and wait for the first token."""
    page.fill("#prompt", prompt)
    page.click("#go")
    page.locator("#answer .token").first.wait_for()


def says(page: Any, words: str) -> None:
    """Wait until the page's line of state begins with these words."""
    page.locator("#state", has_text=re.compile(f"^{words}")).wait_for()


def test_the_kind_of_the_next_request_can_be_chosen_while_an_answer_comes(open_page: Open) -> None:
    with faking(pairs(10), 100) as url:
        page = open_page(url)
        begin(page, "a text")
        page.locator("label", has_text="Chat").click()
        says(page, "Done")
        assert page.locator("#turns li").count() == 0
        begin(page, "hello")
        page.locator("label", has_text="Continue").click()
        says(page, "Done")
        page.locator("label", has_text="Chat").click()
        assert page.locator("#turns li").count() == 2


def test_a_message_or_a_conversation_that_begins_while_an_answer_comes_is_kept(
    open_page: Open,
) -> None:
    with faking(pairs(10), 100) as url:
        page = open_page(url)
        page.locator("label", has_text="Chat").click()
        begin(page, "first")
        page.fill("#prompt", "second, written meanwhile")
        says(page, "Done")
        assert page.input_value("#prompt") == "second, written meanwhile"
        assert page.locator("#turns li").count() == 2
        begin(page, "third")
        page.click("#fresh")
        says(page, "Done")
        assert page.locator("#turns li").count() == 0


def test_a_server_that_goes_is_said_and_its_nodes_are_not_shown_as_they_were(
    open_page: Open,
) -> None:
    with faking(pairs(2), 10, nodes=[NODE], breaks_off=True) as url:
        page = open_page(url)
        page.locator("#nodes tr", has_text="ready").wait_for()
        page.click("#go")
        says(page, "the answer broke off; ask for it again")
        assert page.locator("#go").is_enabled()
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    line = "The nodes are not known: the server does not answer."
    page.locator("#nodes-state", has_text=line).wait_for()
    assert page.locator("#nodes tr").count() == 0
    page.click("#go")
    says(page, "the server does not answer")
