"""Every link in a page of the documentation leads to a file that exists, and to a heading in it."""

import re
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "models/**/*.md", "deploy/**/*.md", "lab/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    .*$", re.MULTILINE)
IN_BACKTICKS = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
ELSEWHERE = ("http://", "https://", "mailto:")


def links(text: str) -> list[str]:
    """The destinations of the links in a page, other sites left out; code has no links."""
    for code in (FENCED, INDENTED, IN_BACKTICKS):
        text = code.sub("", text)
    return [link for link in LINK.findall(text) if not link.startswith(ELSEWHERE)]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page: `## Ctrl-C, twice`: ctrl-c-twice.

    A heading that occurs again gets -1, -2 ... behind its anchor.
    """
    found: dict[str, int] = {}
    every = set()
    for heading in HEADING.findall(FENCED.sub("", text)):
        words = LINK.sub(lambda link: link.group(0).split("]")[0][1:], heading)
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        times = found.get(anchor, 0)
        found[anchor] = times + 1
        every.add(f"{anchor}-{times}" if times else anchor)
    return every


def dead_links(page: Path) -> list[str]:
    """The links of a page that lead nowhere, each with the reason."""
    dead = []
    for link in links(page.read_text(encoding="utf-8")):
        way, _, anchor = link.partition("#")
        there = (page.parent / way).resolve() if way else page
        if not there.exists():
            dead.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(there.read_text(encoding="utf-8")):
            dead.append(f"{link}: no such heading")
    return dead


def name_of(page: Path) -> str:
    """How a page is called in a test's name."""
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert dead_links(page) == []


def test_the_pages_are_found() -> None:
    names = {name_of(page) for page in PAGES}
    assert {"README.md", "ARCHITECTURE.md", "docs/choosing.md", "models/README.md"} <= names


def test_a_dead_link_and_a_dead_anchor_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One, `two`\n\n## Again\n## Again\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[1](other.md#one-two) [2](#here) [3](other.md#again-1) [4](https://none.invalid)\n"
        "[5](gone.md) [6](other.md#two) [7](#there) `[8](gone.md)`\n\n    [9](gone.md)\n"
        "```\n# There\n```\n",
        encoding="utf-8",
    )
    assert dead_links(page) == [
        "gone.md: no such file",
        "other.md#two: no such heading",
        "#there: no such heading",
    ]
