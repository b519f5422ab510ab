"""What users of other programs type first works here, or is answered in a line that helps."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

import coordinator.api.models.settings
import coordinator.api.vllm
from coordinator.api.config import PairConfig
from coordinator.api.vllm import DTYPES, NOT_OURS
from coordinator.cli import foreign
from coordinator.cli.app import EXIT_USAGE, command_line, run
from coordinator.cli.arguments import Flag, Known, in_our_words, meant, setting
from coordinator.cli.chat.loop import chat
from coordinator.cli.flags import with_settings
from coordinator.cli.generate import generate
from coordinator.cli.help import Command, with_help_all
from coordinator.cli.serve import serve
from proto.errors import ConfigurationError
from tests.coordinator.cli.quick_starts import HUGGING_FACE, LLAMA_CPP, OLLAMA, ROWS, VLLM, words

COMMANDS = {"generate": generate, "chat": chat, "serve": serve}
Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_file_is_looked_for(monkeypatch: Patch) -> None:
    """A GGUF file is there, and the hub is not asked."""
    monkeypatch.setattr(coordinator.api.models.settings, "folder_of_file", Path)
    monkeypatch.setattr(coordinator.api.vllm, "find_config", lambda *_: None)


def usual(command: Any) -> dict[str, Any]:
    """What the command gets where nothing is said."""
    return settings(command, [])


def settings(command: Any, arguments: list[str]) -> dict[str, Any]:
    """What the command gets of these arguments, by the names of the settings."""
    seen: dict[str, Any] = {}

    def record(**values: Any) -> None:
        for name, value in values.items():
            fields = type(value).model_fields if isinstance(value, BaseModel) else None
            seen.update({name: value} if fields is None else {f: getattr(value, f) for f in fields})

    record.__signature__ = inspect.signature(  # type: ignore[attr-defined]
        command.__wrapped__, eval_str=True
    )
    app = typer.Typer()
    app.command(command.__name__, cls=Command)(with_help_all(with_settings(record)))
    app(arguments, standalone_mode=False)
    del seen["context"]
    return seen


@pytest.mark.parametrize("row", [row for row in ROWS if isinstance(row[2], dict)], ids=str)
def test_it_means_the_same_here(row: tuple[str, str, dict[str, Any]]) -> None:
    name, *arguments = words(row)
    before, given = usual(COMMANDS[name]), settings(COMMANDS[name], arguments)
    changed = {key: value for key, value in given.items() if value != before[key]}
    # Of a model that is not here nothing is known to draft.
    found = {"drafter": "ngram"} if "target" in row[2] else {}
    assert changed == found | row[2]


@pytest.mark.parametrize("row", [row for row in ROWS if isinstance(row[2], str)], ids=str)
def test_it_is_answered_in_a_line_that_says_what_to_do(
    row: tuple[str, str, str], monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr("sys.argv", ["coordinator", *words(row)])
    assert run(command_line(())) == EXIT_USAGE
    out, err = capsys.readouterr()
    assert err.startswith(f"error: {row[2]}")
    assert err.count("\n") == 1
    assert out == ""


def test_there_are_thirty_commands_at_least_and_some_of_each_program() -> None:
    assert len(ROWS) >= 30
    assert min(map(len, (VLLM, LLAMA_CPP, HUGGING_FACE, OLLAMA))) >= 5
    assert len({theirs for theirs, _, _ in ROWS}) == len(ROWS)


# -- the table -------------------------------------------------------------------------------------


def test_no_name_stands_twice_in_the_table_and_none_is_ours() -> None:
    names = [name for name in foreign.every_name() if name not in foreign.BY_VALUE]
    assert sorted(names) == sorted(set(names))
    own = {
        f"--{parameter.replace('_', '-')}"
        for command in COMMANDS.values()
        for parameter in inspect.signature(command).parameters
    } - {"--model", "--prompt"}  # these are arguments
    assert not own & {*foreign.NAMES, *foreign.DONE, *foreign.SWITCHES}
    assert {flag for flag in foreign.OURS if flag != foreign.PROMPT} <= own
    assert set(foreign.BY_VALUE) - set(foreign.INSTEAD) <= {
        *("--generation-config", "--nnodes"),
    }


def test_values_are_translated_as_in_python() -> None:
    of_dtype = {
        theirs: new[1] for (flag, theirs), new in foreign.VALUES.items() if flag == "--dtype"
    }
    assert of_dtype == DTYPES


def test_lines_are_short_and_name_a_way() -> None:
    for name, line in {**foreign.INSTEAD, **foreign.COMMANDS, **foreign.NO_PROMPT}.items():
        assert len(line) <= 140, name
        assert not line.endswith("."), name


def test_settings_that_python_refuses_are_refused_as_flags() -> None:
    known = Known("serve", {"--port": Flag("--port", "N")})
    for name, (accepted, instead) in NOT_OURS.items():
        flag = "--" + name.replace("_", "-")
        if name in ("seed",) or flag in foreign.INSTEAD or flag in foreign.BY_VALUE:
            continue
        is_switch = any(isinstance(one, bool) for one in accepted)
        given = [flag] if is_switch else [flag, "something"]
        if is_switch and True in accepted:
            assert in_our_words(given, known) == [], name
            continue
        with pytest.raises(typer.TyperException, match=f"^{flag}: this is no setting here") as got:
            in_our_words(given, known)
        assert str(got.value).endswith(instead)


# -- hints -----------------------------------------------------------------------------------------

FLAGS = {
    "--target": Flag("--target", "MODEL"),
    "--drafter": Flag("--drafter", "MODEL"),
    "--nodes": Flag("--nodes", "local|remote"),
    "--max-tokens": Flag("--max-tokens", "N"),
    "--policy": Flag("--policy", "NAME"),
    "--json": Flag("--json"),
}


@pytest.mark.parametrize(
    ("name", "given", "hint"),
    [
        ("--modle", "a/b", "--target"),
        ("--modes", "a/b", "--target"),  # more like --nodes, which takes no such value
        ("--node", "remote", "--nodes"),
        ("--nodse", "remot", "--nodes"),
        ("--draft-modl", "a/b", "--drafter"),
        ("--polcy", "auto", "--policy"),
        ("--max-token", "5", "--max-tokens"),
        ("--max-token", "many", ""),
        ("--max-token", None, "--max-tokens"),
        ("--max-new-token", "5", "--max-tokens"),
        ("--jsn", None, "--json"),
        ("--wibble", "5", ""),
    ],
)
def test_a_hint_is_alike_and_could_take_the_value(name: str, given: str | None, hint: str) -> None:
    assert meant(name, Known("generate", FLAGS), given) == hint


def test_a_word_with_an_equals_sign_is_named_as_a_flag() -> None:
    known = Known("chat", FLAGS)
    assert setting("max_new_tokens=64", known) == "--max-tokens 64"
    assert setting("num_beams=4", known) == ""
    assert setting("max_new_tokens", known) == ""


def test_a_value_may_look_like_a_flag() -> None:
    known = Known("generate", FLAGS | {"--stop": Flag("--stop", "TEXT")}, takes_prompt=True)
    assert in_our_words(["--stop", "-m", "a"], known) == ["--stop=-m", "a"]
    assert in_our_words(["a", "--", "-m", "b"], known) == ["a", "--", "-m", "b"]
    assert in_our_words(["-p", "-m", "--json"], known) == ["--json", "--", "-m"]
    assert in_our_words(["-", "-5"], known) == ["-", "-5"]


# -- the argument and the JSON ---------------------------------------------------------------------


def test_the_model_as_an_argument_is_the_target_and_is_named_once() -> None:
    assert settings(chat, ["a/b"])["target"] == "a/b"
    assert settings(serve, ["a/b", "--target", "a/b"])["target"] == "a/b"
    with pytest.raises(ConfigurationError, match="named twice: 'a/b' and --target c/d"):
        settings(serve, ["a/b", "--target", "c/d"])


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("{", "--speculative-config: expected a dict of method, model, "),
        ('{"modle": "a/b"}', "--speculative-config has no 'modle'; there are method, model, "),
        ('{"method": "mlp"}', '--speculative-config["method"] is one of draft_model, ngram, '),
        ('{"prompt_lookup_max": 0}', "--speculative-config, prompt_lookup_max: expected at least"),
    ],
)
def test_what_the_json_cannot_say_is_refused_by_the_name_of_the_flag(given: str, line: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings(generate, ["a", "--speculative-config", given])
    assert str(caught.value).startswith(line)


def test_the_json_and_a_flag_do_not_say_the_same_thing_twice() -> None:
    given = ["--speculative-config", '{"model": "a/b", "policy": "tree"}']
    found = settings(generate, ["a", *given])
    assert (found["drafter"], found["policy"]) == ("a/b", "tree")
    for more, flag in ((["--drafter", "c/d"], "--drafter"), (["--policy", "sync"], "--policy")):
        with pytest.raises(ConfigurationError, match=f"--speculative-config and {flag} say the"):
            settings(generate, ["a", *given, *more])


def test_a_share_of_memory_is_a_setting_of_the_pair() -> None:
    assert PairConfig(gpu_memory_utilization=0.5).gpu_memory_utilization == 0.5
    for wrong in (0.0, 1.5, -1.0):
        with pytest.raises(ConfigurationError, match="gpu_memory_utilization: expected"):
            PairConfig(gpu_memory_utilization=wrong)
