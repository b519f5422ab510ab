"""What users hand over that no text, setting or model is."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from coordinator.api import prompts
from coordinator.api.config import (
    PairConfig,
)
from coordinator.api.config_base import AS_FLAGS
from coordinator.api.params import SamplingParams
from coordinator.api.prompts import Tokenization
from coordinator.cli.writers import TextWriter
from coordinator.launching.launcher import Launcher
from proto.errors import ConfigurationError, OutputError, SlipstreamError
from tests.tiny_tokenizer import save_bytewise_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def refused(error: pytest.ExceptionInfo[SlipstreamError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("text", ["a\udcff", "\ud800"])
def test_a_prompt_that_is_no_unicode_is_refused(tmp_path: Path, text: str) -> None:
    save_bytewise_tokenizer(tmp_path)
    tokenization = Tokenization(Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    with pytest.raises(ConfigurationError) as caught:
        tokenization.encode(text)
    assert f"not valid Unicode (character {len(text) - 1})" in refused(caught)


@pytest.mark.parametrize("name", ["p.jsonl", "p"])
def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"prompt": "a"}\n' + "[" * 200_000)
    with pytest.raises(ConfigurationError) as caught:
        prompts.from_file(path)
    assert "line 2: not JSON" in refused(caught)
    path.write_text("[" * 200_000)
    if not path.suffix:
        assert len(prompts.from_file(path)) == 1


def test_standard_input_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_BYTES", 1 << 20)
    for more in (0, 1):
        data = io.BytesIO(b"a" * ((1 << 20) + more))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data))
        if not more:
            assert len(prompts.from_argument("-")) == 1 << 20
            continue
        with pytest.raises(ConfigurationError) as caught:
            prompts.from_argument("-")
        assert refused(caught) == "standard input is larger than 1 MiB; split it"


def test_a_closed_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert prompts.from_argument("text") == "text"
    with pytest.raises(ConfigurationError, match="standard input is closed"):
        prompts.from_argument("-")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"dtype": "int8"}, "--dtype: expected one of auto, float32, bfloat16, float16"),
        ({"dtype": ""}, "--dtype: expected"),
        ({"drafter_dtype": "half"}, "--drafter-dtype: expected"),
        ({"target": ""}, "--target: expected a text that is not empty"),
        ({"start_timeout_s": float("inf")}, "--start-timeout-s: expected a finite number"),
        ({"start_timeout_s": float("nan")}, "--start-timeout-s: expected"),
        ({"simulate_target_ms": float("nan")}, "--simulate-target-ms: expected"),
    ],
)
def test_a_bad_setting_is_refused_before_a_process_starts(
    values: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PairConfig.model_validate(values, context=AS_FLAGS)
    assert refused(caught).startswith(line)


def open_files_left(number: int, code: str) -> str:
    """What a program says of the error in `code`, where so many more files may be open."""
    program = (
        "import os, resource\n"
        "from coordinator.launching.launcher import Launcher\n"
        "from proto.errors import SlipstreamError\n"
        "from proto.messages import Role\n"
        "from proto.node_config import NodeConfig\n"
        "from proto.links.transport import Connection, Listener\n"
        "def leave(number):\n"
        "    highest = max(map(int, os.listdir('/proc/self/fd')))\n"
        "    while (last := os.dup(0)) < highest: pass\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1 + number,) * 2)\n"
        "node = NodeConfig(Role.TARGET, 'ipc:///tmp/none', 'target-1', '', '')\n"
        f"{code.format(number)}"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("number", "work"),
    [
        (4, "launcher.start(node)"),
        (0, "Listener('tcp://127.0.0.1:*')"),
        (2, "Listener('tcp://127.0.0.1:*')"),
        (0, "Connection('tcp://127.0.0.1:9', b'a')"),
    ],
)
def test_the_limit_of_open_files_is_said_wherever_it_is_met(number: int, work: str) -> None:
    code = (
        "launcher = Launcher()\n"
        "leave({})\n"
        "try:\n"
        f"    {work}\n"
        "except SlipstreamError as error:\n"
        "    print(error, flush=True)\n"
        "os._exit(0)\n"
    )
    said = open_files_left(number, code)
    assert said.startswith("cannot ")
    assert said.endswith("; raise the limit of open files (ulimit -n)\n")
    assert said.count("\n") == 1


def test_a_full_device_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        output = io.TextIOWrapper(full, write_through=True)
        monkeypatch.setattr(sys, "stdout", output)
        writer = TextWriter("ar", SamplingParams(), show_speculation=False)
        with pytest.raises(OutputError) as caught:
            writer._write("text")
        monkeypatch.undo()
    assert "cannot write to standard output: No space left on device" in refused(caught)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("output", "shown"), [(Terminal(), "text\n"), (io.StringIO(), "text")])
def test_an_error_in_the_middle_of_a_text_gets_a_line_of_its_own_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, output: io.StringIO, shown: str
) -> None:
    monkeypatch.setattr(sys, "stdout", output)
    writer = TextWriter("ar", SamplingParams(), show_speculation=False)
    for _ in range(2):
        writer._write("text" if output.getvalue() == "" else "")
        writer.break_off()
    assert output.getvalue() == shown


def test_the_runtime_folder_goes_with_its_launcher() -> None:
    launcher = Launcher()
    folder = launcher.folder
    assert folder.stat().st_mode & 0o777 == 0o700
    del launcher
    assert not folder.exists()


def test_a_hub_that_cannot_be_reached_is_given_up_soon_and_silently(tmp_path: Path) -> None:
    program = "from coordinator.api.prompts import find_file as f; print(f('a/b', None, 'c.json'))"
    closed_port = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **closed_port},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout == "None\n"
    assert done.stderr == ""
