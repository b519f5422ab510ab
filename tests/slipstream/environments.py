"""Virtual environments in which Slipstream is installed as its users do, and a folder elsewhere.

What such an environment lacks it finds in that of the tests, whose packages stand behind its own,
but for Slipstream itself.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from proto.installation import ROOT

LIMIT_S = 60.0
INSTALL_LIMIT_S = 600.0
# What setuptools builds goes to a temporary folder, and not into the checkout.
CONFIG = "[build]\nbuild_base = {0}/build\n[egg_info]\negg_base = {0}\n"
# How the names in site-packages begin that `make setup` has made of this repository.
OURS = ("slipstream", "__editable__")


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment, and a folder that is neither in it nor in the repository."""

    folder: Path
    elsewhere: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def packages(self) -> Path:
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        return self.folder / "lib" / version / "site-packages"

    def run(
        self,
        *command: str,
        limit_s: float = LIMIT_S,
        variables: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, elsewhere; `variables` on top of the tests' own."""
        own = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=self.elsewhere,
            env={**own, **(variables or {})},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def says(self, program: str, limit_s: float = LIMIT_S) -> str:
        """What a Python program prints, as a script in the folder elsewhere."""
        script = self.elsewhere / "script.py"
        script.write_text(program)
        done = self.run("python", str(script), limit_s=limit_s)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def install(self, *words: str) -> None:
        """`pip install` with these words."""
        done = self.pip("install", *words)
        assert done.returncode == 0, done.stderr

    def pip(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run pip for this environment; what it builds does not go into the checkout."""
        own = {**os.environ, "PYTHONWARNINGS": "ignore", **_building_in(self.folder)}
        return subprocess.run(
            [self.python, "-m", "pip", *words, "-q", "--disable-pip-version-check"],
            cwd=self.elsewhere,
            env=own,
            capture_output=True,
            text=True,
            timeout=INSTALL_LIMIT_S,
            check=False,
        )


def make_environment(root: Path, name: str, *, sees_ours: bool = True) -> Environment:
    """One in the folder of that name, and a folder elsewhere beside it.

    sees_ours  it finds what it lacks in the environment of the tests, but no Slipstream; else it
               has a pip and no more
    """
    made = Environment(root / name, root / "elsewhere")
    venv.EnvBuilder(with_pip=not sees_ours, symlinks=True).create(made.folder)
    if sees_ours:
        behind = root / f"behind {name}"
        behind.mkdir()
        for one in Path(sysconfig.get_path("purelib")).iterdir():
            if not one.name.startswith(OURS):
                (behind / one.name).symlink_to(one)
        line = f"import site; site.addsitedir({str(behind)!r})\n"
        (made.packages / "behind.pth").write_text(line)
    made.elsewhere.mkdir(exist_ok=True)
    return made


def with_wheel(root: Path, wheel: Path, more: str) -> Environment:
    """One with the product's wheel, and a package from the index in the lock file's versions.

    The test is skipped where that cannot be installed.
    """
    made = make_environment(root, "environment")
    made.install("--no-deps", "--no-index", str(wheel))
    done = made.pip("install", "-c", str(ROOT / "requirements" / "lock.txt"), more)
    if done.returncode:
        pytest.skip(f"{more} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return made


def build_wheel(folder: Path, project: Path = ROOT) -> Path:
    """Build the wheel of a project of the checkout into the folder."""
    words = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, str(project)],
        env={**os.environ, **_building_in(folder)},
        capture_output=True,
        text=True,
        timeout=INSTALL_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def _building_in(folder: Path) -> dict[str, str]:
    """The variable with which setuptools builds there."""
    config = folder / "building.cfg"
    config.write_text(CONFIG.format(folder))
    return {"DIST_EXTRA_CONFIG": str(config)}


def tracked() -> list[str]:
    """The files of the checkout that git knows."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False
    )
    return [name for name in done.stdout.split("\0") if name]
