"""Where a drafter's logits are not finite it stops drafting, and lives."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_node.compute import NONE_ALLOWED, NOTHING, Action, Children, Compute, Proposed
from drafter_node.drafting import Drafting
from drafter_node.known import Known
from drafter_node.scheduling import Schedule
from drafter_node.worker import Worker
from engine.checkpoint.model import load_model
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from node.costs import NOTHING_KNOWN, Passes
from node.dispatcher import Dispatcher
from node.events import Afterwards, Allocate, Arrived, MoveRows, Send, Tick, WaitUntil, Wipe
from node.forwards import Forwards, SimulatedDevice
from node.lanes import Lanes
from proto.messages import Draft, Limits, Message, Open
from tests.drafter_node.drafter import Drafter, chosen
from tests.policies import synchronous
from tests.target_node.real import heart
from tests.texts import opening, verdict
from tests.tiny_models import make_model

BAD = 127  # no token of the texts that are checked at load
PROMPT = tuple(range(3, 30))


def test_below_a_draft_with_such_a_row_nothing_is_drafted_until_the_text_goes_on() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=synchronous(4)))
    assert drafter.drafts(3) != []
    drafter.ticks()
    said, wipe = drafter.answers_rows(2, (NOTHING,))
    assert wipe == Wipe(0, 2)
    assert isinstance(said, Send)
    assert isinstance(said.message, Draft)
    assert said.message.done
    assert drafter.is_idle()
    drafter.hears(verdict((1, 2), 3, 4, num_drafted=1, num_accepted=1))
    (compute,) = drafter.ticks()
    assert isinstance(compute, Compute)
    (part,) = compute.parts
    assert (part.feed.tokens, part.feed.positions) == ((3, 4), (2, 3))


def test_where_a_text_allows_none_of_its_tokens_a_drafter_reads_nothing_anew() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=synchronous(4)))
    drafter.ticks()
    said = drafter.answers_rows(1, (NONE_ALLOWED,))
    assert not any(isinstance(one, Wipe) for one in said)
    drafter.ticks()
    assert drafter.is_idle()
    drafter.hears(verdict((1, 2), 3))
    assert drafter.drafts(4) != [], "the next token may be another matter"


def test_what_is_cached_is_read_anew_once_and_then_the_drafter_has_no_more() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=synchronous(4)))
    drafter.ticks()
    assert drafter.answers_rows(1, (NOTHING,))[1:] == [Wipe(0, 0)]
    assert drafter.is_idle()
    drafter.hears(verdict((1, 2), 3))
    (compute,) = drafter.ticks()
    assert isinstance(compute, Compute)
    assert compute.parts[0].feed.tokens == (1, 2, 3)
    drafter.answers_rows(2, (NOTHING,))
    drafter.hears(verdict((1, 2, 3), 4))
    drafter.ticks()
    assert drafter.is_idle()
    drafter.hears(opening(1, 2, 3, 4, incarnation=2, policy=synchronous(4)))
    assert any(isinstance(action, Compute) for action in drafter.ticks()), "a new life begins"


def test_a_row_that_is_well_again_begins_the_count_anew() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=synchronous(1)))
    for token in range(3, 9):
        drafter.ticks()
        drafter.answers_rows(token - 2, (NOTHING if token % 2 else chosen(token),))
        drafter.ticks()
        drafter.hears(verdict(range(1, token), token))
    assert any(isinstance(action, Compute) for action in drafter.ticks())


def test_nothing_is_copied_from_others_before_the_text_has_been_read_well() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=synchronous(4)))
    assert drafter.machine.may_copy
    drafter.ticks()
    drafter.answers_rows(1, (NOTHING,))
    drafter.hears(verdict((1, 2), 3))
    drafter.ticks()
    assert not drafter.machine.may_copy
    drafter.answers_rows(2, (chosen(4),))
    assert drafter.machine.may_copy


class RealDrafter:
    """The machines of a drafter, and what they ask for done by an executor."""

    def __init__(self, executor: ModelExecutor) -> None:
        self.executor = executor
        known = Known(max_len=200, steps=Passes(NOTHING_KNOWN))
        lanes = Lanes(executor.lanes.count, executor.capacity)
        schedule = Schedule(lanes, known, num_per_pass=executor.num_lanes_per_pass)
        self.dispatcher: Dispatcher[Drafting, Proposed, Action] = Dispatcher(lanes, schedule)
        forwards = Forwards(executor, heart(), SimulatedDevice(0.0, 0.0))
        config: Any = type("Config", (), {"max_candidates": 8})
        engine: Any = type("Engine", (), {"loaded": executor.loaded})
        self.worker = Worker(config, engine, forwards, 199, lambda: False)
        self.sent: list[Draft] = []

    def drafts(self, *messages: Message) -> tuple[int, ...]:
        """The chain that it drafts after it has heard these."""
        self.sent.clear()
        for message in messages:
            self._handle(Arrived(message))
        for _ in range(20):
            self._handle(Tick())
        made: dict[int, int] = {}
        for message in self.sent:
            made.update(enumerate(message.tokens, message.parent_len))
        return tuple(made[position] for position in sorted(made))

    def _handle(self, event: Any) -> None:
        for action in self.dispatcher.handle(event, 0.0):
            match action:
                case Send(Draft() as message):
                    self.sent.append(message)
                case MoveRows(moves):
                    self.executor.move(*moves)
                case Wipe(lane, start):
                    self.executor.wipe(lane, start)
                case Compute():
                    self._handle(self.worker.compute(action))
                    self._handle(Afterwards())
                case Send() | WaitUntil() | Allocate():
                    pass
                case _:
                    raise AssertionError(action)
        self.dispatcher.check()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


def real(folder: Path, backend: str, *bad: int) -> RealDrafter:
    loaded = load_model(str(folder), dtype="float32")
    with torch.no_grad():
        for token in bad:
            loaded.model.get_input_embeddings().weight[token] = math.nan
    return RealDrafter(make_executor(loaded, 256, backend=backend))


def asked(*tokens: int) -> Open:
    return opening(*tokens, policy=synchronous(4), limits=Limits(100, ()))


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_after_a_draft_that_is_not_finite_it_drafts_what_it_would_have(
    folder: Path, backend: str
) -> None:
    clean = real(folder, backend)
    (first, second, *_) = clean.drafts(asked(*PROMPT))
    tested = real(folder, backend, second)
    assert tested.drafts(asked(*PROMPT)) == (first, second)
    news = verdict(PROMPT, first, 50)
    want = clean.drafts(news)
    assert second not in want
    assert tested.drafts(news) == want
    assert len(want) == 4


def test_a_text_with_such_a_token_has_no_more_drafts_and_the_next_one_has(folder: Path) -> None:
    clean, tested = real(folder, "fused"), real(folder, "fused", BAD)
    assert len(tested.drafts(asked(*PROMPT))) == 4
    base, drafts = PROMPT, []
    for token in (BAD, 7, 8, 9):
        drafts.append(tested.drafts(verdict(base, token)))
        base = (*base, token)
    assert drafts == [(), (), (), ()]
    want = clean.drafts(asked(*PROMPT, 5))
    again = opening(*PROMPT, 5, incarnation=2, policy=synchronous(4), limits=Limits(100, ()))
    assert BAD not in want
    assert tested.drafts(again) == want


def test_a_drafter_that_cannot_follow_a_grammar_drafts_as_if_there_were_none(folder: Path) -> None:
    want = real(folder, "fused").drafts(asked(*PROMPT))
    opened = asked(*PROMPT)
    held = replace(opened, sampling=replace(opened.sampling, grammar="start: /a/", end_ids=(1,)))
    assert real(folder, "fused").drafts(held) == want


def test_a_forward_that_finds_no_memory_is_as_if_the_root_were_bad() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=synchronous(4)))
    assert drafter.drafts(3) != []
    (asked,) = drafter.ticks()
    assert isinstance(asked, Compute)
    failed = Proposed(asked.ticket, ((),), 5, has_failed=True)
    said, wipe = drafter._handle(failed)
    assert wipe == Wipe(0, 0)
    assert isinstance(said, Send)
    drafter.tells()
    assert drafter.is_idle()
    drafter.hears(verdict((1, 2), 3))
    (compute,) = drafter.ticks()
    assert isinstance(compute, Compute)
    assert compute.parts[0].feed.tokens == (1, 2, 3)


@pytest.mark.parametrize("children", [(), (NOTHING,)], ids=["no memory", "not finite"])
def test_what_a_forward_without_memory_or_numbers_was_to_feed_is_fed_for_the_next_text(
    children: tuple[Children, ...],
) -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, 3, policy=synchronous(4)))
    (asked,) = drafter.ticks()
    assert isinstance(asked, Compute)
    drafter.hears(opening(1, 2, 3, incarnation=2, policy=synchronous(4)))
    bad = Proposed(asked.ticket, (children,), 5, has_failed=not children)
    assert drafter._handle(bad) == [Wipe(0, 0)]
    drafter.tells()
    (compute,) = drafter.ticks()
    assert isinstance(compute, Compute)
    assert compute.parts[0].feed.tokens == (1, 2, 3)


def test_a_worker_without_memory_says_so_and_lives(tmp_path: Path) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32")
    executor = make_executor(loaded, 256)
    said = heart()
    told: list[str] = []
    said.trouble = told.append

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nAnd more")

    executor.forward = fails  # type: ignore[assignment,method-assign]
    forwards = Forwards(executor, said, SimulatedDevice(0.0, 0.0))
    worker: Any = Worker.__new__(Worker)
    worker.forwards, worker.head, worker.num_rows = forwards, None, 199
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=synchronous(4)))
    (asked,) = drafter.ticks()
    made = worker.compute(asked)
    assert made.has_failed
    assert made.children == ((),)
    (line,) = told
    assert "memory was missing" in line
    assert "\n" not in line
