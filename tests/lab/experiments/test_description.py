"""Experiment files: what they stand for, and how they are refused."""

from pathlib import Path
from typing import Any

import pytest

from lab.experiments.command import SHIPPED
from lab.experiments.description import Arm, experiment, is_same_text, load
from lab.experiments.engines import host_of
from proto.errors import ConfigurationError

HERE = Path()


def arms(*tables: dict[str, Any], **rest: Any) -> dict[str, Arm]:
    tables_of_file = {"title": "t", "baseline": {}, "arms": list(tables), **rest}
    return {arm.name: arm for arm in experiment(tables_of_file, HERE, {}).arms}


def test_a_list_stands_for_an_arm_per_value_and_several_for_every_combination() -> None:
    found = arms({"policy": ["sync", "tree"], "num_speculative_tokens": [2, 4]})
    assert list(found) == ["sync K=2", "sync K=4", "tree K=2", "tree K=4"]
    assert found["tree K=4"].speculation.policy == "tree"
    assert found["tree K=4"].speculation.num_speculative_tokens == 4


def test_a_setting_is_written_as_on_the_command_line() -> None:
    link = "to-drafter:delay=2ms from-drafter:delay=3ms,loss=1%"
    found = arms({"policy": "tree", "policy_option": "width=2,launch_min=1", "link": link})
    (arm,) = found.values()
    assert arm.pair.link == ("to-drafter:delay=2ms", "from-drafter:delay=3ms,loss=1%")
    assert arm.speculation.policy_option == {"width": 2.0, "launch_min": 1.0}


def test_what_is_fixed_goes_for_all_and_a_table_or_the_command_line_before_it() -> None:
    tables = {
        "title": "t",
        "fixed": {"max_tokens": 7, "temperature": 0.5},
        "arms": [{"policy": "ar"}, {"policy": "sync", "max_tokens": 9}],
    }
    first, second = experiment(tables, HERE, {"temperature": 0.8}).arms
    assert [first.sampling.max_tokens, second.sampling.max_tokens] == [7, 9]
    assert {first.sampling.temperature, second.sampling.temperature} == {0.8}
    assert first.sampling.ignore_eos, "a measurement writes as many tokens as it is told"


def test_an_embedded_model_goes_by_its_name_and_a_file_by_its_place_beside_the_experiment() -> None:
    (arm,) = arms({"drafter": "drafter-shallow"}).values()
    assert Path(arm.pair.drafter).is_dir()
    tables = {"title": "t", "baseline": {}, "arms": [{"prompts": "mine.txt"}]}
    (arm,) = experiment(tables, Path("/somewhere"), {}).arms
    assert arm.work.prompts == "/somewhere/mine.txt"


def test_each_arm_is_compared_with_the_baseline_that_agrees_with_it() -> None:
    found = arms(
        {"policy": ["ar", "sync"], "temperature": [0.0, 0.8], "link": ""},
        {"policy": "sync", "temperature": [0.0, 0.8], "link": "drafter:delay=5ms"},
        {"peer": "huggingface", "temperature": 0.8},
        baseline={"policy": "ar"},
    )
    baselines = {name: arm.baseline for name, arm in found.items()}
    assert baselines == {
        "ar T=0.0": "",
        "ar T=0.8": "",
        "sync T=0.0": "ar T=0.0",
        "sync T=0.8": "ar T=0.8",
        "sync T=0.0 delay=5ms": "ar T=0.0",
        "sync T=0.8 delay=5ms": "ar T=0.8",
        "huggingface T=0.8": "ar T=0.8",
    }


def test_a_sweep_groups_the_settings_of_which_the_fastest_is_taken() -> None:
    found = arms(
        {
            "policy": ["sync", "pearl"],
            "num_speculative_tokens": [2, 4],
            "sweep": "num_speculative_tokens",
        }
    )
    assert {arm.group for name, arm in found.items() if name.startswith("sync")} == {"sync"}
    assert {arm.group for arm in found.values()} == {"sync", "pearl"}


def test_the_same_tokens_are_expected_where_they_are_promised() -> None:
    found = arms(
        {"policy": ["ar", "sync"], "temperature": [0.0, 0.8]},
        {"name": "token", "verify": "token", "temperature": [0.0, 0.8]},
        {"peer": ["huggingface", "llamacpp", "one_process"], "temperature": [0.0, 0.8]},
        {"name": "half", "dtype": "bfloat16", "temperature": [0.0]},
    )
    same = {
        name for name, arm in found.items() if is_same_text(arm, found[f"ar T={arm.name[-3:]}"])
    }
    assert same == {
        *("ar T=0.0", "ar T=0.8", "sync T=0.0", "sync T=0.8"),
        *("token T=0.0", "huggingface T=0.0", "one_process T=0.0", "one_process T=0.8"),
    }


def test_a_peer_on_our_engine_may_run_on_simulated_devices_in_a_process_for_each() -> None:
    found = arms({"peer": "one_process", "simulate_target_ms": [0, 5], "simulate_draft_ms": [0, 1]})
    assert len({host_of(arm) for arm in found.values()}) == 4


def test_a_peer_may_sample_as_a_pair_does_and_greedy_choice_needs_no_filter() -> None:
    filters = {"top_k": 20, "top_p": 0.9, "min_p": 0.1}
    found = arms(
        {"peer": ["one_process", "llamacpp", "vllm"], **filters, "temperature": 0.8},
        {"peer": "huggingface", "top_k": 20, "top_p": 0.9, "temperature": 0.8},
        {"name": "greedy", "peer": ["huggingface", "llamacpp"], **filters, "temperature": 0.0},
        {"name": "drafts", "peer": "vllm", "mode": "assisted", **filters, "temperature": 0.0},
    )
    assert len(found) == 7


def test_a_pair_has_room_for_the_texts_at_once_and_its_drafter_is_not_started_again() -> None:
    one, four = arms({"texts_at_once": [1, 4]}).values()
    assert [one.pair.num_seqs, four.pair.num_seqs] == [1, 4]
    assert one.pair.drafter_restarts == 0


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({"polcy": "sync"}, "there is no setting 'polcy'; did you mean policy?"),
        ({"seed": 3}, "there is no setting 'seed'"),
        ({"policy": "swift"}, "arm 'swift': policy: expected"),
        ({"policy": ["sync", "sync"]}, "two arms are called 'sync'"),
        ({"temperature": -1}, "arm 'auto': temperature: expected at least"),
        ({"link": "drafter:delay=1h"}, "arm 'auto': link: a time is written as"),
        ({"peer": "vllm", "simulate_target_ms": 9}, "arm 'vllm': a peer runs on this machine"),
        ({"peer": "one_process", "link": "drafter:delay=1ms"}, "arm 'one_process': a peer runs on"),
        ({"peer": "one_process", "mode": "lookup"}, "arm 'one_process': one_process drafts with"),
        ({"peer": "one_process", "drafter": "ngram"}, "arm 'one_process': one_process drafts with"),
        ({"peer": "one_process", "min_tokens": 2}, "arm 'one_process': one_process has no min_"),
        ({"peer": "vllm", "texts_at_once": 2}, "arm 'vllm': a peer writes one text"),
        ({"peer": "vllm", "peer_file": "Q8_0"}, "arm 'vllm': vllm reads no GGUF file; leave"),
        ({"peer": "llamacpp", "peer_file": "x.gguf"}, "arm 'llamacpp': there is no file '.*x.gguf"),
        ({"peer": "llamacpp", "peer_file": "8 bit"}, "arm 'llamacpp': `peer_file` is a file that"),
        ({"sweep": "num_speculative_tokens"}, "`sweep` names settings of which the table has"),
        ({"sweep": 5, "window": [8, 16]}, "`sweep` of an arm is the name of a setting, or a list"),
        (
            {"sweep": True},
            "`sweep` of an arm is the name of a setting, or a list of them, not True",
        ),
        ({"sweep": {"window": 1}}, "`sweep` of an arm is the name of a setting, or a list of them"),
        ({"sweep": [["window"]], "window": [8, 16]}, "`sweep` of an arm is the name of a setting"),
        ({"sweep": "windwo", "window": [8, 16]}, "`sweep` names .* is none; did you mean window"),
        ({"name": 5}, "`name` of an arm is a text of one line, not 5"),
        ({"name": "\x1b[31m"}, "`name` of an arm is a text of one line, not '.x1b.31m'"),
        ({"name": ["a", "b"]}, "`name` of an arm is a text of one line, not "),
        ({"optional": "yes"}, "`optional` of an arm is true or false, not 'yes'"),
        ({"devices": "two"}, "`devices` of an arm is a number from 1, not 'two'"),
        ({"policy": {"a": 1}}, "arm .*: policy: expected one of auto, "),
        ({"policy": [["sync"]]}, "arm .*: policy: expected one of auto, "),
        ({"window": []}, "`window` of an arm is an empty list"),
        ({"target": 5}, "arm 'auto': target: expected a text, got 5"),
        ({"target": "a\0b"}, "arm 'auto': target: expected a text without control characters"),
        ({"prompts": "a\0b"}, "arm 'auto': prompts: expected a text without control characters"),
        ({"link": 5}, "arm 'auto': link: expected a list, got 5"),
        ({"stop": 5}, "arm 'auto': stop: expected a list, got 5"),
        ({"reference": "x.txt"}, "arm 'auto': reference is a text for n-gram drafts"),
        (
            {"num_speculative_tokens": list(range(1, 49)), "max_tokens": list(range(1, 12))},
            "528 arms",
        ),
    ],
)
def test_a_file_that_cannot_work_is_refused_in_one_line(table: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigurationError, match="^" + line.replace("'", ".")) as caught:
        arms(table)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (
            {"peer": "huggingface", "repetition_penalty": 1.1},
            "arm 'huggingface': huggingface has no repetition",
        ),
        ({"peer": "llamacpp", "logit_bias": "5:1"}, "arm 'llamacpp': llamacpp has no logit_bias"),
        ({"peer": "vllm", "stop": "x"}, "arm 'vllm': vllm has no stop; a peer always writes max_"),
        ({"peer": "vllm", "ignore_eos": False}, "arm 'vllm': vllm has no ignore_eos; a peer"),
        (
            {"peer": "huggingface", "temperature": 1, "top_p": 0.9, "min_p": 0.1},
            "arm 'huggingface': huggingface applies top_p before min_p, a pair after it",
        ),
        (
            {"peer": "vllm", "mode": "lookup", "temperature": 1, "min_p": 0.1},
            "arm 'vllm': vllm has no min_p when it drafts",
        ),
    ],
)
def test_a_peer_is_not_asked_for_what_it_would_leave_out_or_apply_differently(
    table: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigurationError, match="^" + line) as caught:
        arms(table)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"title = ", "is not TOML"),
        (b"title = '\xff'", "is not TOML"),
        (b"title = 't'", "arms is missing"),
        (b"title = 't'\narms = []", "arms: expected at least 1 of them"),
        (b"title = 't'\ntitel = 1\n[[arms]]", "Description has no setting 'titel'"),
        (b"title = 't'\n[[arms]]\npolicy = 'sync'", "no arm has the settings of `baseline`"),
    ],
)
def test_a_file_that_is_none_is_refused_by_its_name(
    tmp_path: Path, content: bytes, line: str
) -> None:
    path = tmp_path / "e.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}")
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_an_experiment_that_ships_can_be_read_and_every_arm_has_a_baseline(path: Path) -> None:
    found = load(path)
    bases = {arm.baseline for arm in found.arms} - {""}
    assert bases
    assert bases == {arm.name for arm in found.arms if not arm.baseline}
