"""The Python API on real processes: outputs, streams that stop, queues, asyncio, memory."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from itertools import zip_longest
from pathlib import Path

import pytest

import coordinator.cluster.service
from coordinator import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from coordinator.cluster.node import Node
from proto.errors import ClosedError, ConfigurationError, NodeError
from proto.messages import Role
from tests.process.test_faults import ROOT, alive, wait_for
from tests.tiny_models import make_model, make_noised
from tests.tiny_tokenizer import VOCAB_SIZE, save_bytewise_tokenizer

pytestmark = pytest.mark.process

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
LONG = SamplingParams(max_tokens=900, ignore_eos=True)  # at least 180 passes
PROMPTS = ["one", "two, three", "four five six"]
SOON_S = 3.0  # several heartbeats

# Memory: what a process may grow by between its 20th and its 100th text. The keys and values of one
# text of these models are 60 KiB, so a text that is kept somewhere shows at 4.7 MiB.
NUM_TEXTS, NUM_WARM_UP, SLACK_KIB = 100, 20, 2048


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A random target and a drafter that agrees with it some of the time, with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    target = make_model("llama", root / "target", vocab=VOCAB_SIZE + 3)
    drafter = make_noised(target, root / "drafter", 0.2)
    for folder in (target, drafter):
        save_bytewise_tokenizer(folder)
    return str(target), str(drafter)


@pytest.fixture(scope="module")
def llm(folders: tuple[str, str]) -> Iterator[LLM]:
    """One for most tests, a text at a time; passes of 5 ms, so that a stream has a middle.

    Drafts are waited for: on a busy machine, those of a drafter that runs ahead may all be late.
    """
    made = LLM(
        *folders,
        speculative_config={"method": "sync", "adaptive": False},
        dtype="float32",
        max_model_len=1000,
        max_num_seqs=1,
        simulate_target_ms=5.0,
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[str]:
    """What comes of PROMPTS."""
    return [output.outputs[0].text for output in llm.generate(PROMPTS, PARAMS)]


def nodes_of(llm: LLM) -> list[Node]:
    """Target and drafter, as their last heartbeats show them."""
    nodes = [llm.pair.service.registry.of(role) for role in (Role.TARGET, Role.DRAFTER)]
    return [node for node in nodes if node is not None]


def frees_both_nodes(llm: LLM) -> bool:
    """Whether the heartbeats soon show no session, long before a text of LONG is complete."""
    target, drafter = nodes_of(llm)
    passes = target.progress
    is_free = wait_for(lambda: target.marks == drafter.marks == (), SOON_S)
    return is_free and target.progress - passes < 100


def shows_a_session(llm: LLM) -> bool:
    return all(node.marks for node in nodes_of(llm))


def test_outputs_hold_prompt_tokens_text_origins_and_metrics(llm: LLM, texts: list[str]) -> None:
    ids = list(llm.pair.encode(PROMPTS[0]))
    outputs = llm.generate([PROMPTS[0], ids, {"prompt_token_ids": ids}], PARAMS)
    num_accepted = 0
    for output, prompt in zip(outputs, [PROMPTS[0], None, None], strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == ids
        assert output.finished
        made = output.outputs[0]
        assert made.text == texts[0]
        assert (made.index, made.finish_reason, made.stop_reason) == (0, "length", None)
        assert len(made.token_ids) == len(made.token_origins) == PARAMS.max_tokens
        assert set(made.token_origins) <= {"draft:model", "recovered", "bonus", "plain"}
        assert made.metrics is not None
        accepted = made.token_origins.count("draft:model")
        assert made.metrics.num_accepted_tokens == accepted
        num_accepted += accepted
        figures = made.metrics.speculative_decoding
        assert figures is not None
        assert figures.num_accepted_draft_tokens == accepted
        assert sum(figures.acceptance_histogram) == figures.num_spec_steps
        assert figures.num_spec_tokens == 4
    assert num_accepted > 0


def test_one_prompt_makes_a_list_of_one_and_each_may_have_its_parameters(llm: LLM) -> None:
    (output,) = llm.generate("one", SamplingParams(max_tokens=3, ignore_eos=True))
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2)]
    outputs = llm.generate(["one", [1, 2, 3]], each)
    assert [len(made.outputs[0].token_ids) for made in (output, *outputs)] == [3, 1, 2]
    assert llm.generate([]) == []


def test_a_seed_gives_the_same_text_and_a_fresh_one_is_reported(llm: LLM) -> None:
    sampled = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    (first,) = llm.generate("one", sampled)
    (again,) = llm.generate("one", sampled.model_copy(update={"seed": first.seed}))
    (other,) = llm.generate("one", sampled)
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    assert first.seed == again.seed != other.seed
    assert first.outputs[0].token_ids != other.outputs[0].token_ids


def test_the_parts_of_a_stream_add_up_to_the_text(llm: LLM, texts: list[str]) -> None:
    parts = list(llm.stream(PROMPTS[1], PARAMS))
    assert "".join(part.outputs[0].text for part in parts) == texts[1]
    assert sum(len(part.outputs[0].token_ids) for part in parts) == PARAMS.max_tokens
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].outputs[0].finish_reason == "length"
    assert parts[-1].outputs[0].metrics is not None
    assert len(parts) > 5


def test_leaving_a_stream_in_the_middle_frees_both_nodes(llm: LLM, texts: list[str]) -> None:
    for part in llm.stream("zero", LONG):
        if wait_for(lambda: shows_a_session(llm), SOON_S):
            break
        assert not part.finished
    assert frees_both_nodes(llm)
    assert llm.generate(PROMPTS[2], PARAMS)[0].outputs[0].text == texts[2]


def test_a_stream_is_left_while_another_text_waits(llm: LLM, texts: list[str]) -> None:
    stream = llm.stream("zero", LONG)
    next(stream)
    found: list[RequestOutput] = []
    waiting = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS[0], PARAMS)))
    waiting.start()
    next(stream)
    stream.close()
    waiting.join(timeout=30)
    assert [output.outputs[0].text for output in found] == [texts[0]]


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ("", "the prompt is empty"),
        ([], None),
        ([[]], "the prompt is empty"),
        ([1, VOCAB_SIZE + 3], "prompt ids must lie in"),
        ([1.5], "a prompt is a string"),
        ({"prompt_ids": [1]}, "a prompt is a string"),
        (None, "a prompt is a string"),
        ("a" * 1001, "the prompt has 1001 tokens"),
    ],
)
def test_a_prompt_that_does_not_fit_is_one_line(llm: LLM, prompt: object, line: str | None) -> None:
    if line is None:
        assert llm.generate(prompt) == []  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigurationError) as caught:
        llm.generate(prompt)  # type: ignore[arg-type]
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parameters_must_be_as_many_as_prompts(llm: LLM) -> None:
    with pytest.raises(ConfigurationError, match="2 prompts but 1 SamplingParams"):
        llm.generate(["one", "two"], [PARAMS])


def test_a_chat_is_a_prompt_by_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "one"}]
    (output,) = llm.chat(conversation, PARAMS)
    assert output.prompt == "User: one\n\nAssistant:"
    assert llm.chat([conversation], PARAMS)[0].outputs[0].text == output.outputs[0].text


def test_texts_asked_for_at_once_are_served_in_order(llm: LLM, texts: list[str]) -> None:
    pair = llm.pair
    prompts = [pair.encode(prompt) for prompt in PROMPTS * 3]
    streams = [pair.generate(ids, llm._speculation, PARAMS)[0] for ids in prompts]
    streams[4].cancel()
    made = []
    for number, stream in enumerate(streams):
        if number == 4:
            with pytest.raises(ClosedError, match="cancelled"):
                list(stream)
            continue
        tokens = tuple(token for emit in stream for token in emit.tokens)
        assert pair.tokenization is not None
        assert pair.tokenization.decode(tokens) == texts[number % 3], number
        assert stream.result is not None
        made.append(stream.result.metrics.queued_s)
    assert made == sorted(made)
    assert made[-1] > made[0]


def test_the_queue_has_a_limit_for_those_who_do_not_wait(
    llm: LLM, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator.cluster.service, "MAX_SESSIONS", 2)
    pair, ids = llm.pair, llm.pair.encode("one")
    streams = [pair.generate(ids, llm._speculation, LONG)[0] for _ in range(2)]
    with pytest.raises(NodeError, match="2 texts are queued already"):
        pair.generate(ids, llm._speculation, LONG)
    found: list[RequestOutput] = []
    waiting = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS[0], PARAMS)))
    waiting.start()
    assert wait_for(lambda: len(pair.service._streams) == 3, SOON_S)
    for stream in streams:
        stream.cancel()
    waiting.join(timeout=30)
    assert [output.outputs[0].text for output in found] == [texts[0]]
    assert len(pair.service._streams) == 0


def test_asyncio_requests_run_at_once_and_leave_the_loop_free(llm: LLM, texts: list[str]) -> None:
    async def count_ticks(until: asyncio.Event) -> int:
        ticks = 0
        while not until.is_set():
            await asyncio.sleep(0.002)
            ticks += 1
        return ticks

    asynchronous = AsyncLLM.of(llm.pair, llm._speculation)

    async def streamed(prompt: str) -> str:
        parts = asynchronous.generate(prompt, PARAMS, output_kind=RequestOutputKind.DELTA)
        return "".join([part.outputs[0].text async for part in parts])

    async def main() -> tuple[list[str], int]:
        done = asyncio.Event()
        ticks = asyncio.create_task(count_ticks(done))
        made = await asyncio.gather(*map(streamed, PROMPTS))
        done.set()
        return made, await ticks

    made, ticks = asyncio.run(main())
    assert made == texts
    assert ticks > 10, "the event loop was blocked"


def test_a_cancelled_task_and_a_closed_iterator_free_the_nodes(llm: LLM, texts: list[str]) -> None:
    asynchronous = AsyncLLM.of(llm.pair, llm._speculation)

    async def whole(prompt: str, params: SamplingParams) -> str:
        outputs = [output async for output in asynchronous.generate(prompt, params)]
        return outputs[-1].outputs[0].text

    async def main() -> str:
        task = asyncio.create_task(whole("zero", LONG))
        waiting = asyncio.create_task(whole("zero", LONG))
        while not shows_a_session(llm):
            await asyncio.sleep(0.01)
        waiting.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with aclosing(asynchronous.generate("zero", LONG)) as parts:
            async for part in parts:
                assert not part.finished
                break
        return await whole(PROMPTS[0], PARAMS)

    passes = nodes_of(llm)[0].progress
    assert asyncio.run(main()) == texts[0]
    assert frees_both_nodes(llm)
    assert len(llm.pair.service._streams) == 0
    assert nodes_of(llm)[0].progress - passes < 150, "the nodes went on with a text left behind"


def resident_kib(pid: int) -> int:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.mark.slow
def test_a_hundred_texts_leave_the_memory_of_all_three_processes_flat(llm: LLM) -> None:
    def memory() -> dict[str, int]:
        pids = {**llm.pair.pids(), "coordinator": "self"}
        return {role: resident_kib(pid) for role, pid in pids.items()}  # type: ignore[arg-type]

    before: dict[str, int] = {}
    for number in range(NUM_TEXTS):
        if number == NUM_WARM_UP:
            before = memory()
        (output,) = llm.generate(f"text {number} of {NUM_TEXTS}", PARAMS)
        assert len(output.outputs[0].token_ids) == PARAMS.max_tokens
    grown = {role: after - before[role] for role, after in memory().items()}
    assert len(grown) == 3
    assert all(kib <= SLACK_KIB for kib in grown.values()), grown


@pytest.mark.long
def test_two_llms_live_side_by_side(llm: LLM, texts: list[str], folders: tuple[str, str]) -> None:
    config = {"method": "sync", "num_speculative_tokens": 2}
    with LLM(*folders, dtype="float32", max_model_len=1000, speculative_config=config) as other:
        pids = other.pair.pids()
        streams = [one.stream(PROMPTS[0], PARAMS) for one in (llm, other)]
        made = ["", ""]
        for parts in zip_longest(*streams):
            for index, part in enumerate(parts):
                made[index] += "" if part is None else part.outputs[0].text
        assert made == [texts[0]] * 2
        unfinished = other.stream("zero", LONG)
        next(unfinished)
    assert not any(map(alive, pids.values()))
    for use in (
        lambda: other.generate("one"),
        lambda: other.stream("one"),
        lambda: other.chat([{"role": "user", "content": "one"}]),
    ):
        with pytest.raises(ClosedError, match="this LLM was closed; make a new one"):
            use()
    with pytest.raises(ClosedError, match="closed"):
        list(unfinished)
    other.close()
    assert llm.generate(PROMPTS[0], PARAMS)[0].outputs[0].text == texts[0]


@pytest.mark.long
def test_the_example_of_the_documentation_runs(folders: tuple[str, str]) -> None:
    pages = [path for path in (ROOT / "README.md", ROOT / "docs/python-api.md") if path.exists()]
    blocks = [re.search(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S) for page in pages]
    found = next(block for block in blocks if block is not None)
    code = found[1].replace("models/target", folders[0]).replace("models/drafter", folders[1])
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tokens per target pass" in done.stdout
    assert time.monotonic() - started < 120


def test_a_killed_target_ends_every_waiting_text_with_the_same_line(
    folders: tuple[str, str],
) -> None:
    errors: list[str] = []

    def use(llm: LLM) -> None:
        try:
            llm.generate("zero", LONG)
        except NodeError as error:
            errors.append(str(error))

    settings = {"dtype": "float32", "max_model_len": 1000, "target_restarts": 0}
    with LLM(*folders, **settings, simulate_target_ms=40.0) as llm:
        threads = [threading.Thread(target=use, args=(llm,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert wait_for(lambda: shows_a_session(llm), SOON_S)
        os.kill(llm.pair.pids()["target"], signal.SIGKILL)
        for thread in threads:
            thread.join(timeout=10)
        assert len(errors) == 3
        assert len(set(errors)) == 1
        assert re.match(r"the target process was ended by signal 9.*after \d+ tok", errors[0])
        with pytest.raises(NodeError, match="signal 9"):
            llm.generate("one")
