"""What the kit brings, and what it leaves to the machine."""

import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.gpu_kit import pack as packing
from lab.gpu_kit.pack import LEFT_OUT, REQUIREMENTS, brought, pack, roots
from lab.gpu_kit.start import unpacked
from proto.errors import ConfigurationError

INSTALLED = {
    "web": ["client>=2 ; extra == 'http'", "parser ; python_version < '3.12'", "torch"],
    "client": ["socket-things"],
    "parser": [],
    "socket-things": ["web"],
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four packages."""

    def find(name: str) -> SimpleNamespace:
        if name not in INSTALLED:
            raise packing.PackageNotFoundError(name)
        return SimpleNamespace(version="1.0", requires=INSTALLED[name])

    monkeypatch.setattr(packing, "distribution", find)


@pytest.mark.usefixtures("installed")
def test_what_is_needed_is_followed_through_extras_and_markers() -> None:
    assert set(brought(["web"], ["torch"], "3.11")) == {"web", "parser"}
    assert set(brought(["web"], ["torch"], "3.12")) == {"web"}
    assert set(brought(["web[http]"], ["torch"], "3.12")) == {"web", "client", "socket-things"}


@pytest.mark.usefixtures("installed")
def test_what_is_not_installed_here_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="torch is not installed"):
        brought(["web"], [], "3.12")


def test_the_kit_brings_what_an_image_with_torch_lacks() -> None:
    found = brought(roots(), LEFT_OUT, "3.12")
    assert {"pyzmq", "msgpack", "pydantic", "pydantic-core", "typer", "pip", "pytest"} <= set(found)
    assert {"httpx2", "tokenizers", "transformers", "safetensors"} <= set(found)
    assert not {*LEFT_OUT, "triton", "sympy", "pillow"} & set(found)


def fake_download(versions: dict[str, str], python: str, folder: Path) -> None:
    for name in versions:
        with zipfile.ZipFile(folder / f"{name}-{python}.whl", "w") as wheel:
            wheel.writestr("a.py", b"x" * 1000)


def test_a_kit_has_wheels_prompts_and_what_to_install_under_which_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "download", fake_download)
    monkeypatch.setattr(packing, "roots", lambda: ["msgpack"])
    prompts = tmp_path / "mine.txt"
    prompts.write_text("one\ntwo\n")
    out = tmp_path / "kit"
    said = pack(out, prompts, ("3.11", "3.12"), ())
    assert "2 wheels" in said
    assert "2 prompts" in said
    assert (out / "prompts.txt").read_text() == "one\ntwo\n"
    lines = (out / REQUIREMENTS).read_text().splitlines()
    assert [line.partition(";")[2].strip() for line in lines] == [
        'python_version == "3.11"',
        'python_version == "3.12"',
    ]
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "three"}\n')
    pack(out, other, ("3.12",), ())
    assert sorted(path.name for path in out.iterdir()) == [
        "prompts.jsonl",
        "requirements.txt",
        "wheels.tar.xz",
    ]
    (wheel,) = unpacked(out / "wheels.tar.xz", tmp_path / "wheels").iterdir()
    assert wheel.name == "msgpack-3.12.whl", "wheels of an earlier kit are gone"
    with zipfile.ZipFile(wheel) as files:
        assert files.read("a.py") == b"x" * 1000


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small one, whose head is a megabyte; its kit has a wheel."""
    root = tmp_path / "checkout"
    for name, num_bytes in (("a.py", 1000), ("models/medusa/x", 1 << 20), ("docs/new.md", 10)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x" * num_bytes)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    monkeypatch.setattr(packing, "ROOT", root)
    monkeypatch.setattr(packing, "download", fake_download)
    monkeypatch.setattr(packing, "roots", lambda: ["msgpack"])
    return root


def test_the_tree_travels_without_what_stays_and_with_the_kit(
    checkout: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    said = pack(tmp_path / "kit", packing.SHIPPED, ("3.12",), (), tree)
    files = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    assert {"a.py", "docs/new.md", "gpu-kit/requirements.txt", "gpu-kit/prompts.jsonl"} <= files
    assert not any(name.startswith("models") for name in files)
    assert "MiB travel of at most 60" in said
    assert "of the tree's 1.0, without models/medusa" in said
    with pytest.raises(ConfigurationError, match="is not empty"):
        pack(tmp_path / "kit", packing.SHIPPED, ("3.12",), (), tree)


def test_more_than_travels_is_refused(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "large").write_bytes(b"x" * (1 << 20))
    monkeypatch.setattr(packing, "MOST_MIB", 0.9)
    with pytest.raises(ConfigurationError, match=r"MiB travel of at most 1: .*leave out a Python"):
        pack(tmp_path / "kit", packing.SHIPPED, ("3.12",), ())
    (checkout / "large").unlink()
    pack(tmp_path / "kit", packing.SHIPPED, ("3.12",), ())


def test_a_folder_with_something_else_in_it_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(ConfigurationError, match="no kit"):
        pack(tmp_path, packing.SHIPPED, ("3.12",), ())
    assert (tmp_path / "mine").read_text() == "kept"
