"""The runner, with engines that compute nothing: every cell once, also when engines die."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.prompts import Tokenization
from lab.experiments.description import Arm, Experiment, experiment
from lab.experiments.engines import Engine, Warm, Written, host_of
from lab.experiments.prompt_sets import Conversation, Prompt
from lab.experiments.rows import Key, Row, RowFile, was_disturbed
from lab.experiments.runner import Job, Runner, Step
from proto.errors import NodeError, OutputError
from proto.installation import MODELS

PROMPTS = [Prompt((f"x = {number}",), str(number), "c") for number in range(3)]


class FakeEngine:
    """Writes three tokens in 1 s, divided by the K of the arm; each text costs ten bytes."""

    def __init__(self, fails: list[bool], late: list[int]) -> None:
        self.hosts = {"target": "here"}
        self.num_bytes = 0
        self.asked: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
        self.is_closed = False
        self._fails = fails
        self._late = late

    def write(
        self, arm: Arm, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int]
    ) -> list[Written]:
        if self._fails and self._fails.pop(0):
            raise NodeError("the drafter was lost during a text")
        self.asked.append((arm.name, tuple(prompts)))
        self.num_bytes += 10 * len(prompts)
        speed = arm.speculation.num_speculative_tokens or 1
        emitted = ((0.5 / speed, 1), (1.0 / speed, 2))
        figures = None
        if self._late:
            figures = {"simulated": {"elapsed_ms": 100.0, "late_ms": self._late.pop(0)}}
        return [Written((seed, 2, 3), emitted, {"model": 1}, figures) for seed in seeds]

    def close(self) -> None:
        self.is_closed = True


class FakeWarm(Warm):
    """Such engines."""

    def __init__(self, most: int = 9, fails: Sequence[bool] = ()) -> None:
        super().__init__(most, None)
        self.started: list[FakeEngine] = []
        self._fails = list(fails)
        self.late: list[int] = []

    def _started(self, arm: Arm) -> Engine:
        self.started.append(FakeEngine(self._fails, self.late))
        return self.started[-1]


def tokenization() -> Tokenization:
    found = Tokenization.of_model(str(MODELS / "target"), None)
    assert found is not None
    return found


TOKENS = tokenization()


def made(*tables: dict[str, Any], **more: Any) -> Experiment:
    return experiment({"title": "t", "arms": list(tables), **more}, Path(), {})


def run(
    wanted: Experiment, path: Path, warm: FakeWarm, prompts: Sequence[Prompt] = PROMPTS
) -> tuple[list[Row], list[Step], list[str]]:
    talk = partial(Conversation, tokenization=TOKENS, max_tokens=99, template=None)
    steps: list[Step] = []
    warnings: list[str] = []
    rows = RowFile(path)
    Runner(
        wanted,
        [Job(arm, prompts, talk, str) for arm in wanted.arms],
        rows,
        warm,
        num_warm=9,
        say=steps.append,
        warn=warnings.append,
    ).run()
    return rows.rows, steps, warnings


def test_every_arm_writes_every_prompt_in_every_repetition(tmp_path: Path) -> None:
    wanted = made({"policy": ["ar", "sync"]}, repetitions=2)
    rows, steps, _ = run(wanted, tmp_path / "rows", FakeWarm())
    assert {row.key for row in rows} == {
        Key(arm, prompt, repetition)
        for arm in ("ar", "sync")
        for prompt in range(3)
        for repetition in range(2)
    }
    assert [row.number for row in rows] == list(range(12))
    one = rows[0]
    assert (one.tokens_per_second, one.ttft_s, one.itl_p50_ms) == (3.0, 0.5, 500.0)
    assert (one.accept_lengths, one.num_bytes, one.accepted_by_source) == ((1, 2), 10, {"model": 1})
    assert one.prompt_id == str(one.prompt)
    assert [step.num_done for step in steps] == list(range(12))


def test_speeds_may_leave_out_the_prompt_and_the_first_tokens(tmp_path: Path) -> None:
    wanted = made({"policy": "ar"}, repetitions=1, without_prompt=True)
    rows, _, _ = run(wanted, tmp_path / "rows", FakeWarm())
    assert [row.tokens_per_second for row in rows] == [4.0] * 3  # two tokens in half a second
    assert [row.wall_s for row in rows] == [1.0] * 3


def test_arms_that_share_models_share_processes_which_write_a_text_first_that_does_not_count(
    tmp_path: Path,
) -> None:
    warm = FakeWarm()
    half = {"policy": "ar", "name": "half", "dtype": "bfloat16"}
    wanted = made({"policy": ["ar", "sync"]}, half, repetitions=1, baseline={"name": "ar"})
    rows, _, _ = run(wanted, tmp_path / "rows", warm)
    assert sorted(len(engine.asked) for engine in warm.started) == [1 + 3, 1 + 6]
    assert len(rows) == 9


def test_a_pair_may_write_several_prompts_first(tmp_path: Path) -> None:
    warm = FakeWarm()
    wanted = made({"policy": ["ar", "sync"]}, repetitions=1, warm_prompts=8)
    rows, _, _ = run(wanted, tmp_path / "rows", warm)
    (engine,) = warm.started
    first = [prompts for _, prompts in engine.asked[: len(PROMPTS)]]
    assert first == [(TOKENS.encode(prompt.turns[0], special_tokens=True),) for prompt in PROMPTS]
    assert len(rows) == 6


def test_a_sweep_measures_the_settings_on_some_prompts_and_then_the_fastest_alone(
    tmp_path: Path,
) -> None:
    sync = {"policy": "sync", "num_speculative_tokens": [2, 4, 3]}
    wanted = made(
        {"policy": "ar"},
        {**sync, "sweep": "num_speculative_tokens"},
        sweep_prompts=2,
        repetitions=1,
    )
    rows, _, _ = run(wanted, tmp_path / "rows", FakeWarm())
    swept = [row.key[:2] for row in rows if row.stage == "sweep"]
    assert sorted(swept) == [(f"sync K={k}", prompt) for k in (2, 3, 4) for prompt in range(2)]
    assert {row.arm for row in rows if row.stage == "main"} == {"ar", "sync K=4"}


def test_a_run_goes_on_where_an_earlier_one_was_cut_off(tmp_path: Path) -> None:
    wanted = made({"policy": ["ar", "sync"]}, repetitions=2)
    whole, _, _ = run(wanted, tmp_path / "whole", FakeWarm())
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    path = tmp_path / "rows"
    path.write_bytes(b"".join(lines[:5]) + lines[5][:40])
    warm = FakeWarm()
    rows, steps, _ = run(wanted, path, warm)
    assert [row.key for row in rows] == [row.key for row in whole]
    assert steps[0].num_done == 5
    assert sum(len(engine.asked) for engine in warm.started) == 7 + len(warm.started)
    again, steps, _ = run(wanted, path, FakeWarm())
    assert (again, steps) == (rows, [])


def test_several_texts_are_written_at_once_and_count_together(tmp_path: Path) -> None:
    warm = FakeWarm()
    wanted = made({"policy": "ar", "texts_at_once": 2}, repetitions=1)
    rows, _, _ = run(wanted, tmp_path / "rows", warm)
    assert len(rows) == 6
    cell = [row for row in rows if row.prompt == 2]
    assert [row.prompt_id for row in cell] == ["2", "0"]
    assert {(row.num_rows, row.num_cell_tokens, row.num_bytes) for row in cell} == {(2, 6, 20)}
    assert {row.tokens_per_second for row in cell} == {6.0}


def test_a_conversation_makes_a_row_for_each_turn(tmp_path: Path) -> None:
    warm = FakeWarm()
    talk = [Prompt(("a", "b"), "q", "writing")]
    rows, _, _ = run(made({"policy": "ar"}, repetitions=1), tmp_path / "rows", warm, talk)
    assert [(row.turn, row.num_rows, row.category) for row in rows] == [
        (0, 2, "writing"),
        (1, 2, "writing"),
    ]
    first, second = (prompts[0] for _, prompts in warm.started[0].asked[1:])
    assert second[: len(first) + 3] == (*first, *rows[0].tokens)


def test_a_cell_whose_process_died_is_measured_again_on_a_new_one(tmp_path: Path) -> None:
    warm = FakeWarm(fails=[False, False, True])
    rows, _, warnings = run(made({"policy": "ar"}, repetitions=1), tmp_path / "rows", warm)
    assert [row.prompt for row in rows] == [0, 1, 2]
    assert [engine.is_closed for engine in warm.started] == [True, False]
    assert warnings == ["ar: the drafter was lost during a text; it is measured again"]


def test_a_text_whose_devices_could_not_be_simulated_is_written_again(tmp_path: Path) -> None:
    warm = FakeWarm()
    warm.late = [0, 0, 2, 0, 2, 2, 2]  # of a hundred forwards, by text; the first does not count
    rows, _, _ = run(made({"policy": "ar"}, repetitions=1), tmp_path / "rows", warm)
    assert [row.prompt for row in rows] == [0, 1, 2]
    assert [was_disturbed(row) for row in rows] == [False, False, True], "it was tried three times"
    assert len(warm.started[0].asked) == 1 + 1 + 2 + 3


def test_what_dies_again_and_again_ends_the_run_and_keeps_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with pytest.raises(NodeError, match="drafter was lost"):
        run(made({"policy": "ar"}), path, FakeWarm(fails=[False, False, *[True] * 20]))
    assert len(RowFile(path).rows) == 1


def test_a_peer_that_dies_again_and_again_is_left_out(tmp_path: Path) -> None:
    wanted = made({"policy": "ar"}, {"peer": "huggingface", "mode": ["plain", "lookup"]})
    warm = FakeWarm()

    class Dies(FakeWarm):
        def _started(self, arm: Arm) -> Engine:
            if arm.work.peer:
                raise NodeError("it ended")
            return super()._started(arm)

    rows, _, warnings = run(wanted, tmp_path / "rows", Dies())
    assert {row.arm for row in rows} == {"ar"}
    assert warnings[-1].endswith(" is left out: it ended")
    assert not warm.started


def test_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        run(made({"policy": "ar"}), tmp_path / "none" / "rows", FakeWarm())


def test_the_engine_that_was_used_longest_ago_is_ended_first() -> None:
    a, b, c = made({"policy": "ar", "dtype": ["float32", "bfloat16", "float16"]}, baseline={}).arms
    assert len({host_of(arm) for arm in (a, b, c)}) == 3
    warm = FakeWarm(most=2)
    for arm in (a, b, a, c):
        warm.of(arm)
    assert [engine.is_closed for engine in warm.started] == [False, True, False]
    assert [warm.of(arm)[1] for arm in (a, c, b)] == [False, False, True]
    warm.close()
    assert all(engine.is_closed for engine in warm.started)
