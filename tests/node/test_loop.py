"""The loop of a node, with a machine that plays a script and a link that is a list."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from zlib import crc32

import pytest
import torch

from engine.errors import EngineError, ModelError, OutOfMemory
from engine.layout.slots import NUM_TREE_SLOTS, LaneLayout, Move
from engine.loading import Engine
from node import loading
from node.events import (
    Afterwards,
    Allocate,
    Arrived,
    CopyPrefix,
    MoveRows,
    Send,
    SharedAction,
    Tick,
    WaitUntil,
)
from node.forwards import Simulated
from node.loading import introduce, load
from node.loop import Loop
from node.turns import IDLE_S, Launched
from node.turns import Ended as ComputedHere
from proto import errors
from proto.codec import decode, encode
from proto.head_kinds import HeadKind
from proto.liveness import MAX_BAD_FRAMES
from proto.messages import BROKEN_OFF, Close, Message, Role, SessionMark, Welcome
from proto.node_config import NodeConfig
from proto.stopwatch import Mark, Recorder, Stopwatch, records_of

CONFIG = NodeConfig(Role.TARGET, "ipc:///tmp/none", "target-1", "", "model", fixed_rows=16)
CLOSE = Close(1, "stop")
MARK = SessionMark(1, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a forward."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Done:
    """It has been run."""

    ticket: int


Event = Arrived | Tick | Afterwards | Done
Action = SharedAction | Compute


class Ended(Exception):
    """The script is over."""


@dataclass
class Link:
    """What comes in turn after turn, and what is sent."""

    turns: list[list[bytes]]
    waits: list[float] = field(default_factory=list)
    sent: list[Message] = field(default_factory=list)
    were_exact: list[bool] = field(default_factory=list)
    clock: "Steps | None" = None

    def receive(self, timeout_s: float, *, exact: bool) -> Iterator[bytes]:
        """The frames of the next turn."""
        if self.clock is not None:
            self.clock.goes_on()
        self.waits.append(timeout_s)
        self.were_exact.append(exact)
        if not self.turns:
            raise Ended
        return iter(self.turns.pop(0))

    def send(self, frame: bytes) -> bool:
        """Take it."""
        self.sent.append(decode(frame))
        return True


@dataclass
class Device:
    """An executor that writes down what it is asked for."""

    fixed_rows: int | None = None
    did: list[Any] = field(default_factory=list)

    def move(self, *moves: Move) -> None:
        """Take a note."""
        self.did.append(moves)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Take a note."""
        self.did.append((source, target, length))

    def set_total(self, total: int) -> None:
        """Take a note."""
        self.did.append(total)


class Steps:
    """A clock that goes on when messages are waited for, to the next of these times."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)

    def now(self) -> float:
        """The seconds."""
        return self.times[0]

    def goes_on(self) -> None:
        """To the next time; the last one stays."""
        self.times = self.times[1:] or self.times


class Heart:
    """A heart that does not beat."""

    def __init__(self) -> None:
        self.state = ""
        self.marks: tuple[SessionMark, ...] = ()
        self.watch = Stopwatch(lambda: 0)
        self.num_rows = 0  # of the pass under way

    def begins(self, num_rows: int, expected_s: float) -> None:
        """A pass is under way."""
        self.num_rows = num_rows

    def ends(self) -> None:
        """No pass is under way."""
        self.num_rows = 0


class Script:
    """A dispatcher that answers every event as it was told to."""

    def __init__(self, answers: Callable[[Event], Sequence[Action]]) -> None:
        self.answers = answers
        self.events: list[Event] = []
        self.marks = (MARK,)

    def handle(self, event: Event, now: float) -> Sequence[Action]:
        """The script's answer."""
        self.events.append(event)
        return self.answers(event)

    def story(self, session: int | None = None) -> str:
        """Whose it is."""
        return f"the story of {session}"


def run(
    turns: list[list[bytes]],
    answers: Callable[[Event], Sequence[Action]] = lambda event: (),
    device: Device | None = None,
    compute: Callable[[Compute], Done] = lambda action: Done(action.ticket),
    ends_at: float | None = None,
    woke: Callable[[], None] = lambda: None,
    clock: Steps | None = None,
) -> tuple[Script, Link, Heart]:
    """Run a loop through these turns, to the end of the script."""
    script, link, heart = Script(answers), Link(turns, clock=clock), Heart()
    make: Any = Loop

    def launch(action: Compute) -> Launched[Done]:
        return launched(compute(action), ends_at, woke)

    clocks = {} if clock is None else {"clock": clock.now}
    with pytest.raises(Ended):
        make(link, heart, device or Device(), script, launch, **clocks).run()
    return script, link, heart


def launched(
    done: Done, ends_at: float | None, woke: Callable[[], None] = lambda: None
) -> Launched[Done]:
    """By the host, or on a simulated device."""
    return ComputedHere(done) if ends_at is None else Simulated(done, ends_at, woke)


def test_all_messages_are_handled_before_one_tick() -> None:
    script, _, heart = run([[encode(CLOSE), encode(CLOSE)], []])
    assert script.events == [Arrived(CLOSE), Arrived(CLOSE), Tick(), Tick()]
    assert heart.marks == (MARK,)


def test_a_result_is_handled_at_once_and_the_next_turn_does_not_wait() -> None:
    asked = iter([Compute(1)])

    def answers(event: Event) -> Sequence[Action]:
        match event:
            case Tick():
                return list(asked)
            case Done():
                return [Send(CLOSE), MoveRows((Move((5,), (4,)), Move((9,), (8,), 1)))]
            case _:
                return []

    device = Device()
    script, link, _ = run([[], []], answers, device)
    assert script.events == [Tick(), Done(1), Afterwards(), Tick()]
    assert link.sent == [CLOSE]
    assert device.did == [(Move((5,), (4,)), Move((9,), (8,), 1))]
    assert link.waits == [0.0, 0.0, IDLE_S]


@pytest.mark.parametrize("ends_at", [None, 10.0])
def test_the_heart_knows_of_a_pass_until_its_result_is_there(
    monkeypatch: pytest.MonkeyPatch, ends_at: float | None
) -> None:
    clock = Steps(9.4, 9.4, 9.9, 10.0)
    monkeypatch.setattr(time, "perf_counter", clock.now)
    asked, seen = iter([Compute(1)]), list[tuple[str, int]]()

    def answers(event: Event) -> Sequence[Action]:
        seen.append((type(event).__name__, heart.num_rows))
        return list(asked) if event == Tick() else []

    heart = Heart()
    make: Any = Loop
    link = Link([[], [encode(CLOSE)], [], []], clock=clock)

    def launch(action: Compute) -> Launched[Done]:
        heart.begins(5, 0.1)
        return launched(Done(action.ticket), ends_at)

    with pytest.raises(Ended):
        make(link, heart, Device(), Script(answers), launch, clock.now).run()
    assert ("Done", 0) in seen
    assert (("Arrived", 5) in seen) == (ends_at is not None), "a host that computes hears nothing"
    assert seen[-1] == ("Tick", 0)


def test_while_a_device_is_at_work_messages_are_heard_and_its_result_is_shown_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Steps(9.4, 9.4, 9.9, 10.0)
    monkeypatch.setattr(time, "perf_counter", clock.now)
    asked = iter([Compute(1)])
    turns = [[], [encode(CLOSE)], [], []]
    answers = lambda event: list(asked) if event == Tick() else []  # noqa: E731
    script, link, _ = run(turns, answers, ends_at=10.0, clock=clock)
    heard, ended = [Arrived(CLOSE), Tick()], [Done(1), Tick(), Afterwards()]
    assert script.events == [Tick(), *heard, *ended, Tick(), Tick()]
    assert link.waits[1:3] == [pytest.approx(0.6), pytest.approx(0.1)]
    assert link.were_exact == [False, True, True, False, False]


def test_who_comes_late_to_the_end_from_other_work_was_not_woken_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Steps(9.4, 9.4, 10.2)  # a message is handled beyond the end
    monkeypatch.setattr(time, "perf_counter", clock.now)
    asked, woken = iter([Compute(1)]), list[bool]()
    script, _, _ = run(
        [[], [encode(CLOSE)]],
        lambda event: list(asked) if event == Tick() else [],
        ends_at=10.0,
        woke=lambda: woken.append(True),
        clock=clock,
    )
    assert script.events == [Tick(), Arrived(CLOSE), Done(1), Tick(), Afterwards(), Tick()]
    assert woken == []


def test_the_next_forward_is_launched_before_anything_is_said_of_the_last_one() -> None:
    asked, device = iter([Compute(1), Compute(2)]), Device()

    def answers(event: Event) -> Sequence[Action]:
        match event:
            case Tick():
                device.did.append("ticked")
                return [action] if (action := next(asked, None)) else []
            case Afterwards():
                device.did.append("told")
                return [Send(CLOSE)]
            case _:
                return []

    script, link, _ = run([[], []], answers, device, ends_at=time.perf_counter())
    assert script.events == [Tick(), Done(1), Tick(), Afterwards(), Tick()]
    assert device.did == ["ticked", "ticked", "told", "ticked"]
    assert link.sent == [CLOSE]


def test_a_second_forward_is_not_launched_before_the_first_has_ended() -> None:
    with pytest.raises(AssertionError, match="one thing at a time"):
        run([[], []], lambda event: [Compute(1)], ends_at=float("inf"))


def test_a_copy_is_made_before_the_pass_that_needs_it() -> None:
    device = Device()

    def computes(action: Compute) -> Done:
        device.did.append(action)
        return Done(action.ticket)

    asked: Iterator[Action] = iter([CopyPrefix(0, 1, 40), Compute(1)])
    run([[]], lambda event: list(asked), device, computes)
    assert device.did == [(0, 1, 40), Compute(1)]


def test_a_text_that_was_broken_off_leaves_its_story_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run([[encode(CLOSE), encode(Close(2, BROKEN_OFF))]])
    (said,) = caplog.records
    assert said.getMessage() == "text 2 was broken off after the story of 2"
    assert said.levelname == "ERROR"


def test_an_invariant_that_is_violated_leaves_the_story_of_all_texts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def answers(event: Event) -> Sequence[Action]:
        raise AssertionError

    make: Any = Loop
    with pytest.raises(AssertionError):
        make(Link([[]]), Heart(), Device(), Script(answers), None).run()
    assert caplog.messages == ["an invariant is violated after the story of None"]


def test_it_waits_no_longer_than_to_the_deadline() -> None:
    deadlines = [WaitUntil(10.25), WaitUntil(30.0)]
    _, link, _ = run([[]], lambda event: deadlines, clock=Steps(10.0))
    assert link.waits == [0.0, 0.25]


@pytest.mark.parametrize(("fixed_rows", "did"), [(None, []), (16, [40 + NUM_TREE_SLOTS])])
def test_only_reproducible_passes_cover_all_that_a_text_may_need(
    fixed_rows: int | None, did: list[int]
) -> None:
    device = Device(fixed_rows)
    run([[]], lambda event: [Allocate(40)], device)
    assert device.did == did


def test_garbled_frames_are_dropped_up_to_a_limit() -> None:
    script, _, _ = run([[b"\xff"] * MAX_BAD_FRAMES, [encode(CLOSE)]])
    assert script.events == [Tick(), Arrived(CLOSE), Tick()]
    with pytest.raises(errors.RemoteProtocolError, match="garbled frames"):
        run([[b"\xff"] * (MAX_BAD_FRAMES // 2 + 1)] * 2)


def test_an_engine_that_cannot_go_on_is_a_failure_of_the_node() -> None:
    def fails(action: Compute) -> Done:
        raise EngineError("the logits are not finite")

    with pytest.raises(errors.NodeError, match="not finite"):
        run([[]], lambda event: [Compute(1)], compute=fails)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (OutOfMemory("no room"), errors.NodeError),
        (ModelError("no model"), errors.ModelError),
        (torch.OutOfMemoryError("CUDA out of memory. Tried 1 GiB"), errors.NodeError),
        (RuntimeError("no such kernel"), RuntimeError),
    ],
)
def test_only_what_a_user_must_mend_is_an_error_of_the_model(
    raised: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_engine(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(loading, "load_engine", load_engine)
    with pytest.raises(expected, match=str(raised)):
        load(CONFIG, cast(Any, Heart()))


def test_what_was_loaded_is_not_looked_through_for_rubbish_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SimpleNamespace(bits="")  # stands for hundreds of thousands of objects
    monkeypatch.setattr(loading, "load_engine", lambda *_, **__: engine)
    try:
        load(CONFIG, cast(Any, Heart()))
        assert not any(found is engine for found in gc.get_objects())
    finally:
        gc.unfreeze()


def test_prompts_of_a_target_are_run_again_once_its_heads_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What is free for the heads is seen only when unused memory is given back to the driver.
    did: list[str] = []

    def engine(name: str) -> Engine:
        did.append(f"{name} loaded")
        executor: Any = SimpleNamespace(
            warm_up_prompts=lambda: did.append(f"prompts of {name}"),
            lanes=LaneLayout(1, 100),
            backend="fused",
        )
        loaded: Any = SimpleNamespace(device=torch.device("cpu"), rank=object())
        return Engine(executor, loaded, 90, 10, ("", ""), 0.0, {}, "cpu")

    monkeypatch.setattr(loading, "load_engine", lambda *_, **__: engine("target"))
    monkeypatch.setattr(loading, "load_head_engine", lambda *_, **__: engine("heads"))
    monkeypatch.setattr(loading, "head_kind_of", lambda *_: HeadKind.EAGLE)
    monkeypatch.setattr(loading, "compile_in_background", lambda: False)
    assert (
        load(replace(CONFIG, fixed_rows=0, home_drafter="heads"), Heart()).home_drafter is not None
    )
    assert did == ["target loaded", "heads loaded", "prompts of target"]


def test_a_target_is_asked_for_fixed_rows_and_whether_its_bits_depend_on_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}

    def load_engine(model: str, **wanted: Any) -> Any:
        asked.update(wanted)
        return SimpleNamespace(bits="")

    monkeypatch.setattr(loading, "load_engine", load_engine)
    heart = Heart()
    load(CONFIG, cast(Any, heart))
    assert (asked["fixed_rows"], asked["checks_bits"]) == (16, True)
    assert heart.state == "ready"


def test_a_loop_that_is_recorded_says_what_came_and_what_was_sent() -> None:
    recorder = Recorder()
    heart = Heart()
    heart.watch.record(recorder)
    script, link = Script(lambda event: [Send(CLOSE)] if event == Arrived(CLOSE) else []), Link([])
    link.turns = [[encode(CLOSE)]]
    make: Any = Loop
    with pytest.raises(Ended):
        make(link, heart, Device(), script, lambda action: action).run()
    frame = encode(CLOSE)
    said = [one for one in records_of(recorder.take()) if one.mark in list(Mark)]
    assert [(one.mark, one.kind, one.detail) for one in said] == [
        (Mark.RECEIVED, frame[0], crc32(frame)),
        (Mark.SENT, frame[0], crc32(frame)),
    ]


@pytest.mark.parametrize("traced", [False, True])
def test_a_node_records_only_if_its_coordinator_wants_a_trace(
    monkeypatch: pytest.MonkeyPatch, *, traced: bool
) -> None:
    monkeypatch.setattr(loading, "shake_hands", lambda *_: Welcome(9, 0, traced))
    recorded: list[bool] = []
    heart: Any = SimpleNamespace(record=lambda: recorded.append(True))
    loaded = SimpleNamespace(eos_token_ids=(), vocab_size=9, dtype="torch.float32")
    loaded.num_parameters, loaded.hidden_size, loaded.num_layers = 9, 4, 1
    lanes: Any = SimpleNamespace(lanes=SimpleNamespace(count=1), backend="fused", forms="torch's")
    engine = Engine(lanes, cast(Any, loaded), 9, 9, ("", ""), 0.1, {}, "cpu")
    introduce(CONFIG, cast(Any, None), engine, heart)
    assert recorded == [True] * traced


def test_a_node_that_tunes_finds_everything_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def found(value: int, *, tunes: bool) -> int:
        kept = loading.kept_of(replace(CONFIG, tunes=tunes))
        return kept.found("number", (), lambda: value, lambda one: one == value, needs_quiet=False)

    assert found(1, tunes=False) == 1
    assert [found(2, tunes=tunes) for tunes in (False, True)] == [2, 2]
    written = (tmp_path / "slipstream" / "choices.json").stat().st_mtime_ns
    assert found(2, tunes=False) == 2
    assert (tmp_path / "slipstream" / "choices.json").stat().st_mtime_ns == written
    assert found(2, tunes=True) == 2
    assert (tmp_path / "slipstream" / "choices.json").stat().st_mtime_ns > written


def test_times_of_places_are_kept_apart_by_all_that_changes_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, ...]] = []
    places = SimpleNamespace(has_more_cores=True, measured=({}, {}), names=("own", "all"))
    monkeypatch.setattr(loading, "places_of", lambda *_: places)
    monkeypatch.setattr(loading, "time_places", lambda *given: asked.append(given[-2]))
    monkeypatch.setattr(loading, "name_and_size", lambda *_: "a model")
    monkeypatch.setattr(loading, "replace", lambda engine, **_: engine)
    loaded = SimpleNamespace(device=torch.device("cpu"), rank=None, dtype=torch.bfloat16)
    engine = SimpleNamespace(loaded=loaded, executor=SimpleNamespace(backend="fused"), pass_s={})
    for quantization in ("", "int8"):
        config = replace(CONFIG, fixed_rows=None, quantization=quantization)
        loading._placed(cast(Engine, engine), config, lambda _: None)
    assert asked[0] != asked[1], "weights of other formats"
    assert all({"a model", "fused", "torch.bfloat16"} < set(about) for about in asked)
