"""The command that builds llama.cpp's programs, with a stand-in for cmake."""

import sys
from pathlib import Path

import pytest

from lab.experiments.peers import build_llamacpp
from lab.experiments.peers.llamacpp_programs import PROGRAMS, what_is_missing
from tests.lab.experiments.stand_ins import all_programs, program


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tools that stand in, which is the whole PATH."""
    folder = tmp_path / "tools"
    made = tmp_path / "made"
    all_programs(made)
    build = f'/bin/mkdir -p "$2"; /bin/cp -r {made} "$2/bin"'
    program(folder, "cmake", f'echo "$@" >> "$0.given"\nif [ "$1" = --build ]; then {build}; fi')
    program(folder, "ninja", "true")
    program(folder, "c++", "true")
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "CMakeLists.txt").touch()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.argv", ["build", "--sources", str(tmp_path / "sources")])
    return folder


def test_the_programs_are_built_put_into_the_cache_and_found_there(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "cache" / "slipstream" / "llama.cpp"
    for _ in range(2):  # a second build takes the place of the first
        assert build_llamacpp.main() == 0
    assert what_is_missing() == ""
    assert [path.name for path in home.iterdir()] == ["bin"]  # nothing else is left
    configured, compiled = (tools / "cmake.given").read_text().splitlines()[:2]
    assert "-G Ninja" in configured
    assert "-DGGML_NATIVE=ON" in configured
    assert compiled.endswith(" ".join(PROGRAMS))
    assert capsys.readouterr().out.splitlines()[-1] == f"{home / 'bin'}: {', '.join(PROGRAMS)}"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("cmake", "error: llama.cpp is built with cmake: install that first"),
        ("ninja", "error: llama.cpp is built with ninja or make: install that first"),
        ("c++", "error: llama.cpp is built with a C++ compiler: install that first"),
    ],
)
def test_a_missing_tool_is_named_before_anything_is_downloaded(
    name: str, line: str, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tools / name).unlink()
    assert build_llamacpp.main() == 1
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("echo 'no compiler works'; exit 1", "error: cannot configure llama.cpp; the lines above"),
        ("true", "error: the build has made no llama-completion"),
    ],
)
def test_a_step_that_fails_is_one_line_and_leaves_the_cache_as_it_was(
    script: str, line: str, tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(tools, "cmake", script)
    assert build_llamacpp.main() == 1
    assert capsys.readouterr().err.startswith(line)
    assert not [*(tmp_path / "cache").rglob("bin")]


def test_programs_that_do_not_start_are_not_kept(tmp_path: Path, tools: Path) -> None:
    made = tmp_path / "made"
    program(made, "llama-completion", "exit 127")
    with pytest.raises(build_llamacpp.BuildError, match="does not run: llama-completion ended wi"):
        build_llamacpp.install(made)
    assert what_is_missing()


def test_sources_that_are_none_are_refused(
    tools: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["build", "--sources", str(tools)])
    assert build_llamacpp.main() == 1
    assert capsys.readouterr().err.startswith("error: --sources: there is no CMakeLists.txt in ")
