"""The mistakes of a newcomer, each with its line: refused before a process is started."""

import io
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from coordinator.api.llm import LLM
from coordinator.api.params import SamplingParams
from coordinator.cli import plugins
from coordinator.cli.app import command_line, run
from coordinator.launching import devices
from proto.errors import SlipstreamError
from proto.installation import MODELS
from tests.coordinator.mistaken import make_all
from tests.coordinator.mistakes import GENERATE, OTHERS

STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system")


class Watch:
    """Whether a process was started; while it looks, none can be."""

    def __init__(self) -> None:
        self.is_on = False
        self.started: list[str] = []

    def hear(self, event: str, _: object) -> None:
        if self.is_on and event in STARTS:
            self.started.append(event)
            raise RuntimeError(f"a process was started: {event}")


@pytest.fixture(scope="module")
def watch() -> Watch:
    watch = Watch()
    sys.addaudithook(watch.hear)  # for ever
    return watch


@pytest.fixture(autouse=True)
def _nothing_starts(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process, no GPU, no hub."""

    def unreachable(*_: object, **__: object) -> None:
        raise LocalEntryNotFoundError("the hub does not answer")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(devices, "version", lambda _: "2.13.0+cpu")
    monkeypatch.setattr(devices.os, "cpu_count", lambda: 4)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    watch.started.clear()
    watch.is_on = True
    yield
    watch.is_on = False
    assert watch.started == []


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `~` stands for in the arguments and lines below."""
    folder = tmp_path_factory.mktemp("home")
    make_all(folder)
    return folder


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody else listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


@pytest.fixture
def free() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def said(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command line."""
    output, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "argv", ["coordinator", *arguments])
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", errors)
    try:
        status = run(command_line(plugins.commands()), plugins.connect_ray)
    finally:
        monkeypatch.undo()
    return status, output.getvalue(), errors.getvalue()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [(["generate", *arguments], line) for arguments, line in GENERATE] + OTHERS,
    ids=lambda value: "_".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_mistake_is_refused_in_one_line_before_a_process_is_started(
    monkeypatch: pytest.MonkeyPatch,
    home: Path,
    taken: int,
    free: int,
    arguments: list[str],
    line: str,
) -> None:
    def filled(text: str) -> str:
        root = str(MODELS.parent / "lab" / "experiments") + "/"
        text = text.replace("{taken}", str(taken)).replace("{free}", str(free))
        return re.sub(r"~(?!nosuchuser)", lambda _: str(home), text.replace("{root}", root))

    status, output, errors = said(monkeypatch, *map(filled, arguments))
    assert errors.startswith(f"error: {filled(line)}")
    assert errors.count("\n") == 1
    assert errors.endswith("\n")
    assert output == ""
    assert status in (1, 2)


def test_there_are_thirty_at_least() -> None:
    assert len(GENERATE) + len(OTHERS) >= 30


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"target": "./none"}, "./none: no such folder; give a model's folder or its name on the"),
        ({"target_device": "gpu"}, "unknown target device 'gpu': use cpu"),
        ({"backnd": "fused"}, "there is no setting backnd; did you mean backend?"),
        (
            {"speculativ_config": {}},
            "there is no setting speculativ_config; did you mean speculative_config?",
        ),
        ({"wibble": 1}, "there is no setting wibble; docs/python-api.md lists the settings"),
        ({"max_model_len": 1}, "max_model_len: expected at least 2, got 1"),
    ],
)
def test_the_python_api_refuses_as_early(settings: dict[str, object], line: str) -> None:
    with pytest.raises(SlipstreamError) as caught:
        LLM(**settings)  # type: ignore[arg-type]
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_setting_that_does_not_exist_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(SlipstreamError, match=r"; did you mean temperature\?$"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
