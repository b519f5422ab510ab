"""What an answer must look like: what may be asked, and schemas that no finite text fits."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.api.endless import has_an_end
from coordinator.api.params import SamplingParams
from coordinator.api.structured import MAX_LEN, StructuredOutputsParams
from proto.errors import ConfigurationError
from tests.programs import ROOT
from tests.tiny_tokenizer import sentencepiece_tokenizer

if TYPE_CHECKING:
    from coordinator.api.grammars import Grammars


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one of"),
        ({"json": "{}", "regex": "a"}, "got json and regex"),
        ({"json_object": False}, "got none"),
        ({"json": 1}, "json: expected a JSON schema"),
        ({"regex": ""}, "regex is empty"),
        ({"regex": b"a"}, "regex: expected a text"),
        ({"choice": "ab"}, "choice: expected a list"),
        ({"choice": []}, "choice: expected 1 to"),
        ({"choice": ["a", 1]}, "choice: expected texts"),
        ({"choice": [""]}, "choice: expected texts"),
        ({"json": {"a": float("nan")}}, "json is no JSON"),
        ({"json": {"a": object()}}, "json is no JSON"),
        ({"regex": "a" * (MAX_LEN + 1)}, "make it shorter"),
        ({"jsn": "{}"}, "has no 'jsn'"),
    ],
)
def test_a_wrong_form_is_refused_in_one_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        StructuredOutputsParams.read(given)
    assert "\n" not in str(caught.value)


def test_sampling_params_take_such_an_object_alone() -> None:
    form = StructuredOutputsParams(choice=["a", "b"])
    assert SamplingParams(structured_outputs=form).structured_outputs is form
    with pytest.raises(ConfigurationError, match="expected StructuredOutputsParams"):
        SamplingParams(structured_outputs={"choice": ["a"]})
    with pytest.raises(ConfigurationError, match="min_tokens does not go"):
        SamplingParams(structured_outputs=form, min_tokens=3)


NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}}
DEFS: dict[str, Any] = {
    "$defs": {
        "a/b": {"type": "array", "items": {"$ref": "#/$defs/c"}, "minItems": 1},
        "c": {"anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/d"}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (True, True),
        (NODE, True),
        ({**NODE, "required": ["next"]}, False),
        ({**NODE, "required": ["next"], "enum": [1]}, True),
        ({"type": ["object", "null"], "required": ["next"]}, True),
        ({"$ref": "#"}, False),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}}, True),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, False),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, True),
        ({"allOf": [{"$ref": "#"}, {"type": "null"}]}, False),
        ({"$ref": "#/$defs/c", "$defs": {**DEFS["$defs"], "d": {"type": "null"}}}, True),
        ({"$ref": "#/$defs/c", "$defs": {**DEFS["$defs"], "d": {"$ref": "#/$defs/c"}}}, False),
        ({"$ref": "http://elsewhere/x"}, True),
        ({"properties": {"a": {"$ref": "#"}}, "type": "object", "required": 3}, True),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]}, False),
        ({"examples": [{"$ref": "#/x"}], "x": {"$ref": [1]}}, True),
        ({"examples": [{"$ref": "#/examples/" + "9" * 5000}]}, True),
    ],
)
def test_a_schema_whose_texts_never_end_is_found(schema: Any, expected: bool) -> None:  # noqa: FBT001
    assert has_an_end(schema) is expected


@cache
def grammars() -> "Grammars":
    """What compiles grammars for a small tokenizer; its process ends with this one."""
    pytest.importorskip("llguidance")
    from coordinator.api.grammars import Grammars

    return Grammars(sentencepiece_tokenizer())


def refused(given: Mapping[str, Any]) -> str:
    """The line with which a grammar is refused for a small tokenizer."""
    with pytest.raises(ConfigurationError) as caught:
        grammars().of(StructuredOutputsParams.read(given))
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) <= 100
    return line


DEEP = '{"items":' * 5000 + "{}" + "}" * 5000


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"json": "["}, "EOF"),
        ({"json": '{"type": "wat"}'}, "Invalid type"),
        ({"json": '{"uniqueItems": true}'}, "Unimplemented"),
        ({"json": '{"oneOf": [{"type": "string"}, {"maxLength": 3}]}'}, "use anyOf"),
        ({"json": {**NODE, "required": ["next"]}}, "never ends"),
        ({"json": {"$ref": "#"}}, "no text fits"),
        ({"json": DEEP}, "recursion limit"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "((((a{50}){50}){50}){50}){50}"}, "too many"),
        ({"regex": "\ud800"}, "not valid Unicode"),
        ({"grammar": "start: foo"}, "unknown name"),
        ({"grammar": "(" * 5000}, "cannot be used"),
        ({"grammar": 'start: a "b"\na[max_tokens=2]: /a+/'}, "max_tokens or stop"),
        ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "nested"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_line(given: dict[str, Any], words: str) -> None:
    assert words in refused(given)


@pytest.mark.parametrize(
    ("called", "expected"),
    [
        ("", "structured_outputs: regex cannot be used: "),
        ("--regex", "--regex cannot be used: "),
        ("guided_regex", "guided_regex cannot be used: "),
    ],
)
def test_a_form_is_called_in_messages_as_whoever_asked_for_it_calls_it(
    called: str, expected: str
) -> None:
    form = StructuredOutputsParams(regex="(a", called=called)
    assert form == StructuredOutputsParams(regex="(a")
    with pytest.raises(ConfigurationError, match=f"^{expected}"):
        grammars().of(form)


def test_a_grammar_for_the_nodes_is_made_once() -> None:
    for given in (
        {"json": {"type": "object"}},
        {"json": "true", "disable_any_whitespace": True},
        {"json_object": True},
        {"regex": "a+"},
        {"choice": ["a", 'b"\\', "é\n"]},
        {"grammar": 'root ::= "a" | "b"'},
        {"grammar": 'start: "a" | "b"'},
        {"grammar": "start: <s> /a+/"},
    ):
        form = StructuredOutputsParams.read(given)
        assert json.loads(json.dumps(grammars().of(form)))
        assert grammars().of(form) is grammars().of(form)


HOSTILE = {
    "type": "string",
    "allOf": [{"pattern": f"a{{{number},}}b*{'c' * number}"} for number in range(1, 41)],
}


def test_what_keeps_the_library_busy_is_ended_and_the_next_grammar_is_compiled() -> None:
    pytest.importorskip("llguidance")
    from coordinator.api.grammars import Grammars

    made = Grammars(sentencepiece_tokenizer())
    with pytest.raises(ConfigurationError, match="json is too complex; make it simpler"):
        made.of(StructuredOutputsParams(json=HOSTILE))
    assert made.of(StructuredOutputsParams(regex="a+"))
    process = made._compiler._process
    assert process is not None
    assert process.poll() is None
    made.close()
    assert process.poll() is not None
    with pytest.raises(ConfigurationError):  # no process is left behind
        made.of(StructuredOutputsParams(regex="b+"))
    assert made._compiler._process is process
    made.close()


def test_a_grammar_is_compiled_also_where_a_thousand_files_are_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this process may not open so many files")
    pytest.importorskip("llguidance")
    from coordinator.api.grammars import Grammars

    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    made = Grammars(sentencepiece_tokenizer())
    try:
        assert made.of(StructuredOutputsParams(regex="a+"))
    finally:
        made.close()
        for one in opened:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_whoever_waits_for_a_grammar_is_told_when_the_process_is_ended() -> None:
    pytest.importorskip("llguidance")
    from coordinator.api.grammars import Grammars

    made = Grammars(sentencepiece_tokenizer())
    assert made.of(StructuredOutputsParams(regex="a+"))
    process = made._compiler._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)  # so that it does not answer
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # a signal may take a while
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(made.of, StructuredOutputsParams(regex="b+"))
        while not made._compiler._lock.locked():
            time.sleep(0.001)
        made.close()
        with pytest.raises(ConfigurationError, match="too complex"):
            asked.result(timeout=5)
    assert process.poll() is not None


def test_an_end_while_a_process_is_looked_at_starts_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("llguidance")
    from coordinator.api.grammars import Compiler

    compiler = Compiler([])

    class Ending:
        def poll(self) -> int:
            compiler._is_closed = True  # as `close` does before it ends the process
            return -signal.SIGKILL

    monkeypatch.setattr(compiler, "_process", Ending())
    monkeypatch.setattr(compiler, "_started", lambda: pytest.fail("another one was started"))
    assert compiler.ask(["regex", "a+", False]) is None


def test_the_process_that_compiles_ends_with_its_input() -> None:
    pytest.importorskip("llguidance")
    done = subprocess.run(
        [sys.executable, "-m", "coordinator.api.compiling"],
        cwd=ROOT,
        input='["<s>"]\n["regex", "a+", false]\n["regex", "(", false]\n',
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from coordinator.api.grammars import Grammars

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(
        ConfigurationError, match=r"package `llguidance`.*extra `structured`"
    ) as told:
        Grammars(sentencepiece_tokenizer()).of(StructuredOutputsParams(regex="a"))
    assert "\n" not in str(told.value)
