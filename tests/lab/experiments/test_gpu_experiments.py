"""The experiment for GPUs: what it covers, and where it leaves something out."""

import pytest

from coordinator.launching import devices
from lab.experiments import command
from lab.experiments.command import SHIPPED
from lab.experiments.description import Experiment, load


def gpu() -> Experiment:
    return load(SHIPPED / "gpu.toml")


def left_out(
    num_gpus: int, num_cores: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[set[str], list[str]]:
    """Devices of drafters that run there, and what is said of the others."""
    monkeypatch.setattr(devices, "_num_gpus", lambda: num_gpus)
    monkeypatch.setattr(devices.os, "cpu_count", lambda: num_cores)
    said: list[str] = []
    arms = command._that_run_here(gpu().arms, said.append)
    return {arm.pair.drafter_device for arm in arms}, said


def test_what_a_machine_has_no_device_for_is_left_out_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert left_out(2, 16, monkeypatch) == ({"cuda:0", "cuda:1", "cpu:4-11"}, [])
    found, said = left_out(1, 16, monkeypatch)
    assert found == {"cuda:0", "cpu:4-11"}
    assert len(said) == 1
    assert said[0].endswith("and 7 more are left out: there is no cuda:1 here")
    found, said = left_out(1, 8, monkeypatch)
    assert found == {"cuda:0"}
    assert len(said) == 2


def test_what_must_run_is_not_left_out_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = left_out(0, 2, monkeypatch)
    assert found == {"cuda:0"}, "its processes say what is missing"


def test_every_prompt_is_written_once_beforehand() -> None:
    wanted = gpu()
    assert all(wanted.description.warm_prompts >= (arm.work.limit or 99) for arm in wanted.arms)


def test_all_arms_have_the_shapes_of_8_and_half_a_billion_parameters() -> None:
    pairs = {(arm.pair.target, arm.pair.drafter) for arm in gpu().arms}
    assert pairs == {("testbed:llama-3.1-8b", "testbed:0.5b")}
