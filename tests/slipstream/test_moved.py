"""A checkout with an environment in it that is moved, as far as the link to the package goes."""

import shutil
from pathlib import Path

import pytest
from ray.autoscaler._private.util import hash_runtime_conf

from slipstream import linking


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with an environment that has just been linked to it."""
    root = tmp_path / "checkout"
    package = root / "slipstream"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    packages = root / ".venv" / "lib" / "python3" / "site-packages"
    packages.mkdir(parents=True)
    (root / ".venv" / "bin").mkdir()
    monkeypatch.setattr(linking, "PACKAGE", package)
    linking.link(Path("python"), packages, root / ".venv" / "bin")
    return root


def hashed(root: Path) -> str:
    """What `ray up` makes of all that it would copy."""
    _, contents = hash_runtime_conf({"~/slipstream": str(root)}, None, "", True)
    assert contents is not None
    return contents


def test_ray_can_read_a_checkout_that_was_moved(checkout: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    hashed(checkout)
    checkout.rename(moved)
    hashed(moved)
    link = next(moved.glob(".venv/lib/*/site-packages/slipstream"))
    assert link.is_symlink()
    assert link.resolve() == moved / "slipstream"


def test_the_environment_of_a_copy_uses_the_copy(checkout: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkout, copy, symlinks=True)
    link = next(copy.glob(".venv/lib/*/site-packages/slipstream"))
    assert link.resolve() == copy / "slipstream"


def test_an_environment_elsewhere_is_linked_to_the_place_of_the_checkout(
    checkout: Path, tmp_path: Path
) -> None:
    packages, scripts = tmp_path / "site-packages", tmp_path / "bin"
    packages.mkdir()
    scripts.mkdir()
    linking.link(Path("python"), packages, scripts)
    assert (packages / "slipstream").readlink() == checkout / "slipstream"
