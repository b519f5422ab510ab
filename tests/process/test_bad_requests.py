"""Requests that cannot be carried out: each is refused alone, in its own words."""

import asyncio
import json
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator import LLM, AsyncLLM, SamplingParams
from coordinator.api.config import SpeculationConfig
from coordinator.cluster.service import Service
from coordinator.launching.launcher import Launcher
from coordinator.text.session import Session
from proto.errors import ClosedError, ConfigurationError, LocalProtocolError, NodeError
from proto.messages import MAX_SESSIONS, MAX_STOP_IDS, Limits, Role, SamplingSpec
from tests.process.patience import wait_for
from tests.tiny_models import make_model
from tests.tiny_tokenizer import save_bytewise_tokenizer

pytestmark = pytest.mark.process

VOCAB = 400
EOS_IDS = range(150, 278)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A random model drafted by itself, with many end-of-text tokens of its own."""
    folder = make_model("llama", tmp_path_factory.mktemp("models") / "llama", vocab=VOCAB)
    save_bytewise_tokenizer(folder)
    for path in (folder / "config.json", folder / "generation_config.json"):
        values = json.loads(path.read_text()) | {"eos_token_id": list(EOS_IDS)}
        path.write_text(json.dumps(values))
    with LLM(str(folder), str(folder), dtype="float32", max_model_len=500, max_num_seqs=1) as made:
        yield made


def refused(llm: LLM, prompt: Any, params: Any) -> str:
    """The one line that every way to ask for a text says of it; the next text is as ever."""

    async def in_a_loop() -> None:
        async for _ in AsyncLLM.of(llm.pair, llm._speculation).generate(prompt, params):
            pass

    lines = set()
    for ask in (
        lambda: llm.generate(prompt, params),
        lambda: list(llm.stream(prompt, params)),
        lambda: asyncio.run(in_a_loop()),
    ):
        with pytest.raises(ConfigurationError) as caught:
            ask()
        lines.add(str(caught.value))
    assert len(llm.generate("one", PARAMS)[0].outputs[0].token_ids) == 12
    assert len(llm.pair.service._streams) == 0
    (line,) = lines
    assert "\n" not in line
    return line


def with_nan_bias() -> SamplingParams:
    params = SamplingParams(logit_bias={5: 1.0}, max_tokens=12)
    params.logit_bias[5] = float("nan")
    return params


def with_attribute() -> SamplingParams:
    params = SamplingParams(max_tokens=12)
    object.__setattr__(params, "temperature", "hot")
    return params


@pytest.mark.parametrize(
    ("params", "line"),
    [
        (with_nan_bias(), "logit_bias: expected a finite number, got nan"),
        (with_attribute(), "temperature: expected a number"),
        (PARAMS.model_copy(update={"top_p": 2.0}), "top_p: expected at most 1, got 2.0"),
        (PARAMS.model_copy(update={"stop_token_ids": [-1]}), "stop_token_ids: "),
        (PARAMS.model_copy(update={"seed": 1 << 64}), "seed: "),
        (PARAMS.model_copy(update={"min_tokens": 99}), "min_tokens is 99; it must be at most max"),
        (PARAMS.model_copy(update={"topp": 1.0}), "SamplingParams has no setting 'topp'"),
        (SamplingParams.model_construct(logprobs="all"), "logprobs: expected a whole number"),
        (
            PARAMS.model_copy(update={"stop_token_ids": list(range(129))}),
            "stop_token_ids: expected at most 128 of them",
        ),
    ],
)
def test_parameters_that_no_node_could_be_told_are_refused_alone(
    llm: LLM, params: SamplingParams, line: str
) -> None:
    assert refused(llm, "one", params).startswith(line)


@pytest.mark.parametrize(
    ("prompt", "params", "line"),
    [
        (
            "one",
            {"max_tokens": 5},
            "sampling_params: expected SamplingParams, or a list of one for",
        ),
        ("one", 5, "sampling_params: expected SamplingParams, or a list of one for each prompt"),
        ("one", "greedy", "sampling_params: expected SamplingParams, or a list"),
        ("one", SamplingParams, "sampling_params: expected SamplingParams, or a list"),
        ("one", [None], "sampling_params: expected SamplingParams, got None"),
        ("one", [{"max_tokens": 5}], "sampling_params: expected SamplingParams, got {'max_tokens'"),
        ([None], None, "a prompt is a string, a list of token ids or {"),
        ([5, None], None, "a prompt is a string, a list of token ids or {"),
        ([["one"]], None, "a prompt is a string, a list of token ids or {"),
        (5, None, "a prompt is a string, a list of token ids or {"),
        (b"one", None, "a prompt is a string, a list of token ids or {"),
        ([True], None, "a prompt is a string, a list of token ids or {"),
        ({"prompt": 5}, None, "a prompt is a string, a list of token ids or {"),
        ([[1, "\n" * 200]], None, "a prompt is a string, a list of token ids or {"),
        ("one", [object()], "sampling_params: expected SamplingParams, got <object object at"),
    ],
)
def test_what_is_no_prompt_and_no_parameters_is_one_line(
    llm: LLM, prompt: Any, params: Any, line: str
) -> None:
    said = refused(llm, prompt, params)
    assert said.startswith(line)
    assert len(said) < 200


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        (None, "a conversation is a list of messages, and this is none: None"),
        (5, "a conversation is a list of messages, and this is none: 5"),
        ("one", "a conversation is a list of messages, and this is none: 'one'"),
        ({"role": "user", "content": "one"}, "a conversation is a list of messages, and this is"),
        ([], "the conversation is empty: give at least one message"),
        ([[]], "the conversation is empty: give at least one message"),
        ([None], 'a message has a "role" and a "content"; this one is None'),
        ([5], 'a message has a "role" and a "content"; this one is 5'),
        (["one"], 'a message has a "role" and a "content"; this one is \'one\''),
        ([[None]], 'a message has a "role" and a "content"; this one is None'),
        ([{"role": "user"}], 'a message has a "role" and a "content"; this one is {'),
        ([{"role": 5, "content": "one"}], 'the "role" of a message is a string, not 5'),
        ([{"role": "user", "content": 5}], 'the "content" of a message is a text, not 5'),
        ([{"role": "user", "content": None}], 'the "content" of a message is a text, not None'),
    ],
)
def test_what_is_no_conversation_is_one_line(llm: LLM, messages: Any, line: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        llm.chat(messages, PARAMS)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"prompt": "one"}, "a prompt is a tuple of token ids here, not 'one'"),
        ({"prompt": None}, "a prompt is a tuple of token ids here, not None"),
        ({"prompt": (1, "a")}, "a prompt is a tuple of token ids here, not (1, 'a')"),
        ({"speculation": "ar"}, "speculation: expected SpeculationConfig, got 'ar'"),
        (
            {"speculation": SpeculationConfig().model_copy(update={"window": 99})},
            "the nodes cannot",
        ),
        ({"params": None}, "sampling_params: expected SamplingParams, got None"),
    ],
)
def test_a_pair_says_what_it_takes(llm: LLM, values: dict[str, Any], line: str) -> None:
    good = {"prompt": (5, 6, 7), "speculation": SpeculationConfig(), "params": PARAMS}
    with pytest.raises(ConfigurationError) as caught:
        llm.pair.generate(**{**good, **values})
    assert str(caught.value).startswith(line)
    with pytest.raises(ConfigurationError, match="a prompt is a string here, not 5"):
        llm.pair.encode(5)  # type: ignore[arg-type]


def test_as_many_stop_tokens_as_a_request_may_name_fit_beside_the_models_own(llm: LLM) -> None:
    assert len(EOS_IDS) + 128 == MAX_STOP_IDS
    params = SamplingParams(stop_token_ids=list(range(22, 150)), max_tokens=300)
    assert llm.generate("one", params)[0].finished


def depth(error: BaseException) -> int:
    """Entries of a traceback."""
    return len(traceback.extract_tb(error.__traceback__))


def forgets(llm: LLM) -> bool:
    """Whether both nodes soon show no session."""
    nodes = [llm.pair.service.registry.of(role) for role in Role]
    return wait_for(lambda: all(node is not None and node.marks == () for node in nodes), 3.0)


@pytest.mark.parametrize(
    "mistake",
    [AssertionError("no such state"), LocalProtocolError("Open: too long"), KeyError("\n" * 400)],
    ids=lambda mistake: type(mistake).__name__,
)
def test_a_mistake_in_one_text_ends_that_text_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, mistake: Exception
) -> None:
    on_verdict = Session._on_verdict
    num_verdicts = 0

    def wrong(self: Session, *rest: Any) -> Any:
        nonlocal num_verdicts
        num_verdicts += 1
        if num_verdicts == 3:
            raise mistake
        return on_verdict(self, *rest)

    params = SamplingParams(max_tokens=300, ignore_eos=True)
    speculation = llm._speculation
    monkeypatch.setattr(Session, "_on_verdict", wrong)
    streams = [llm.pair.generate((5, 6, 7), speculation, params)[0] for _ in range(2)]
    kind = type(mistake).__name__
    with pytest.raises(NodeError, match=f"by a mistake of the coordinator, {kind}: ") as caught:
        list(streams[0])
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__cause__ is mistake
    assert sum(len(emit.tokens) for emit in streams[1]) == 300
    assert forgets(llm)
    assert len(llm.pair.service._streams) == 0


def test_a_text_that_is_refused_leaves_its_place_in_the_queue(llm: LLM) -> None:
    service, prompt = llm.pair.service, (5, 6, 7)
    policy, limits = llm._speculation.make(llm.pair.config), Limits(40, ())
    bad = SamplingSpec(temperature=1.0, bias_ids=(1,), bias_values=(float("nan"),))
    for _ in range(MAX_SESSIONS + 1):
        with pytest.raises(ConfigurationError, match="sampling: bias_values: expected numbers"):
            service.submit(prompt, sampling=bad, policy=policy, limits=limits)
    stream = service.submit(prompt, sampling=SamplingSpec(), policy=policy, limits=limits)
    assert sum(len(emit.tokens) for emit in stream) == 37


def test_what_ended_a_text_is_raised_anew_each_time(llm: LLM) -> None:
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    stream, _ = llm.pair.generate((5, 6, 7), llm._speculation, params)
    stream.cancel()
    errors = []
    for _ in range(4):
        with pytest.raises(ClosedError, match="the text was cancelled") as caught:
            list(stream)
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 4
    assert depth(errors[1]) == depth(errors[3])


def test_what_ended_the_service_is_raised_anew_each_time() -> None:
    service = Service(Launcher())
    service.start()
    service._failure = NodeError("the target failed")
    errors = []
    for _ in range(4):
        with pytest.raises(NodeError, match=r"^the target failed$") as caught:
            service.check_alive()
        errors.append(caught.value)
        assert caught.value.__cause__ is service._failure
    service.close()
    assert {depth(error) for error in errors} == {depth(errors[0])}
    assert service._failure.__traceback__ is None
