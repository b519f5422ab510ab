"""What is measured is one text at a time, in caches that have room for no more."""

from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.api.config import PairConfig
from coordinator.api.pair import Pair
from coordinator.cli import verify_lossless
from coordinator.cli.app import EXIT_USAGE, command_line, run
from deploy.experiments import acceptance, bench
from deploy.measurements import profile
from proto.errors import ConfigurationError

FILE = Path(__file__)  # its lines will do as prompts


def measure_by_command(name: str, *options: str) -> None:
    app = command_line([bench.bench, profile.profile])
    arguments = [name, *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["slipstream", *arguments])
        assert run(app) == EXIT_USAGE


def verify() -> None:
    measure_by_command("verify-lossless")


def say_where_the_time_goes() -> None:
    measure_by_command("profile")


def compare_the_arms() -> None:
    measure_by_command("bench", "--prompt-file", str(FILE))


def count_what_is_accepted() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["acceptance", str(FILE)])
        with pytest.raises(ConfigurationError):
            acceptance.main()


@pytest.mark.parametrize(
    "measure", [verify, say_where_the_time_goes, compare_the_arms, count_what_is_accepted]
)
def test_a_measurement_starts_nodes_with_room_for_one_text(
    monkeypatch: pytest.MonkeyPatch, measure: Callable[[], None]
) -> None:
    started: list[PairConfig] = []

    def start(config: PairConfig, **_: object) -> Pair:
        started.append(config)
        raise ConfigurationError("nothing is started here")

    for module in (verify_lossless, bench, profile, acceptance):
        monkeypatch.setattr(module, "Pair", start)
    monkeypatch.setattr(bench, "wait_for_quiet", lambda: 0.0)
    measure()
    assert [config.num_seqs for config in started] == [1]
