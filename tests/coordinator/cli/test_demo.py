"""The demo shows what was measured, and fails where the texts differ."""

import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
import typer

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.outputs import CompletionOutput, RequestOutput
from coordinator.api.requests import Step
from coordinator.cli import demo as command
from coordinator.cli.demo import (
    Take,
    first_difference,
    middle,
    scenes,
    slowdown,
    verdict,
)
from coordinator.text.session_events import Emit
from proto.errors import ModelError
from tests.coordinator.api.scripted import ScriptedPair
from tests.coordinator.text.test_stops import METRICS


def take(tokens: tuple[int, ...], seconds: float, drafts: int = 0) -> Take:
    """A text in passes of one token, the first after a tenth of the time."""
    metrics = replace(
        METRICS,
        num_tokens=len(tokens),
        elapsed_s=seconds,
        tokens_per_second=len(tokens) / seconds,
        num_draft_tokens=drafts,
    )
    times = [seconds * (0.1 + 0.9 * index / len(tokens)) for index in range(len(tokens))]
    steps = [(at, step(token)) for at, token in zip(times, tokens, strict=True)]
    return Take((*steps, (seconds, step(None))), metrics)


def step(token: int | None) -> Step:
    """A pass that adds a token, or the end."""
    request = ScriptedPair(1).request(1)
    text, ids = ("", []) if token is None else (f"{token},", [token])
    part = RequestOutput(None, [1], [CompletionOutput(0, text, ids)], token is None, 1)
    return Step(request, None if token is None else Emit((token,), 0, 0, ()), part)


def test_the_take_of_median_speed_is_shown() -> None:
    takes = [take((1, 2), seconds) for seconds in (3.0, 1.0, 2.0)]
    assert middle(takes).metrics.elapsed_s == 2.0
    assert middle(takes[:2]).metrics.elapsed_s == 3.0


def test_both_are_slowed_down_by_the_factor_of_the_target_alone() -> None:
    plain, drafted = take((1, 2, 3, 4), 0.4), take((1, 2, 3, 4), 0.2)
    factor = slowdown(plain, 0.5)
    assert factor == pytest.approx(5.0)
    shown = [list(scenes(one, factor, lambda _: "x")) for one in (plain, drafted)]
    assert shown[0][-1][0] == pytest.approx(2 * shown[1][-1][0])
    assert shown[0][0] == (0.0, "x")
    assert slowdown(plain, 0.0) == 0.0
    # Nothing is shown faster than it was.
    assert slowdown(take((1,), 60.0), 0.1) == 1.0


def test_a_difference_is_found_in_any_take_and_wherever_it_is() -> None:
    same = [take((1, 2, 3), 1.0) for _ in range(3)]
    assert first_difference(same) is None
    assert first_difference([*same, take((1, 9, 3), 1.0)]) == 1
    assert first_difference([*same, take((1, 2), 1.0)]) == 2


def test_the_last_line_has_the_measured_ratio_and_whether_the_text_is_the_same() -> None:
    plain, drafted = take((1, 2), 2.1), take((1, 2), 1.0)
    assert verdict(plain, drafted, None) == "2.1 x plain, text identical"
    assert verdict(drafted, plain, None) == "0.5 x plain, text identical"
    assert verdict(plain, drafted, 11) == "2.1 x plain, but the text DIFFERS from token 12 on"


IS_CHAT = ContextVar("is_chat", default=False)


class FakePair(ScriptedPair):
    """Stands for the pair: texts are not written, but taken from `text_of`."""

    def __init__(self, config: PairConfig, **_: object) -> None:
        super().__init__(1)
        self.config = config
        self.chat_template = SimpleNamespace(is_plain=not IS_CHAT.get())

    def encode_chat(self, messages: Any) -> tuple[str, tuple[int, ...]]:
        """The tokens of a question."""
        (asked,) = messages
        return f"<user>{asked['content']}", (5, 6)

    def __enter__(self) -> "FakePair":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is to be ended."""


def shown(
    patch: pytest.MonkeyPatch, text_of: Callable[[int, SpeculationConfig], Take], *flags: str
) -> int:
    """Run the demo with these takes, by the number of the take and the policy; the exit status."""
    number = iter(range(99))

    def written(_pair: object, way: SpeculationConfig, *_: object) -> Take:
        return text_of(next(number), way)

    patch.setattr(command, "Pair", FakePair)
    patch.setattr(command, "_take", written)
    patch.setattr(command, "ran_on", lambda _pair: ["target: fused", "plain: the target alone"])
    app = typer.Typer()
    app.command()(command.demo)
    return app([*flags, "abc"], standalone_mode=False) or 0


def test_the_demo_shows_the_prompt_both_texts_and_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def text_of(number: int, way: SpeculationConfig) -> Take:
        # The first of each is not counted.
        seconds = 0.9 if way.drafts else 1.8
        return take((1, 2), 9.0 if number < 2 else seconds, drafts=2 * way.drafts)

    assert shown(monkeypatch, text_of) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[1:] == [
        *("The target alone", "", "abc1,2,", "", "2 tokens in 1.80 s, 1.11 tokens/s", ""),
        "The same with drafts",
        "marks: accepted draft  [-rejected draft-]  {+the target's own+}  (⏎: newline)",
        *("", "abc{+1,2+}", ""),
        lines[-3],
        *("", "2.0 x plain, text identical"),
    ]
    assert re.match(r"2 tokens in 900 ms, 2\.22 tokens/s, \d+ passes, \d+ of 2 drafts", lines[-3])
    assert "\x1b" not in output.out
    assert output.err.splitlines()[-2:] == ["target: fused", "plain: the target alone"]


@pytest.mark.parametrize("wrong", range(8))
def test_the_demo_fails_where_any_take_has_another_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: int
) -> None:
    def text_of(number: int, _way: SpeculationConfig) -> Take:
        return take((1, 7 if number == wrong else 2), 1.0)

    status = shown(monkeypatch, text_of)
    last = capsys.readouterr().out.splitlines()[-1]
    assert (status, last) == (1, "1.0 x plain, but the text DIFFERS from token 2 on")


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_chat_model_answers_and_each_kind_of_model_has_its_usual_settings(
    monkeypatch: pytest.MonkeyPatch, *, is_chat: bool
) -> None:
    seen: list[tuple[Any, ...]] = []

    def written(_pair: object, _way: object, text: str, ids: Any, params: Any) -> Take:
        seen.append((text, tuple(ids), params.temperature, params.seed, params.max_tokens))
        return take((1, 2), 1.0)

    monkeypatch.setattr(command, "Pair", FakePair)
    monkeypatch.setattr(command, "_take", written)
    monkeypatch.setattr(command, "ran_on", lambda _pair: [])
    app = typer.Typer()
    app.command()(command.demo)
    token = IS_CHAT.set(is_chat)
    try:
        app(["--seed", "3", "why?"], standalone_mode=False)
    finally:
        IS_CHAT.reset(token)
    if is_chat:
        assert set(seen) == {("why?\n\n", (5, 6), 0.0, 3, 160)}
    else:
        ((text, _, *settings),) = set(seen)
        assert (text, *settings) == ("why?", 0.5, 3, 97)


class Enough(Exception):
    """Nothing more has to happen."""


@pytest.mark.parametrize("can_be_had", [False, True])
def test_the_chat_model_is_fetched_where_that_is_wished_and_else_the_toy_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, can_be_had: bool
) -> None:
    def fetched() -> Path:
        if can_be_had:
            return Path("/kept/file.gguf")
        raise ModelError("no network")

    def use(pair: PairConfig) -> None:
        used.append(pair)
        raise Enough

    used: list[PairConfig] = []
    monkeypatch.setattr(command, "fetch_smollm2", fetched)
    monkeypatch.setattr(command, "SMOLLM2", "models/drafter")  # any other model
    monkeypatch.setattr(command, "models_of", use)
    monkeypatch.delenv(command.CHOICE, raising=False)
    with pytest.raises(Enough):
        shown(monkeypatch, lambda *_: take((1,), 1.0), "--fetch", "--dtype", "float32")
    (pair,) = used
    assert pair.dtype == "float32"
    said = capsys.readouterr().err
    if can_be_had:
        assert pair.target.endswith("models/drafter")
        assert "is kept in /kept/file.gguf" in said
    else:
        assert pair.target.endswith("models/target")
        assert "cannot be had (no network); the toy is shown" in said


@pytest.mark.parametrize(
    ("device", "flags", "wanted"),
    [
        ("cuda:0", [], "float32"),
        ("cuda:0", ["--dtype", "bfloat16"], "bfloat16"),
        ("cpu", [], "auto"),
    ],
)
def test_on_a_gpu_it_runs_in_float32_unless_a_type_is_asked_for(
    device: str, flags: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[PairConfig] = []

    def use(pair: PairConfig) -> None:
        used.append(pair)
        raise Enough

    monkeypatch.setattr(command, "models_of", use)
    monkeypatch.setattr(command, "default_devices", lambda: (device, device))
    with pytest.raises(Enough):
        shown(monkeypatch, lambda *_: take((1,), 1.0), *flags)
    assert [pair.dtype for pair in used] == [wanted]
