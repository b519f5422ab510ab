"""What the pages about the code name is there: files, and what is defined in them."""

import re
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGES, ROOT

PAGES = ("ARCHITECTURE.md", "docs/decisions.md", "docs/glossary.md")
ENDINGS = ("py", "cpp", "js", "css", "html", "toml")
FILE = re.compile(rf"(?<![\w*/.-])[\w/]+\.(?:{'|'.join(ENDINGS)})\b")
NAME = r"`([A-Za-z_][\w.]*)(?:\(\))?`"
# `Turns.turn` (`node/turns.py`), or: `awaited` in `target_node/deciding.py`
IN_A_FILE = re.compile(NAME + r"(?:\s+in\s+|\s+\()`([\w/]+\.py)`")
BEHIND_A_FILE = re.compile(r"\(`([\w/]+\.py)`, " + NAME + r"\)")
# Names of other programs, which our code does not have.
OTHERS = {"DecodeStream", "batched_mm", "llama.cpp"}


def files() -> list[str]:
    """All files of the repository's folders, without hidden ones."""
    tops = (path for path in ROOT.iterdir() if not path.name.startswith("."))
    below = (path for top in tops for path in (top.rglob("*") if top.is_dir() else (top,)))
    return [path.relative_to(ROOT).as_posix() for path in below if path.suffix[1:] in ENDINGS]


FILES = files()
HERE = Path(__file__).relative_to(ROOT).as_posix()


def found(name: str) -> list[str]:
    """The files that a page may mean by this name, of which the beginning may be left out."""
    return [file for file in FILES if f"/{file}".endswith(f"/{name}")]


def words_in(files: list[str]) -> set[str]:
    """All words of these files."""
    texts = (Path(ROOT, file).read_text(encoding="utf-8") for file in files)
    return {word for text in texts for word in re.findall(r"\w+", text)}


def missing_files(page: str) -> list[str]:
    """The files that a page names and that are not there."""
    return sorted({name for name in FILE.findall(page) if not found(name)} - OTHERS)


def missing_names(page: str, known: set[str]) -> list[str]:
    """The names in backticks of which a part does not occur in the code."""
    names = re.findall(NAME, FILE.sub("", page))
    return sorted({name for name in names if not set(name.split(".")) <= known})


def misplaced(page: str) -> list[str]:
    """What does not occur in the file that a page names for it."""
    pairs = IN_A_FILE.findall(page)
    pairs += [(name, file) for file, name in BEHIND_A_FILE.findall(page)]
    return [
        f"{name} in {file}"
        for name, file in pairs
        if name.split(".")[-1] not in words_in(found(file))
    ]


def code() -> set[str]:
    """All words of the code and of its tests, this one left out, with names of other programs."""
    tops = {*PACKAGES, "tests"}
    return (
        words_in([file for file in FILES if file.split("/")[0] in tops and file != HERE]) | OTHERS
    )


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_about_the_code_names_is_there(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert missing_files(page) == []
    assert missing_names(page, code()) == []
    assert misplaced(page) == []


def test_what_is_gone_is_found() -> None:
    page = (
        "`gone_for_good.py`, node/turns.py (pure), `Turns.turn` (`node/turns.py`), "
        "`Turns.turn` in `proto/tree.py`, (`node/turns.py`, `no_such_rule`), `no_such_rule()`"
    )
    assert missing_files(page) == ["gone_for_good.py"]
    assert missing_names(page, code()) == ["no_such_rule"]
    assert misplaced(page) == ["Turns.turn in proto/tree.py", "no_such_rule in node/turns.py"]
