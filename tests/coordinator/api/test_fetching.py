"""Models on the hub: what is said while they are fetched, and that no limit runs meanwhile.

The hub is a stand-in for `huggingface_hub.snapshot_download`, with the bars that the real one makes
(huggingface_hub 2.4): two of bytes, which its threads add to, and one of files.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from coordinator.api.config import PairConfig
from coordinator.api.models import fetching
from coordinator.api.models.fetching import Count, Download, Stopped
from coordinator.api.pair import Pair
from coordinator.launching.launcher import Launcher
from proto.errors import ModelError, NodeError
from proto.installation import MODELS
from proto.messages import Role
from proto.node_config import FETCHING

MB = 10**6
FILES = ("config.json", "tokenizer.json", "model.safetensors")
CHUNK_S = 0.02


class Hub:
    """Has one model, whose files come in ten chunks each.

    wait, came  called before and after each chunk
    """

    def __init__(self, folder: Path, size: int = 500 * MB) -> None:
        self.folder = folder
        self.size = size
        self.wait: Callable[[], object] = lambda: time.sleep(CHUNK_S)
        self.came: Callable[[], object] = lambda: None
        self.was_stopped = threading.Event()
        self.fetched: list[str] = []

    def snapshot_download(self, name: str, **options: Any) -> Any:
        """As the library's, for patterns that are names or suffixes."""
        wanted = [
            file
            for file in FILES
            if any(file.endswith(one.removeprefix("*")) for one in options["allow_patterns"])
        ]
        missing = [file for file in wanted if not (self.folder / file).exists()]
        if options.get("dry_run"):
            sizes = {file: self.size // max(1, len(missing)) for file in wanted}
            return [SimpleNamespace(file_size=sizes[f], will_download=f in missing) for f in wanted]
        if missing and "tqdm_class" in options:
            try:
                self._show(options["tqdm_class"])
            except Stopped:
                self.was_stopped.set()
                raise
        self.folder.mkdir(exist_ok=True)
        for file in missing:
            shutil.copy(MODELS / "target" / file, self.folder / file)
            self.fetched.append(file)
        return str(self.folder)

    def _show(self, bar: Any) -> None:
        about = {"total": 0, "initial": 0, "unit": "B", "unit_scale": True, "bar_format": "{n}"}
        came = bar(desc="Downloading bytes", **about)
        written = bar(desc="Reconstructing (incomplete total...)", **about)
        with bar(total=len(FILES), desc="Fetching 3 files") as files:
            written.total = (written.total or 0) + self.size
            written.refresh()
            for _ in range(10):
                self.wait()
                came.update(self.size // 10)
                written.update(self.size // 10)
                written.set_postfix_str("?", refresh=False)
                assert written.format_dict.get("rate") is None
                self.came()
            files.update(1)
        came.set_description_str("Download complete")
        written.set_description("Reconstruction complete")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    monkeypatch.setattr(fetching, "SAY_S", CHUNK_S)
    yield hub
    wait_for_the_end()
    assert not [one for one in threading.enumerate() if one.name.startswith("fetching")]


def test_what_comes_is_said_with_how_much_and_how_fast(hub: Hub) -> None:
    said: list[str] = []
    may_come, came = threading.Semaphore(0), threading.Semaphore(0)
    hub.wait, hub.came = lambda: may_come.acquire(timeout=10), came.release

    def say(words: str) -> None:
        said.append(words)
        may_come.release()
        came.acquire(timeout=1)

    assert Download("someone/large", None, ["*.safetensors"]).run(say) == hub.folder
    assert said[0] == "fetching 0 of 500 MB"
    for number in range(1, 10):
        assert said[number].startswith(f"fetching {50 * number} of 500 MB, ")
    assert all(line.endswith("B/s") for line in said[1:])
    assert hub.fetched == ["model.safetensors"]


def test_what_is_here_already_is_not_spoken_of(hub: Hub) -> None:
    Download("someone/large", None, ["*.safetensors"]).run()
    said: list[str] = []
    Download("someone/large", None, ["*.safetensors"]).run(said.append)
    assert said == []


def test_what_finds_no_room_is_refused_before_it_comes(hub: Hub) -> None:
    hub.size = 10**20
    with pytest.raises(ModelError, match=r"^someone/large: \d+\.0 GB are to be fetched, and /"):
        Download("someone/large", None, ["*.safetensors"]).run(lambda _: None)
    assert hub.fetched == []


def test_the_rate_is_that_of_the_last_seconds() -> None:
    count, bar = Count(16_400 * MB), SimpleNamespace(n=0)
    count.watch(bar)  # type: ignore[arg-type]
    words = []
    for second, done in enumerate((0, 1000, 2000, 3000, 4000, 5000, 5000, 5000, 5000, 5000, 5085)):
        bar.n = done * MB
        words.append(count.words(float(second)))
    assert words[0] == "fetching 0.0 of 16.4 GB"
    assert words[5] == "fetching 5.0 of 16.4 GB, 1.0 GB/s"
    assert words[10] == "fetching 5.1 of 16.4 GB, 17 MB/s"


def test_whoever_is_interrupted_leaves_at_once_and_the_download_ends(hub: Hub) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Download("someone/large", None, ["*.safetensors"]).run(interrupt)
    assert hub.was_stopped.wait(5)
    wait_for_the_end()


def test_a_hub_that_sends_nothing_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "STALL_LIMIT_S", 0.05)
    goes_on = threading.Event()
    hub.wait = lambda: goes_on.wait(10)
    with pytest.raises(ModelError, match=r"^someone/large: nothing has come from the hub for 0"):
        Download("someone/large", None, ["*.safetensors"]).run(lambda _: None)
    goes_on.set()
    assert hub.was_stopped.wait(5)
    wait_for_the_end()


def wait_for_the_end() -> None:
    """Of the thread that fetches: nobody waits for it."""
    for thread in threading.enumerate():
        if thread.name.startswith("fetching"):
            thread.join(5)


def test_no_limit_for_the_start_runs_while_a_model_is_fetched(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[Role, str]] = []

    def start(*_: object, **__: object) -> None:
        assert "model.safetensors" in hub.fetched
        raise NodeError("nothing is started in this test")

    monkeypatch.setattr(Launcher, "start", start)
    # The download takes longer than the nodes may.
    config = PairConfig(target="someone/large", drafter="ngram", start_timeout_s=10 * CHUNK_S / 2)
    with pytest.raises(NodeError, match="nothing is started in this test"):
        Pair(config, say=said.append)
    assert hub.fetched == list(FILES)
    assert any("B/s" in states.get(Role.TARGET, "") for states in said)
    assert said[-1] == {}


class StillFetching:
    """A service whose target, on another host, fetches its model for a while and then dawdles."""

    def __init__(self, fetching_s: float) -> None:
        self.until = time.monotonic() + fetching_s
        self.registry = self

    def none_expected(self) -> bool:
        return False

    def check_alive(self) -> None:
        pass

    def states(self) -> dict[Role, str]:
        return {Role.TARGET: FETCHING if time.monotonic() < self.until else "loading weights"}


def test_the_limit_begins_when_a_node_elsewhere_has_its_model() -> None:
    pair = object.__new__(Pair)
    pair.config = PairConfig(start_timeout_s=0.05)
    pair.service = StillFetching(0.3)  # type: ignore[assignment]
    before = time.monotonic()
    with pytest.raises(NodeError, match=r"nothing new for 0 s \(target: loading weights\)"):
        pair._wait_until_ready(None)
    assert time.monotonic() - before >= 0.3


def test_a_model_whose_config_does_not_do_is_refused_before_its_weights_come(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.folder.mkdir()
    (hub.folder / "config.json").write_text('{"model_type": "rwkv"}')
    with pytest.raises(ModelError, match="someone/large: rwkv has recurrent states"):
        Pair(PairConfig(target="someone/large", drafter="ngram"))
    assert "model.safetensors" not in hub.fetched
