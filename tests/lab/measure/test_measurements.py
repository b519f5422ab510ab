"""What is measured is one text at a time, in caches that have room for no more."""

from collections.abc import Callable

import pytest

from coordinator.api.config import PairConfig
from coordinator.api.pair import Pair
from coordinator.cli.app import EXIT_USAGE, command_line, run
from lab.measure import profile
from proto.errors import ConfigurationError
from rehearsal.lossless import command as verify_lossless


def measure_by_command(name: str, *options: str) -> None:
    app = command_line([profile.profile, verify_lossless.verify_lossless])
    arguments = [name, *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["slipstream", *arguments])
        assert run(app) == EXIT_USAGE


def verify() -> None:
    measure_by_command("verify-lossless")


def say_where_the_time_goes() -> None:
    measure_by_command("profile")


@pytest.mark.parametrize("measure", [verify, say_where_the_time_goes])
def test_a_measurement_starts_nodes_with_room_for_one_text(
    monkeypatch: pytest.MonkeyPatch, measure: Callable[[], None]
) -> None:
    started: list[PairConfig] = []

    def start(config: PairConfig, **_: object) -> Pair:
        started.append(config)
        raise ConfigurationError("nothing is started here")

    for module in (verify_lossless, profile):
        monkeypatch.setattr(module, "Pair", start)
    measure()
    assert [config.num_seqs for config in started] == [1]
