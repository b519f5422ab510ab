"""The draws that are stored are those that a search finds."""

from pathlib import Path

import pytest

from tests import draws, families, tiny_models


def found(name: str) -> int:
    """What a search finds for the recipe of this name in `draws.json`."""
    kind, *words = name.split()
    if kind == "family":
        return families.search(words[0])
    architecture, seed, vocab = words
    return tiny_models.search(architecture, int(seed), int(vocab))


def test_a_stored_draw_is_the_first_good_one() -> None:
    name = tiny_models.name_of("llama")
    assert found(name) == draws.stored()[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(draws.stored()))
def test_so_is_every_other(name: str) -> None:
    assert found(name) == draws.stored()[name]


def test_a_model_is_made_once_and_every_folder_has_a_copy_of_its_own(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(into: Path) -> None:
        made.append(into)
        into.mkdir()
        (into / "config.json").write_text("{}")

    key = ("test", str(tmp_path))
    first, second = (draws.made_once(key, make, tmp_path / name) for name in "ab")
    (first / "config.json").write_text("changed")
    third = draws.made_once(key, make, tmp_path / "c")
    assert len(made) == 1
    assert (second / "config.json").read_text() == (third / "config.json").read_text() == "{}"


def test_the_first_good_draw_is_found_and_none_where_there_is_none() -> None:
    assert draws.first_good(lambda number: number >= 3, 5) == 3
    assert draws.first_good(lambda number: number >= 5, 5) is None
