"""The product and the lab: what their two pyproject.toml state fits together."""

import tomllib
from importlib.metadata import version
from typing import Any

from proto.installation import ROOT
from slipstream import __version__


def project(path: str) -> dict[str, Any]:
    """The table `project` of a pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / path).read_text())["project"]
    return found


PRODUCT, LAB = project("pyproject.toml"), project("lab/pyproject.toml")


def test_the_lab_has_the_version_of_the_product_and_needs_it() -> None:
    assert LAB["version"] == __version__
    assert f"slipstream=={__version__}" in LAB["dependencies"]


def test_what_is_installed_is_what_the_checkout_states() -> None:
    """Else the command line would show, and compare, another version than the nodes do."""
    assert version("slipstream") == version("slipstream-lab") == __version__


def test_both_run_on_the_same_machines_under_the_same_licence() -> None:
    for name in ("requires-python", "license", "license-files", "classifiers", "authors"):
        assert LAB[name] == PRODUCT[name], name
    for name in LAB["license-files"]:
        assert (ROOT / "lab" / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_product_needs_none_of_what_only_the_lab_draws_with() -> None:
    extras = PRODUCT["optional-dependencies"]
    stated = [*PRODUCT["dependencies"], *(word for words in extras.values() for word in words)]
    assert not any(word.startswith("matplotlib") for word in stated)
    assert [word for word in stated if word.startswith("scipy")] == extras["lossless"]
