"""Several prompts on the command line: written at once, and shown one after another."""

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import typer

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.outputs import RequestOutput
from coordinator.api.params import SamplingParams
from coordinator.cli.generate import WAITS, Asked, Run, generate
from coordinator.cli.writers import JsonWriter, TextWriter, Writer
from coordinator.text.session_events import Emit
from proto.errors import ConfigurationError, NodeError, TextError
from tests.coordinator.api.scripted import Script, ScriptedPair

TWO = SamplingParams(temperature=1.0, n=2)


def run_of(pair: ScriptedPair, writer: Writer, params: SamplingParams | None = None) -> Run:
    return Run(pair.as_pair(), SpeculationConfig(), params or SamplingParams(), writer)


def asked(*prompts: str) -> Sequence[Asked]:
    return [Asked(prompt) for prompt in prompts]


def written_backwards(pair: ScriptedPair, number: int) -> None:
    """When so many texts are asked for, the last is complete first, then the one before it."""

    def begin(script: Script) -> None:
        scripts = [*pair.asked, script]
        if len(scripts) == number:
            for place, one in enumerate(scripts):
                one.add(place)
            for one in reversed(scripts):
                one.end()

    pair.begin = begin


def test_lines_come_in_the_order_of_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ScriptedPair(num_seqs=3)
    written_backwards(pair, 3)
    assert not run_of(pair, JsonWriter("ar")).every(asked("a", "b", "too long", "d"))
    output = capsys.readouterr()
    made = [json.loads(line) for line in output.out.splitlines()]
    assert [record["index"] for record in made] == [0, 1, 2, 3]
    assert [record.get("token_ids") for record in made] == [[0], [1], None, [2]]
    assert made[2]["error"] == "the prompt has 8 tokens"
    assert output.err == "error: prompt 3 of 4: the prompt has 8 tokens\n"


def test_texts_of_a_prompt_are_shown_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ScriptedPair(num_seqs=4)
    written_backwards(pair, 4)
    writer = TextWriter("ar", TWO, show_speculation=True)
    assert run_of(pair, writer, TWO).every(asked("a", "b"))
    output = capsys.readouterr()
    assert output.out == "{+0+}\n{+1+}\n{+2+}\n{+3+}\n"
    order = [line for line in output.err.splitlines() if " of 2" in line]
    assert [line.split(" ──")[0] for line in order] == [
        *("── 1 of 2", "text 1 of 2", "text 2 of 2", "── 2 of 2", "text 1 of 2", "text 2 of 2")
    ]
    assert "4 texts" in output.err


def test_where_a_text_fails_its_prompt_is_named_and_what_is_complete_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair = ScriptedPair(num_seqs=4)

    def begin(script: Script) -> None:
        if len(pair.asked) == 3:
            pair.asked[0].add(5)
            pair.asked[1].add(6)
            pair.asked[1].end()
            pair.asked[2].fail(NodeError("no more"))

    pair.begin = begin
    with pytest.raises(NodeError, match=r"^prompt 3 of 4: no more$"):
        run_of(pair, JsonWriter("ar")).every(asked("a", "b", "c", "d"))
    made = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(record["index"], record["token_ids"]) for record in made] == [(1, [6])]
    assert [script.is_cancelled for script in pair.asked] == [True, False, True, True]


def test_the_error_of_the_only_prompt_is_not_numbered() -> None:
    pair = ScriptedPair(num_seqs=1)
    pair.begin = lambda script: script.fail(NodeError("no more"))
    with pytest.raises(NodeError, match=r"^no more$"):
        run_of(pair, JsonWriter("ar")).every(asked("a"))


@pytest.mark.parametrize(
    ("flags", "num_seqs"),
    [
        ([], 1),
        (["--n", "3"], 3),
        (["--n", "20"], 8),
        (["--n", "3", "--max-num-seqs", "2"], 2),
        (["--n", "3", "--reproducible"], 1),
        (["--max-num-seqs", "4", "--reproducible"], 4),
    ],
)
def test_the_nodes_make_room_for_no_more_texts_than_there_are(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], num_seqs: int
) -> None:
    seen: list[PairConfig] = []

    def start(config: PairConfig, **_: object) -> None:
        seen.append(config)
        raise ConfigurationError("nothing is started here")

    monkeypatch.setattr("coordinator.cli.generate.Pair", start)
    app = typer.Typer()
    app.command()(generate)
    with pytest.raises(ConfigurationError, match="nothing is started"):
        app(["a", "--temperature", "1", *flags], standalone_mode=False)
    assert [config.num_seqs for config in seen] == [num_seqs]


def test_a_text_that_cannot_be_completed_has_a_line_and_the_others_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair = ScriptedPair(num_seqs=4)

    def begin(script: Script) -> None:
        script.add(len(pair.asked))
        script.fail(TextError("no more")) if len(pair.asked) == 1 else script.end()

    pair.begin = begin
    assert not run_of(pair, JsonWriter("ar")).every(asked("a", "b", "c"))
    output = capsys.readouterr()
    made = [json.loads(line) for line in output.out.splitlines()]
    assert [(record["token_ids"], record.get("error")) for record in made] == [
        *(([0], None), ([1], "no more"), ([2], None))
    ]
    assert (made[1]["finish_reason"], made[1]["metrics"]) == ("error", None)
    assert output.err.splitlines() == ["error: prompt 2 of 3: no more"]


def test_the_only_text_that_cannot_be_completed_is_the_end_of_the_command() -> None:
    pair = ScriptedPair(num_seqs=1)
    pair.begin = lambda script: script.fail(TextError("no more"))
    with pytest.raises(TextError, match=r"^no more$"):
        run_of(pair, JsonWriter("ar")).every(asked("a"))


@contextmanager
def ctrl_c_ends() -> Iterator[None]:
    """As without any of ours: Ctrl-C ends the program."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Pressing(JsonWriter):
    """Ctrl-C is pressed when the first token is shown; then all texts that run are completed."""

    def __init__(self, pair: ScriptedPair, *, times: int = 1) -> None:
        super().__init__("ar")
        pair.begin = lambda script: script.add(len(pair.asked))
        self._pair = pair
        self._times = times

    def add(self, emit: Emit | None, part: RequestOutput) -> None:
        times, self._times = self._times, 0
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        if times:
            for script in self._pair.asked:
                script.end()
            self._pair.begin = lambda script: script.end()
        super().add(emit, part)


def test_ctrl_c_finishes_the_texts_that_run_and_begins_no_more(
    capfd: pytest.CaptureFixture[str],
) -> None:
    pair = ScriptedPair(num_seqs=2)
    texts = asked("a", "b", "c", "d")
    with ctrl_c_ends(), pytest.raises(KeyboardInterrupt):
        run_of(pair, Pressing(pair)).every(texts)
    output = capfd.readouterr()
    assert [json.loads(line)["token_ids"] for line in output.out.splitlines()] == [[0], [1]]
    assert output.err == WAITS.format("2 texts") + "\n"
    assert len(pair.asked) == 2


def test_ctrl_c_twice_ends_the_texts_that_run(capfd: pytest.CaptureFixture[str]) -> None:
    pair = ScriptedPair(num_seqs=2)
    with ctrl_c_ends(), pytest.raises(KeyboardInterrupt):
        run_of(pair, Pressing(pair, times=2)).every(asked("a", "b", "c"))
    assert [script.is_cancelled for script in pair.asked] == [True, True]
    assert capfd.readouterr().out == ""


def test_ctrl_c_ends_the_only_text_that_runs_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    pair = ScriptedPair(num_seqs=1)
    with ctrl_c_ends(), pytest.raises(KeyboardInterrupt):
        run_of(pair, Pressing(pair)).every(asked("a", "b"))
    assert [script.is_cancelled for script in pair.asked] == [True]
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")


def test_of_a_prompt_the_texts_that_ran_when_ctrl_c_came_are_shown(
    capfd: pytest.CaptureFixture[str],
) -> None:
    pair = ScriptedPair(num_seqs=2)
    many = SamplingParams(temperature=1.0, n=5)
    with ctrl_c_ends(), pytest.raises(KeyboardInterrupt):
        run_of(pair, Pressing(pair), many).every(asked("a"))
    (record,) = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [made["token_ids"] for made in record["outputs"]] == [[0], [1]]


def test_ctrl_c_that_leaves_nothing_out_is_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    pair = ScriptedPair(num_seqs=2)
    with ctrl_c_ends():
        assert run_of(pair, Pressing(pair)).every(asked("a", "b"))
    assert len(capfd.readouterr().out.splitlines()) == 2


def test_afterwards_ctrl_c_is_whose_it_was_before() -> None:
    pair = ScriptedPair(num_seqs=2)
    pair.begin = lambda script: script.end()
    with ctrl_c_ends():
        run_of(pair, JsonWriter("ar")).every(asked("a", "b"))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
