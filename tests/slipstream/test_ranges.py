"""The ranges of the dependencies: the lock file lies in them, and their lowest versions work."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from proto.installation import ROOT
from tests.slipstream.environments import build_wheel, make_environment

LOCK = ROOT / "requirements" / "lock.txt"
EXTRAS = ("ray", "serve", "structured", "lossless")


def stated() -> list[Requirement]:
    """What the product, its extras of the lock file, and the lab depend on."""
    product, lab = (
        tomllib.loads((ROOT / path).read_text())["project"]
        for path in ("pyproject.toml", "lab/pyproject.toml")
    )
    extras = product["optional-dependencies"]
    words = [*product["dependencies"], *(word for name in EXTRAS for word in extras[name])]
    words += [word for word in lab["dependencies"] if not word.startswith("slipstream==")]
    return [Requirement(one) for one in dict.fromkeys(words)]


def locked() -> dict[str, str]:
    """Versions by name."""
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    return {canonicalize_name(name): version for name, version in (x.split("==") for x in lines)}


def lowest() -> list[str]:
    """The lowest version of every range, but of torch that of the lock file."""
    lines = []
    for one in stated():
        (least,) = (part.version for part in one.specifier if part.operator == ">=")
        lines.append(f"{one.name}=={locked()['torch'] if one.name == 'torch' else least}")
    return lines


def test_the_lock_file_names_versions_of_every_range_and_no_host() -> None:
    versions = locked()
    for one in stated():
        assert one.specifier.contains(versions[canonicalize_name(one.name)]), one
    assert "proto-plus" in versions, "what ray[default] brings is missing"


def test_what_runs_here_is_what_the_lock_file_says() -> None:
    from importlib.metadata import version

    for one in stated():
        assert version(one.name).split("+")[0] == locked()[canonicalize_name(one.name)]


@pytest.mark.slow
@pytest.mark.process
def test_the_lowest_versions_of_all_ranges_write_a_text(tmp_path: Path) -> None:
    """In an environment that sees no other packages."""
    made = make_environment(tmp_path, "environment", sees_ours=False)
    wheels = []
    for name, project in (("product", ROOT), ("lab", ROOT / "lab")):
        (tmp_path / name).mkdir()
        wheels.append(build_wheel(tmp_path / name, project))
    product, lab = wheels
    made.install(
        *lowest(),
        f"slipstream[{','.join(EXTRAS)}] @ file://{product}",
        f"slipstream-lab @ file://{lab}",
    )
    done = made.run("slipstream", "demo", "--max-tokens", "16", limit_s=300)
    assert done.returncode == 0, done.stderr
    assert "text identical" in done.stdout
    short = ("--limit", "1", "--repetitions", "1", "--set", "max_tokens=4", "--out", "results")
    done = made.run("slipstream", "experiment", "policies", *short, limit_s=600)
    assert done.returncode == 0, done.stderr
