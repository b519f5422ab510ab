"""A browser, pages of two widths, and the embedded pair behind a server.

Debian's Chromium is driven by playwright, which brings no browser here. Where one of them is
missing, these tests are skipped.
"""

import importlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.config import PairConfig
from coordinator.api.pair import Pair
from tests.process.served import Served, serving

QUIET = (
    *("--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
)
Open = Callable[..., Any]  # (URL, width) to a page of playwright


@pytest.fixture(scope="session")
def chromium() -> str:
    """Where Chromium is; without it, or without playwright, the test is skipped."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium")
    return program


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """Chromium without a window, with a profile of its own that is removed at the end.

    Not for longer than a file: as long as playwright is there an event loop runs in this thread,
    and tests elsewhere that start one of their own would fail.
    """
    driving = importlib.import_module("playwright.sync_api")
    with driving.sync_playwright() as started:
        # playwright adds --headless and a --user-data-dir of its own.
        found = started.chromium.launch(
            executable_path=chromium, args=list(QUIET), chromium_sandbox=False
        )
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens pages; at the end none of them may have met an error or asked another server."""
    contexts, troubles = [], []

    def opened(url: str, width: int = 1280, **settings: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: troubles.append(f"a dialog: {dialog.message}"))
        page.on(
            "request",
            lambda asked: None if asked.url.startswith(url) else troubles.append(asked.url),
        )
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []


@pytest.fixture
def keep(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Any, str], None]:
    """Keeps a screenshot in the folder of --screenshots, or in that of the test."""
    folder = Path(request.config.getoption("--screenshots") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)

    def kept(page: Any, name: str) -> None:
        # As high as the page: what lies outside of the window is not drawn.
        size = page.viewport_size
        height = page.evaluate("document.documentElement.scrollHeight")
        page.set_viewport_size({**size, "height": height})
        page.screenshot(path=folder / f"{name}.png")
        page.set_viewport_size(size)

    return kept


@pytest.fixture(scope="session")
def embedded(chromium: str) -> Iterator[Pair]:
    """The embedded pair in float32, with room for texts that take a while.

    It is not started where there is no browser.
    """
    del chromium
    config = PairConfig(dtype="float32", drafter_dtype="float32", max_model_len=2048)
    with Pair(config) as pair:
        yield pair


@pytest.fixture(scope="session")
def server(embedded: Pair) -> Iterator[Served]:
    """A server without a key."""
    with serving(embedded) as served:
        yield served
