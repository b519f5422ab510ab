"""`make gpu-kit`: one folder with what a machine without a network lacks: wheels and prompts.

    python -m lab.gpu_kit.pack [--out gpu-kit] [--prompt-file FILE] [--python 3.12]...
                               [--also numpy] [--tree FOLDER]

The embedded pair and the tests travel as they are, in a tree without what no measurement there
needs (`STAYS`), and so does this folder, which git ignores. Both together must not be larger than
`MOST_MIB`: `--tree` writes such a tree, with the kit in it. The wheels are of the versions that are
installed here, which are those of requirements/lock.txt. Left to the machine is torch with all that
comes with it, numpy included; left out is what only Ray and pictures need.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Collection, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lab.experiments.prompt_sets import read
from lab.gpu_kit.__main__ import KIT, SHIPPED
from proto.errors import ConfigurationError, SlipstreamError
from proto.installation import ROOT

PYTHONS = ("3.12", "3.11")
# Packages that are not packed: they come with torch, or serve only Ray, downloads and pictures.
LEFT_OUT = ("torch", "numpy", "ray", "hf-xet", "scipy", "matplotlib")
EXTRAS = ("ray",)
# Packed besides the dependencies: pip installs the others, and the rest runs the tests.
ALSO = ("pip", "pytest", "hypothesis")
GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)  # minor versions that wheels name
PLATFORMS = ("manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{n}" for n in GLIBC))
REQUIREMENTS, WHEELS = "requirements.txt", "wheels.tar.xz"
LIMIT_S = 900.0
# Folders of the tree that stay behind, because nothing in them is measured on the GPU machine.
STAYS = (
    *("models/medusa", "models/eagle", "models/eagle3", "models/drafter-shallow"),
    "docs/pictures",
)
MOST_MIB = 60.0  # most that may travel; some machines accept 64


def brought(roots: Sequence[str], left_out: Collection[str], python: str) -> dict[str, str]:
    """Return the versions, by name, of all packages that `roots` need under this Python.

    roots     requirements to start from; what their packages require is added
    left_out  canonical names of packages that are not packed
    python    version, such as 3.12

    The versions are those installed here. Raises ConfigurationError if a package is not installed.
    """
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(_applying(roots, (), python))
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        key = name, frozenset(one.extras)
        if name in left_out or key in seen:
            continue
        seen.add(key)
        try:
            installed = distribution(name)
        except PackageNotFoundError as error:
            raise ConfigurationError(f"{name} is not installed; run `make setup`") from error
        found[name] = installed.version
        waiting += _applying(installed.requires or (), one.extras, python)
    return found


def _applying(
    requires: Sequence[str], extras: Collection[str], python: str
) -> Iterator[Requirement]:
    """Yield those requirements of a package with these extras that apply under this Python."""
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    for text in requires:
        one = Requirement(text)
        cases = [environment | {"extra": extra} for extra in ("", *extras)]
        if one.marker is None or any(map(one.marker.evaluate, cases)):
            yield one


def roots() -> list[str]:
    """Return the requirements of product and lab, of the product's `EXTRAS`, and of the tests."""
    product, lab = (_project(ROOT / name) for name in ("pyproject.toml", "lab/pyproject.toml"))
    extras = product["optional-dependencies"]
    of_lab = [one for one in lab["dependencies"] if Requirement(one).name != product["name"]]
    of_extras = [one for name in EXTRAS for one in extras[name]]
    return [*product["dependencies"], *of_extras, *of_lab, *ALSO]


def _project(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        project: dict[str, Any] = tomllib.load(file)["project"]
    return project


def download(versions: dict[str, str], python: str, folder: Path) -> None:
    """Download the wheels for Linux on x86-64 into a folder. Raises ConfigurationError."""
    command = [*(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    command += [part for name in PLATFORMS for part in ("--platform", f"{name}_x86_64")]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    command += [f"{name}=={version}" for name, version in sorted(versions.items())]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(f"the wheels did not come in {LIMIT_S:.0f} s") from error
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        raise ConfigurationError(f"pip: {(lines or ['it failed'])[-1].removeprefix('ERROR: ')}")


def press(folder: Path, out: Path) -> int:
    """Put the wheels of a folder into one archive; return how many there are.

    A wheel compresses each of its files alone. Stored uncompressed in an archive that is compressed
    as a whole, they take half of the space.
    """
    wheels = sorted(folder.glob("*.whl"))
    with tarfile.open(out, "w:xz", preset=6) as archive:
        for wheel in wheels:
            bare = wheel.with_suffix(".bare")
            with zipfile.ZipFile(wheel) as packed, zipfile.ZipFile(bare, "w") as stored:
                for entry in packed.infolist():
                    content = packed.read(entry)
                    entry.compress_type = zipfile.ZIP_STORED
                    stored.writestr(entry, content)
            archive.add(bare, wheel.name)
    return len(wheels)


def pack(
    out: Path,
    prompts: Path,
    pythons: Sequence[str],
    also: Sequence[str],
    tree: Path | None = None,
) -> str:
    """Make the kit's folder anew; return lines that say what is in it.

    Raises ConfigurationError and other SlipstreamErrors.

    tree  a new folder for the working tree that travels, with the kit in it; None: not wanted
    """
    if tree is not None and tree.exists() and any(tree.iterdir()):
        raise ConfigurationError(f"{tree} is not empty; name a new folder")
    left_out = set(LEFT_OUT) - {canonicalize_name(name) for name in also}
    number = len(read(prompts, None))
    if out.exists() and any(out.iterdir()) and not (out / REQUIREMENTS).exists():
        raise ConfigurationError(f"{out} is not empty and no kit; name another folder")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as unfinished:
        lines: set[str] = set()
        for python in pythons:
            versions = brought(roots(), left_out, python)
            download(versions, python, Path(unfinished))
            lines |= {
                f'{name}=={version} ; python_version == "{python}"'
                for name, version in versions.items()
            }
        num_wheels = press(Path(unfinished), out / WHEELS)
    for old in out.glob("prompts.*"):
        old.unlink()
    shutil.copyfile(prompts, out / f"prompts{prompts.suffix}")
    (out / REQUIREMENTS).write_text("\n".join(sorted(lines)) + "\n")
    said = _words(out, num_wheels, number, pythons)
    if tree is not None:
        _write_tree(tree, out)
        said = f"{tree}: the tree that travels, with the kit in {KIT}\n{said}"
    return said


def _words(out: Path, num_wheels: int, num_prompts: int, pythons: Sequence[str]) -> str:
    """Return lines about the kit and its size. Raises ConfigurationError if it is too large."""
    kit, whole, travels = (size(files) / 2**20 for files in (out.rglob("*"), _tree(), _lean_tree()))
    together = (
        f"{kit + travels:.1f} MiB travel of at most {MOST_MIB:.0f}: the kit, and {travels:.1f} MiB "
        f"of the tree's {whole:.1f}, without {', '.join(STAYS)}"
    )
    if kit + travels > MOST_MIB:
        raise ConfigurationError(
            f"{together}; leave out a Python (--python 3.12), or what else need not travel"
        )
    return (
        f"{out}: {kit:.1f} MiB, {num_wheels} wheels for Python {' and '.join(pythons)}, "
        f"{num_prompts} prompts\n{together}\n"
        "there: python3 lab/gpu_kit/start.py   (docs/gpu.md)"
    )


def _lean_tree() -> Iterator[Path]:
    """Return the files of the working tree that travel."""
    stays = tuple(f"{ROOT / name}/" for name in STAYS)
    return (path for path in _tree() if not str(path).startswith(stays))


def _write_tree(folder: Path, kit: Path) -> None:
    """Copy the travelling files of the tree, and the kit, into a folder.

    Raises ConfigurationError: a file cannot be written, or this is no checkout.
    """
    paths = [path for path in _lean_tree() if path.is_file()]
    if not paths:
        raise ConfigurationError(f"{ROOT} is no checkout of git; --tree copies what git knows")
    try:
        for path in paths:
            copy = folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        shutil.copytree(kit, folder / KIT)
    except OSError as error:
        raise ConfigurationError(f"cannot write {folder}: {error}") from error


def size(files: Iterator[Path]) -> int:
    """Return the bytes of all files together."""
    return sum(path.stat().st_size for path in files if path.is_file())


def _tree() -> Iterator[Path]:
    """Return the files that git tracks or does not ignore; none where git is not installed."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        return iter(())
    return (ROOT / name for name in ended.stdout.split("\0") if name)


def main() -> int:
    """Make the kit; return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m lab.gpu_kit.pack", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / KIT, metavar="DIR", help=f"the kit (default: {KIT})"
    )
    parser.add_argument(
        *("--prompt-file", "--prompts"),
        dest="prompts",
        type=Path,
        default=SHIPPED,
        metavar="FILE",
        help="prompts to bring (default: the project's own)",
    )
    parser.add_argument(
        "--python", action="append", choices=PYTHONS, help="version of Python (default: both)"
    )
    parser.add_argument(
        "--also",
        nargs="*",
        default=[],
        choices=LEFT_OUT,
        metavar="NAME",
        help=f"bring these, too: {', '.join(LEFT_OUT)}",
    )
    parser.add_argument(
        "--tree", type=Path, metavar="DIR", help="new folder for all that travels, with the kit"
    )
    options = parser.parse_args()
    try:
        pythons = options.python or PYTHONS
        said = pack(options.out, options.prompts, pythons, options.also, options.tree)
    except SlipstreamError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{said}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
