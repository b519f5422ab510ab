"""Several texts of one call: what is asked for when, what is read, and how all of it ends."""

import asyncio
import itertools
import signal
import threading
from collections.abc import Generator

import pytest

from coordinator.api.async_llm import AsyncLLM
from coordinator.api.config import SpeculationConfig
from coordinator.api.params import SamplingParams
from coordinator.api.requests import Batch, Request, Step
from proto.errors import ConfigurationError, NodeError, TextError
from tests.coordinator.api.scripted import SEED, Script, ScriptedPair

THREE = SamplingParams(temperature=1.0, n=3)


def shown(step: Step) -> tuple[int, str, bool]:
    """Index, text, and whether the request is finished."""
    return step.index, step.part.outputs[0].text, step.part.finished


def started(pair: ScriptedPair, *requests: Request) -> Generator[Step, None, None]:
    """The steps of a batch that has asked for its first texts, of which the first has begun."""

    def speak(script: Script) -> None:
        script.add(0)
        pair.begin = lambda _: None

    pair.begin = speak
    steps = Batch(pair.as_pair(), requests).steps()
    assert shown(next(steps)) == (0, "0", False)
    return steps


def test_as_many_texts_are_asked_for_as_can_be_written_and_the_next_when_one_ends() -> None:
    pair = ScriptedPair(num_seqs=2)
    requests = [pair.request(number) for number in (1, 2, 3, 4)]
    steps = started(pair, *requests)
    first, second = pair.asked
    second.add(5)
    second.end()
    assert [next(steps).request for _ in range(2)] == [requests[1]] * 2
    assert requests[1].is_complete
    assert [script.prompt for script in pair.asked] == [(1,), (2,), (3,)], "before it was read"
    first.end()
    assert next(steps).request is requests[0]
    for script in pair.asked[2:]:
        script.end()
    assert [step.request for step in steps] == requests[2:]
    assert len({script.reader.since for script in pair.asked if script.reader}) == 1
    assert requests[1].whole().outputs[0].text == "5"
    assert not any(script.is_cancelled for script in pair.asked)


def test_the_texts_of_a_prompt_are_written_at_once_with_one_seed() -> None:
    pair = ScriptedPair(num_seqs=8)
    request = pair.request(1, params=THREE)
    steps = started(pair, request)
    assert [script.index for script in pair.asked] == [0, 1, 2]
    assert [script.params.seed for script in pair.asked] == [None, SEED, SEED]
    for script in reversed(pair.asked):
        script.add(script.index)
        script.end()
    made = [shown(next(steps)) for _ in range(6)]
    assert [index for index, _, _ in made] == [2, 2, 1, 1, 0, 0]
    assert [is_finished for _, _, is_finished in made] == [False] * 5 + [True]
    assert list(steps) == []
    whole = request.whole()
    assert [one.index for one in whole.outputs] == [0, 1, 2]
    assert [one.token_ids for one in whole.outputs] == [[0, 0], [1], [2]]
    assert whole.seed == SEED


def test_the_first_error_ends_the_texts_of_its_call_and_no_others() -> None:
    pair = ScriptedPair(num_seqs=3)
    requests = [pair.request(number) for number in (1, 2, 3, 4)]
    steps, others = started(pair, *requests), started(pair, pair.request(9))
    pair.asked[1].fail(NodeError("no more"))
    with pytest.raises(NodeError, match="no more"):
        next(steps)
    assert [request.failure is None for request in requests] == [True, False, True, True]
    assert [script.is_cancelled for script in pair.asked] == [True, True, True, False]
    pair.asked[3].end()
    assert [step.is_last for step in others] == [True]


def test_a_prompt_that_is_refused_ends_the_texts_before_it() -> None:
    pair = ScriptedPair(num_seqs=2)

    def refuse(script: Script) -> None:
        if script.prompt == (2,):
            raise ConfigurationError("it does not fit")

    pair.begin = refuse
    with pytest.raises(ConfigurationError, match="it does not fit"):
        next(Batch(pair.as_pair(), [pair.request(1), pair.request(2)]).steps())
    assert [script.is_cancelled for script in pair.asked] == [True]


def test_leaving_the_steps_ends_what_is_open_and_asks_for_nothing_more() -> None:
    pair = ScriptedPair(num_seqs=2)
    steps = started(pair, *[pair.request(number) for number in (1, 2, 3)])
    pair.asked[0].end()
    next(steps)
    steps.close()
    assert [script.is_cancelled for script in pair.asked] == [False, True, True]


def test_a_call_without_prompts_is_over_at_once() -> None:
    assert list(Batch(ScriptedPair(1).as_pair(), []).steps()) == []


def test_nothing_of_a_text_comes_after_its_stop_string() -> None:
    pair = ScriptedPair(num_seqs=1)
    request = pair.request(1, params=SamplingParams(stop="7"))
    steps = started(pair, request)
    pair.asked[0].add(7)
    pair.asked[0].add(8)
    assert [step.is_last for step in steps] == [False, True]
    (made,) = request.whole().outputs
    assert (made.token_ids, made.stop_reason, made.finish_reason) == ([0, 7], "7", "stop")


def test_a_task_that_is_cancelled_ends_its_own_texts_alone() -> None:
    pair = ScriptedPair(num_seqs=4)
    llm = AsyncLLM.of(pair.as_pair(), SpeculationConfig())

    async def read(*requests: Request) -> list[tuple[str, bool]]:
        return [
            (output.outputs[0].text, output.finished)
            for request in requests
            async for output in llm.answer(request)
        ]

    async def main() -> list[list[tuple[str, bool]]]:
        kept = [asyncio.create_task(read(pair.request(number))) for number in (1, 2)]
        lost = [asyncio.create_task(read(pair.request(number))) for number in (3, 4, 5)]
        async with asyncio.timeout(5.0):
            while len(pair.asked) < 4:
                await asyncio.sleep(0)
        for task in lost:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        def write() -> None:
            for script in pair.asked[:2]:
                script.add(script.prompt[0])
                script.end()

        await asyncio.to_thread(write)
        return await asyncio.wait_for(asyncio.gather(*kept), 5.0)

    assert asyncio.run(main()) == [[(number, False), ("", True)] for number in ("1", "2")]
    assert [script.is_cancelled for script in pair.asked] == [False] * 2 + [True] * 3


def test_a_text_that_cannot_be_completed_says_so_and_the_others_are_delivered() -> None:
    pair = ScriptedPair(num_seqs=3)
    requests = [pair.request(number) for number in (1, 2, 3, 4)]
    steps = started(pair, *requests)
    pair.asked[1].add(7)
    pair.asked[1].fail(TextError("no more"))
    for script in (pair.asked[0], pair.asked[2]):
        script.end()
    seen = list(itertools.islice(steps, 4))
    pair.asked[3].end()
    assert [step.request for step in (*seen, *steps) if step.is_last] == [
        *(requests[1], requests[0], requests[2], requests[3])
    ]
    made = [request.whole().outputs[0] for request in requests]
    assert [one.finish_reason for one in made] == ["length", "error", "length", "length"]
    assert (made[1].token_ids, made[1].error, made[1].metrics) == ([7], "no more", None)
    assert [one.error for one in made if one is not made[1]] == [None] * 3
    assert not any(script.is_cancelled for script in pair.asked)


def test_one_of_several_texts_of_a_prompt_may_fail() -> None:
    pair = ScriptedPair(num_seqs=3)
    request = pair.request(1, params=THREE)
    steps = started(pair, request)
    pair.asked[2].fail(TextError("no more"))
    pair.asked[0].end()
    pair.asked[1].end()
    assert [step.part.finished for step in steps] == [False, False, True]
    assert [one.error for one in request.whole().outputs] == [None, None, "no more"]


def test_ctrl_c_ends_all_texts_of_the_call_at_once_and_no_others() -> None:
    pair = ScriptedPair(num_seqs=3)
    other = started(pair, pair.request(9))
    steps = started(pair, pair.request(1), pair.request(2))
    pressing = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT))
    main = threading.get_ident()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        list(steps)
    signal.signal(signal.SIGINT, before)
    assert [script.is_cancelled for script in pair.asked] == [False, True, True]
    pair.asked[0].end()
    assert len(list(other)) == 1
