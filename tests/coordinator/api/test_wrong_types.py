"""Every setting and every prompt, with values of every wrong kind: refused, or as its type says."""

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.api import vllm as speculation
from coordinator.api.asking import Asking
from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.config_base import Frozen
from coordinator.api.launch import LaunchConfig
from coordinator.api.llm import LLM
from coordinator.api.params import SamplingParams
from lab.experiments.description import Description, Work
from lab.plan.settings import Costs, Texts
from proto.errors import ClosedError, ConfigurationError, SlipstreamError

KINDS: tuple[type[Frozen], ...] = (
    *(SamplingParams, PairConfig, SpeculationConfig, LaunchConfig),
    *(Work, Description, Costs, Texts),
)
FIELDS = [(kind, name) for kind in KINDS for name in kind.model_fields]
NESTED: list[object] = []
NESTED.append(NESTED)
DEEP: list[object] = []
for _ in range(20_000):
    DEEP = [DEEP]
ODD: tuple[object, ...] = (
    *(None, True, False, 0, 1, -1, 5, 10**30, 10**5000, 0.5, 1.0, -2.5),
    *(float("nan"), float("inf"), -float("inf"), 1j, Decimal(1), Fraction(1, 2)),
    *("", "a", "5", "0.5", "true", "nan", "a\0b", "\ud800", "x" * 10_000),
    *(b"", b"a", b"5", bytearray(b"a"), memoryview(b"a")),
    *([], ["a"], [b"a"], [5], [True], [None], [["a"]], ("a",), (5,), NESTED, DEEP),
    *({"a"}, {5}, frozenset({5}), {}, {"a": 1}, {5: 1}, {"5": 1}, {5: True}, {True: 1}),
    *({5: float("nan")}, {5: "1"}, {b"5": 1}, MappingProxyType({5: 1}), range(3), iter("a")),
    *(np.int64(1), np.float32(0.5), np.bool_(True), np.str_("a"), np.bytes_(b"a")),
    *(np.float64("nan"), np.array(1), np.array([1, 2]), np.array(["a"]), np.array([])),
    *([np.int64(5)], {np.int64(5): np.float64(1)}, Path("a"), object(), object, print, Ellipsis),
)
# What a person who has never heard of the library that checks settings does not understand.
JARGON = re.compile(r"Input|should (be|have|match)|Field required|unable to parse|pydantic|a valid")


def fits(value: object, annotation: Any) -> bool:
    """Whether a value is exactly of this type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return True
    if origin is Literal:
        return value in arguments
    if origin in (tuple, list):
        inner = arguments[0]
        return type(value) is origin and all(fits(one, inner) for one in value)
    if origin is dict:
        key, inner = arguments
        return type(value) is dict and all(
            fits(one, key) and fits(of, inner) for one, of in value.items()
        )
    if hasattr(annotation, "__metadata__"):
        return fits(value, arguments[0])
    if arguments:  # a union
        return any(fits(value, one) for one in arguments)
    if annotation is Path:
        return isinstance(value, Path)
    return type(value) is (NoneType if annotation is None else annotation)


def checked(kind: type[Frozen], name: str, value: object) -> None:
    """Made with this value it is refused in one line, or holds a value of the right type."""
    needed: Mapping[str, Any] = {"title": "t", "arms": [{}]} if kind is Description else {}
    try:
        made = kind(**{**needed, name: value})
    except ConfigurationError as error:
        line = str(error)
        assert "\n" not in line
        assert line.isprintable()
        assert not JARGON.search(line), line
        assert len(line) < 500
        return
    assert fits(getattr(made, name), kind.model_fields[name].annotation), getattr(made, name)


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda one: getattr(one, "__name__", one))
def test_an_odd_value_is_refused_in_our_words_or_of_the_right_type(
    kind: type[Frozen], name: str
) -> None:
    for value in ODD:
        checked(kind, name, value)


ANYTHING = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers()),
        *(st.text(st.characters()), st.binary(), st.decimals(), st.fractions()),
        *(st.builds(np.int64, st.integers(-5, 5)), st.builds(np.float32, st.floats(width=32))),
    ),
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=4), st.tuples(inner), st.sets(st.integers(), max_size=3)),
        st.dictionaries(st.one_of(st.integers(), st.text(), st.binary()), inner, max_size=3),
    ),
    max_leaves=6,
)


@settings(max_examples=400)
@given(st.sampled_from(FIELDS), ANYTHING)
def test_whatever_a_program_hands_over_is_refused_or_of_the_right_type(
    field: tuple[type[Frozen], str], value: object
) -> None:
    checked(*field, value)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"n": True}, "n: expected a whole number, got True"),
        ({"max_tokens": True}, "max_tokens: expected a whole number, got True"),
        ({"max_tokens": "5"}, "max_tokens: expected a whole number, got '5'"),
        ({"max_tokens": 5.0}, "max_tokens: expected a whole number, got 5.0"),
        ({"temperature": True}, "temperature: expected a number, got True"),
        ({"temperature": float("nan")}, "temperature: expected a finite number, got nan"),
        ({"ignore_eos": 1}, "ignore_eos: expected true or false, got 1"),
        ({"stop": b"a"}, "stop: expected a list, got b'a'"),
        ({"stop": [b"a"]}, "stop: expected a text, got b'a'"),
        ({"stop": {"a"}}, "stop: expected a list, got {'a'}"),
        ({"stop": ["a\ud800"]}, "stop: expected a text of valid Unicode, got 'a\\ud800'"),
        ({"stop_token_ids": [True]}, "stop_token_ids: expected a whole number, got True"),
        ({"stop_token_ids": "5"}, "stop_token_ids: expected a whole number, got '5'"),
        ({"logit_bias": {5: True}}, "logit_bias: expected a number, got True"),
        ({"logit_bias": {True: 1}}, "logit_bias: expected a whole number, got True"),
        ({"logit_bias": [5]}, "logit_bias: expected a dict (a table), got [5]"),
        ({"logprobs": True}, "logprobs: expected a whole number, got True"),
        ({"seed": 1.5}, "seed: expected a whole number, got 1.5"),
    ],
)
def test_what_looks_like_another_type_is_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        SamplingParams(**values)
    assert str(caught.value) == line


def test_a_number_of_numpy_is_the_number_that_it_stands_for() -> None:
    made = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        ignore_eos=np.bool_(True),
        stop_token_ids=[np.int32(7)],
        logit_bias={np.int64(5): np.float64(1)},
    )
    assert made == SamplingParams(
        n=2, temperature=0.5, ignore_eos=True, stop_token_ids=(7,), logit_bias={5: 1.0}
    )
    json.dumps(made.model_dump())


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"model": b"x"}, "model: expected a text, got b'x'"),
        ({"model": True}, "model: expected a text, got True"),
        ({"model": Path("x")}, "model: expected a text, got "),
        ({"model": "a\0b"}, "model: expected a text without control characters, got 'a\\x00b'"),
        ({"model": "\ud800"}, "model: expected a text of valid Unicode, got '\\ud800'"),
        ({"drafter": "a\0b"}, "drafter: expected a text without control characters, got"),
        ({"drafter": [b"x"]}, "drafter: expected a text, got [b'x']"),
        ({"heads": "\0"}, "heads: expected a text without control characters, got '\\x00'"),
        ({"target": b"x"}, "target: expected a text, got b'x'"),
        ({"revision": "a\nb"}, "revision: expected a text without control characters, got"),
        ({"reproducible": 1}, "reproducible: expected true or false, got 1"),
        ({"max_model_len": True}, "max_model_len: expected a whole number, got True"),
        ({"dtype": b"half"}, "dtype: expected one of auto, float32, bfloat16, float16, got b'half"),
        ({"dtype": ["half"]}, "dtype: expected one of auto, float32, bfloat16, float16, got"),
        ({"drafter_dtype": "half"}, "drafter_dtype: expected one of auto, float32, bfloat16, "),
        ({"link": {"drafter:delay=5ms"}}, "link: expected a list, got "),
        ({"link": [b"drafter:delay=5ms"]}, "link: expected a text, got b'drafter:delay=5ms'"),
        ({"speculative_config": b"ngram"}, "speculative_config: expected a dict of method, model,"),
        ({"speculative_config": {"method": b"sync"}}, 'speculative_config["method"] is one of '),
        ({"speculative_config": {"method": np.array([1, 2])}}, 'speculative_config["method"] is'),
        (
            {"speculative_config": {"method": "ngram", "model": np.array([1, 2])}},
            "the method ngram",
        ),
        ({"speculative_config": {"window": True}}, "speculative_config, window: expected a whole "),
        ({"speculative_config": {"adaptive": 1}}, "speculative_config, adaptive: expected true or"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused_and_starts_nothing(
    values: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LLM(**values)
    assert str(caught.value).startswith(line)


@settings(max_examples=200)
@given(st.sampled_from(speculation.KNOWN), ANYTHING)
def test_whatever_a_speculative_config_holds_is_read_or_refused(name: str, value: object) -> None:
    line = ""
    try:
        speculation.read({name: value})
    except SlipstreamError as error:
        line = str(error)
    assert line == "" or line.isprintable()
    assert not JARGON.search(line)


class FakePair:
    """What `LLM` asks of a pair before a text begins."""

    tokenization = None

    def simulated(self) -> None:
        return None

    def encode(self, text: str, **_: bool) -> tuple[int, ...]:
        return tuple(range(len(text)))

    def check_length(self, num_tokens: int) -> None:
        """Any length is right."""

    def check(self, ids: tuple[int, ...]) -> None:
        assert all(type(token) is int for token in ids)

    def reviewed_params(self, params: object) -> object:
        if not isinstance(params, SamplingParams):
            raise ConfigurationError("sampling_params: expected SamplingParams")
        return params

    def encode_chat(self, messages: Any, *_: Any, **__: bool) -> tuple[str, tuple[int, ...]]:
        from coordinator.api.chat import ChatTemplate

        text = ChatTemplate(None, {}, "a model").render(messages)
        return text, self.encode(text)


@pytest.fixture
def llm() -> LLM:
    made = LLM.__new__(LLM)
    made.pair = FakePair()  # type: ignore[assignment]
    made.asking = Asking(made.pair, SpeculationConfig())
    closing = {"alive": True, "__call__": lambda _: None, "detach": lambda _: None}
    made._close = type("Open", (), closing)()
    return made


def test_with_on_a_closed_one_is_refused(llm: LLM) -> None:
    with llm:  # open: as it is
        pass
    llm._close = type("Closed", (), {"alive": False, "__call__": lambda _: None})()
    with pytest.raises(ClosedError, match="this LLM was closed; make a new one"):
        llm.__enter__()


BAD_PROMPTS = (
    *(b"x", b"", bytearray(b"x"), memoryview(b"x"), 5, True, None, {5}, object(), np.array([5])),
    *([b"x"], [True], [5, True], [5.0], [[5.0]], [[b"x"]], [{5}], [None], [5, "a"], ["a", 5]),
    *({}, {"prompt": b"x"}, {"prompt_token_ids": b"x"}, {"prompt_token_ids": [True]}),
    *({"prompt_token_ids": {5}}, {"prompt": "a", "multi_modal_data": {"image": 1}}, {"a": "b"}),
)


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_a_prompt_of_the_wrong_kind_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        llm.asking.requests(prompt, None)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "prompt",
    [
        *([5, 6], (5, 6), range(5, 7), [np.int64(5), np.int64(6)]),
        *({"prompt_token_ids": [5, 6]}, [[5, 6]], [{"prompt_token_ids": (5, np.int32(6))}]),
        {"prompt_token_ids": [5, 6], "multi_modal_data": None},
    ],
    ids=repr,
)
def test_token_ids_may_come_in_any_sequence(llm: LLM, prompt: Any) -> None:
    (request,) = llm.asking.requests(prompt, None)
    assert request.prompt_ids == (5, 6)


@pytest.mark.parametrize(
    "messages",
    [b"x", [b"x"], [[b"x"]], 5, "hello", [{"role": b"user", "content": "a"}], {5}, [5], [[5]]],
    ids=repr,
)
def test_a_conversation_of_the_wrong_kind_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        llm.asking.chat_requests(messages, None)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("params", [b"x", b"", "x", 5, {"n": 1}, [None], [5], {5}], ids=repr)
def test_sampling_parameters_of_the_wrong_kind_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(ConfigurationError, match="sampling_params: expected SamplingParams"):
        llm.asking.requests("a", params)


@pytest.mark.parametrize("wanted", ["yes", 5, b"x", 1.5])
def test_what_makes_no_progress_bar_is_refused(llm: LLM, wanted: Any) -> None:
    with pytest.raises(ConfigurationError, match="use_tqdm: expected true, false or a function"):
        llm.generate("a", use_tqdm=wanted)
