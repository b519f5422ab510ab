"""What is seen while the nodes load, in the help, and of figures."""

import io
import json
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from coordinator.api.config import PairConfig
from coordinator.cli import loading_screen
from coordinator.cli.loading_screen import (
    READY,
    REPORT_S,
    SAID_AFTER_S,
    Board,
    Model,
    Progress,
    models_of,
    shown_bytes,
    size_of,
)
from coordinator.cli.wrapping import continued
from coordinator.cli.writers import WIDTH, figures_in_short, figures_of_all, rounded, summary
from coordinator.cluster.registry import NOT_JOINED
from coordinator.text.metrics import Metrics, PassFigures, SessionCounts
from proto.messages import Role
from proto.node_config import NodeConfig

MODELS = {Role.TARGET: Model("a/large"), Role.DRAFTER: Model("a/small")}


def text(num_passes: int = 4, *, started: float = 1.0, num_prompt: int = 20) -> Metrics:
    """Ten tokens a pass after the first token: eight drafts accepted of sixteen."""
    counts = SessionCounts()
    counts.count(PassFigures(1, 0, 0, 0, 0, 0, 0, 0, 0, "ready"))
    for _ in range(num_passes):
        counts.count(PassFigures(10, 8, 16, 0, 0, 0, 0, 0, 0, "ready", plain_us=25_000))
    emitted = [(started + 0.05, 1)]
    emitted += [(started + 0.05 + 0.125 * number, 10) for number in range(1, num_passes + 1)]
    return Metrics.of(
        counts,
        started=started,
        emitted=emitted,
        drafter_lost_at=None,
        queued_s=0.0,
        num_spec_tokens=16,
        num_prompt_tokens=num_prompt,
    )


def test_the_first_line_has_the_speed_of_writing_and_the_second_that_of_reading() -> None:
    first, second = summary(text(), policy="auto", seed=7).splitlines()
    assert first == "41 tokens, 80.0 tokens/s, 2.0 x plain, 50 % of drafts accepted, seed 7"
    assert second == "prompt: 20 tokens in 50 ms (400 tokens/s), text: 5 passes in 500 ms"


def test_reading_and_writing_are_figures_of_their_own_and_the_old_one_is_still_over_both() -> None:
    made = text()
    assert (made.num_prompt_tokens, made.prompt_tokens_per_second) == (20, pytest.approx(400))
    assert (made.writing_s, made.writing_tokens_per_second) == (
        pytest.approx(0.5),
        pytest.approx(80),
    )
    assert made.tokens_per_second == pytest.approx(41 / 0.55)
    assert made.speedup == pytest.approx(80 * 0.025)
    at_once = text(num_passes=0)
    assert (at_once.writing_s, at_once.writing_tokens_per_second) == (0.0, 0.0)
    assert summary(at_once, policy="ar", seed=None) == (
        "1 token\nprompt: 20 tokens in 50 ms (400 tokens/s)"
    )


def test_what_is_not_known_is_not_said() -> None:
    alone = replace(text(), num_draft_tokens=0, speedup=1.0)
    assert summary(alone, policy="ar", seed=None).splitlines()[0] == "41 tokens, 80.0 tokens/s"
    unpriced = replace(text(), speedup=0.0)
    assert "plain" not in summary(unpriced, policy="auto", seed=None)


def test_a_lost_drafter_is_a_third_line_and_there_is_no_fourth_unless_all_is_asked_for() -> None:
    lost = replace(text(), drafter_lost_at=12)
    lines = summary(lost, policy="auto", seed=1 << 62).splitlines()
    assert lines[2:] == ["the drafter was lost after 12 tokens, seed 4611686018427387904"]
    lines = summary(lost, policy="auto", seed=1).splitlines()
    assert lines[2:] == ["the drafter was lost after 12 tokens"]
    whole = summary(lost, policy="auto", seed=1, verbose=True).splitlines()
    assert whole[1:3] == lines[1:3]
    assert len(whole) > 5
    assert any("policy auto" in line for line in whole)
    assert max(map(len, [*lines, *whole])) <= WIDTH


def test_lines_of_long_texts_fit_80_columns() -> None:
    long = replace(
        text(),
        num_tokens=1_048_576,
        writing_tokens_per_second=12345.6,
        num_prompt_tokens=131_072,
        time_to_first_token_s=123.4,
        prompt_tokens_per_second=1062.2,
        num_target_passes=700_000,
        writing_s=1234.5,
    )
    for shown in (summary(long, policy="auto", seed=(1 << 63) - 1), figures_in_short(long)):
        assert max(map(len, shown.splitlines())) <= WIDTH
    assert max(map(len, figures_of_all([long] * 64, policy="auto").splitlines())) <= WIDTH


def test_numbers_have_three_digits() -> None:
    assert [rounded(one) for one in (1.234, 12.34, 123.4, 1234.5)] == [
        *("1.23", "12.3", "123", "1234")
    ]
    assert [shown_bytes(one) for one in (1_800_000, 29_100_000, 16_060_000_000, 9_000)] == [
        *("1.8 MB", "29 MB", "16.1 GB", "9 kB")
    ]


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def elsewhere(clock: Clock) -> tuple[Progress, io.StringIO]:
    """A progress that is written to a file."""
    out = io.StringIO()
    return Progress(Console(file=out, width=80), MODELS, clock=clock), out


def test_each_node_has_one_line_and_the_target_is_first_whoever_was_faster() -> None:
    shown = []
    for faster in Role:
        clock = Clock()
        progress, out = elsewhere(clock)
        with progress:
            progress.say({Role.DRAFTER: "starting", Role.TARGET: "starting"})
            clock.now += 1.0
            progress.say({role: READY if role is faster else "loading weights" for role in Role})
            clock.now += 1.0
        shown.append([line.split() for line in out.getvalue().splitlines()])
    for lines in shown:
        assert [line[0] for line in lines] == ["target", "drafter"]
        assert all(line[1:3] == ["ready", "after"] for line in lines)
    assert [[line[3] for line in lines] for lines in shown] == [["1.0", "2.0"], ["2.0", "1.0"]][
        :: 1 if next(iter(Role)) is Role.TARGET else -1
    ]


def test_a_node_that_is_ready_but_lacks_something_is_ready() -> None:
    clock = Clock()
    progress, out = elsewhere(clock)
    with progress:
        progress.say({Role.TARGET: "starting"})
        clock.now += 1.0
        progress.say({Role.TARGET: "ready, but the next start is faster"})
        clock.now += 1.0
    assert out.getvalue().split()[:4] == ["target", "ready", "after", "1.0"]


def test_who_loads_for_long_says_what_it_does() -> None:
    clock = Clock()
    progress, out = elsewhere(clock)
    with progress:
        progress.say({Role.TARGET: "loading weights", Role.DRAFTER: READY})
        assert out.getvalue() == ""
        clock.now += REPORT_S
        progress.say({Role.TARGET: "loading weights", Role.DRAFTER: READY})
        (line,) = out.getvalue().splitlines()  # that the drafter is ready is said once, at the end
        assert line.startswith(f"target   loading weights, {REPORT_S}")
    ready = [line.split()[:3] for line in out.getvalue().splitlines()[1:]]
    assert ready == [["target", "ready", "after"], ["drafter", "ready", "after"]]


def test_nothing_is_said_of_nodes_that_are_gone_or_have_failed() -> None:
    clock = Clock()
    progress, out = elsewhere(clock)
    with progress:
        progress.say({Role.TARGET: "checking", Role.DRAFTER: "starting"})
        progress.say({Role.TARGET: "checking"})
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["target"]
    progress, out = elsewhere(clock)
    progress.say({Role.TARGET: "checking"})
    progress.__exit__(ValueError, ValueError("it failed"), None)
    assert out.getvalue() == ""


def test_on_a_terminal_the_lines_of_both_nodes_are_there_while_they_load() -> None:
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    with Progress(console, MODELS, clock=clock) as progress:
        progress.say({Role.TARGET: "starting", Role.DRAFTER: "starting"})
        clock.now += 3.0
        progress.say({Role.TARGET: "loading weights", Role.DRAFTER: "starting"})
        clock.now += 2.0
        progress.say({Role.TARGET: "loading weights, 3.2 GB so far", Role.DRAFTER: "starting"})
    assert re.search(
        r"target   loading weights, 0\.0 s +large\s+drafter  starting, 3\.0 s", out.getvalue()
    )
    assert "loading weights, 3.2 GB so far, 2.0 s" in out.getvalue(), "how much does not begin anew"


TARGET = NodeConfig(Role.TARGET, "", "target-1", "", "~/my target", outside="tcp://0.0.0.0:7")
HEAD = NodeConfig(
    Role.DRAFTER, "tcp://127.0.0.1:7", "drafter-1", "", "a/head", revision="v1", target="a/large"
)


def test_nodes_that_do_not_join_are_told_of_with_what_to_type_and_again_on_ctrl_c() -> None:
    clock = Clock()
    progress, out = elsewhere(clock)
    for config in (TARGET, replace(HEAD, outside="tcp://0.0.0.0:7", max_num_seqs=9)):
        progress.invite(Path("keys"), config)
    progress.say(dict.fromkeys((Role.TARGET, Role.DRAFTER), NOT_JOINED))
    assert out.getvalue() == "", "they may be there already"
    clock.now += SAID_AFTER_S
    for _ in range(2):
        progress.say(dict.fromkeys((Role.TARGET, Role.DRAFTER), NOT_JOINED))
    at = f"tcp://{socket.gethostname()}:7"
    drafter = (
        f"  .venv/bin/python -m drafter_node --join {at} --keys keys --model a/head --revision v1 "
        "--target a/large --max-num-seqs 9"
    )
    target = f"  .venv/bin/python -m target_node --join {at} --keys keys --model ~/'my target'"
    note = "(--keys: a folder there with coordinator.key, ROLE.key, ROLE.key_secret)"
    assert out.getvalue().splitlines() == [
        "waiting for the target and the drafter; type on their hosts:",
        *continued(target, WIDTH),
        *continued(drafter, WIDTH),
        note,
    ]
    progress.say({Role.TARGET: READY, Role.DRAFTER: NOT_JOINED})
    out.truncate(0)
    out.seek(0)
    progress.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert out.getvalue().splitlines() == [
        "waiting for the drafter; type on its host:",
        *continued(drafter, WIDTH),
        note,
    ]


def test_what_to_type_on_this_host_has_no_keys_where_there_are_none() -> None:
    clock = Clock()
    progress, out = elsewhere(clock)
    progress.invite(None, HEAD)
    progress.say({Role.TARGET: READY, Role.DRAFTER: NOT_JOINED})
    clock.now += SAID_AFTER_S
    progress.say({Role.TARGET: READY, Role.DRAFTER: NOT_JOINED})
    assert out.getvalue().splitlines()[1:] == [
        "waiting for the drafter; type on its host:",
        "  .venv/bin/python -m drafter_node --join tcp://127.0.0.1:7 --model a/head \\",
        "      --revision v1 --target a/large",
    ]
    out.truncate(0)
    out.seek(0)
    progress.say({Role.TARGET: READY})
    progress.__exit__(None, None, None)
    assert out.getvalue() == "", "all has been said"


def test_a_node_that_loads_its_own_model_is_not_told_where_it_lies_here() -> None:
    clock = Clock()
    progress, out = elsewhere(clock)
    progress.invite(None, replace(HEAD, model=PairConfig().drafter, revision=None, target=""))
    for _ in range(2):
        progress.say({Role.DRAFTER: NOT_JOINED})
        clock.now += SAID_AFTER_S
    assert out.getvalue().splitlines() == [
        "waiting for the drafter; type on its host:",
        "  .venv/bin/python -m drafter_node --join tcp://127.0.0.1:7",
    ]
    assert all(len(line) < 80 for line in out.getvalue().splitlines())


def test_an_installed_slipstream_names_its_own_command_for_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading_screen, "IS_CHECKOUT", False)
    clock = Clock()
    progress, out = elsewhere(clock)
    progress.invite(None, replace(HEAD, model=PairConfig().drafter, revision=None, target=""))
    for _ in range(2):
        progress.say({Role.DRAFTER: NOT_JOINED})
        clock.now += SAID_AFTER_S
    assert out.getvalue().splitlines()[1:] == [
        "  slipstream-drafter --join tcp://127.0.0.1:7",
    ]


def test_a_line_of_a_node_fits_80_columns() -> None:
    board = Board({Role.TARGET: Model("a/" + "long" * 30)})
    board.say({Role.TARGET: "loading weights on 16 devices"}, 0.0)
    assert len(board.line(Role.TARGET, 1e5)) < WIDTH


def test_the_size_of_a_model_is_what_its_files_say(tmp_path: Path) -> None:
    models = models_of(PairConfig())
    assert re.fullmatch(r"29 MB, 8 layers", size_of(models[Role.TARGET]))
    assert re.fullmatch(r"1\.8 MB, 2 layers", size_of(models[Role.DRAFTER]))
    assert size_of(Model(str(tmp_path))) == ""
    (tmp_path / "pytorch_model.bin").write_bytes(b"0" * 2000)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 1}}))
    assert size_of(Model(str(tmp_path))) == "2 kB, 1 layer"
    for content in ("[]", "{", '{"num_hidden_layers": true}', "[" * 100_000):
        (tmp_path / "config.json").write_text(content)
        assert size_of(Model(str(tmp_path))) == "2 kB"
    assert size_of(Model("nobody/has-this")) == ""
