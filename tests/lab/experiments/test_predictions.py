"""Costs that are read off rows: made of known ones, they come back, and predict the rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer

from coordinator.cli import plugins
from coordinator.cli.app import EXIT_USAGE, command_line, run
from lab.experiments.command import _job
from lab.experiments.description import Arm, experiment
from lab.experiments.prompt_sets import Prompt
from lab.experiments.results.predictions import (
    Decoding,
    costs_of,
    predict,
    predict_of_pair,
    recorded,
    simulated_costs,
    too_slow,
)
from lab.experiments.rows import Row
from lab.pair.intervals import chances_of
from lab.pair.record import FORMAT, VERSION, Hosts, Measured, MeasuredNode, SeenText
from lab.pair.stages import as_json
from rehearsal.acceptance import NUM_RANKS, chances, drawn
from rehearsal.planning import LEAST_LEN, Figures, rehearse
from rehearsal.setting import Forwards, NodeCosts
from tests.lab.bytewise_pair import make_bytewise_pair
from tests.lab.experiments.made import row

TARGET = NodeCosts(Forwards(((1, 0.030), (2, 0.031), (4, 0.033), (7, 0.036)), 0.001), 0.0002)
DRAFTER = NodeCosts(Forwards(((1, 0.004),)), hop_s=0.003)
LOOP_S = 0.00015  # of the host, between a verdict and the next pass
FIRST_S = 0.05
TRACE = drawn(chances("0.7"), 1, 100)
SYNCS = {"policy": "sync", "num_speculative_tokens": [1, 3, 6]}


def made(*tables: dict[str, Any], **fixed: Any) -> tuple[Arm, ...]:
    tables_of_file = {"title": "t", "fixed": fixed, "arms": [{"policy": "ar"}, SYNCS, *tables]}
    return experiment(tables_of_file, Path(), {}).arms


def measured(arm: Arm, figures: Figures, pass_s: float, wait_s: float) -> Row:
    """What would have been measured of a text that took these costs."""
    num_tokens = 101
    num_passes = (num_tokens - 1) / figures.tokens_per_pass + 1  # on average
    decoding_s = (num_tokens - 1) / figures.tokens_per_second
    elapsed_s = FIRST_S + decoding_s
    return row(
        arm.name,
        0,
        speed=num_tokens / elapsed_s,
        ttft_s=FIRST_S,
        tokens=tuple(range(num_tokens)),
        figures={
            "num_tokens": num_tokens,
            "num_target_passes": num_passes,
            "elapsed_s": elapsed_s,
            "time_to_first_token_s": FIRST_S,
            "target_busy": (FIRST_S + pass_s * (num_passes - 1)) / elapsed_s,
            "wait_s": wait_s * (num_passes - 1),
        },
    )


def as_measured(arm: Arm) -> Row:
    policy = arm.speculation.make(arm.pair)
    figures = rehearse(policy, TARGET, DRAFTER, TRACE, is_whole=True)
    rows = 1 + round(figures.num_drafted / figures.num_passes)
    waits = policy.has_drafter and policy.window == policy.launch_min
    wait_s = LOOP_S + ((2 * 0.003 + policy.launch_min * 0.004) if waits else 0.0)
    return measured(arm, figures, TARGET.forward.of(rows), wait_s)


def test_the_costs_of_a_pair_are_found_again_in_what_it_measured() -> None:
    plain, *syncs = (Decoding.of([as_measured(arm)]) for arm in made())
    target, drafter = costs_of(plain, dict(zip((1, 3, 6), syncs, strict=True)))
    assert dict(target.forward.known) == pytest.approx(dict(TARGET.forward.known))
    assert target.host_s == pytest.approx(TARGET.host_s, rel=0.15)  # passes differ in their rows
    assert drafter.forward.of(1) == pytest.approx(0.004)
    assert drafter.hop_s == pytest.approx(0.003)


def test_a_pair_that_is_as_its_costs_say_is_predicted_as_it_is() -> None:
    arms = made({"policy": ["pipelined", "auto"]}, {"policy": "sync", "num_speculative_tokens": 4})
    rows = [as_measured(arm) for arm in arms]
    predicted = predict(arms, rows, TRACE)
    assert set(predicted) == {arm.name for arm in arms}
    for one in rows:
        assert predicted[one.arm] == pytest.approx(one.tokens_per_second, rel=0.02)


def test_what_was_not_measured_enough_or_is_void_is_not_predicted() -> None:
    arms = made({"policy": "auto", "drafter": "ngram"}, {"policy": "auto", "verify": "token"})
    rows = [as_measured(arm) for arm in arms]
    assert set(predict(arms, rows, TRACE)) == {arm.name for arm in arms[:4]}
    void = [row(one.arm, 0, figures=one.figures, void="late") for one in rows[1:3]]
    assert predict(arms, [rows[0], *void, *rows[3:]], TRACE) == {}


@pytest.mark.long
def test_the_ranks_of_texts_are_those_of_the_drafters_own_logits(tmp_path: Path) -> None:
    target, drafter = make_bytewise_pair(tmp_path, 0.3)
    prompt = Tokenizer.from_file(str(target / "tokenizer.json")).encode("def f(x):").ids
    text = hf.AutoModelForCausalLM.from_pretrained(target).generate(
        torch.tensor([prompt]), max_new_tokens=64, min_new_tokens=64, do_sample=False
    )
    said = text[0, len(prompt) :]

    def wanted(model: Path) -> list[int]:
        logits = hf.AutoModelForCausalLM.from_pretrained(model)(text).logits[0]
        rows = logits[len(prompt) - 1 : -1]
        return [int(rank) for rank in (rows > rows.gather(1, said[:, None])).sum(1)]

    assert len(set(wanted(drafter))) > 2
    assert wanted(target).count(0) > 60
    for model in (drafter, target):  # a target that drafts for itself is right
        models = {"target": str(target), "drafter": str(model), "dtype": "float32"}
        job = _job(made(**models)[0], [Prompt(("def f(x):",))])
        tokens = tuple(said.tolist())
        texts = [row(job.arm.name, 0, n, tokens=tokens, figures={}) for n in (0, 1)]
        path = tmp_path / f"{model.name}.jsonl"
        (found,) = recorded(job, texts, path)
        assert recorded(job, [], path) == (found,)  # what is recorded is read
        assert [position.rank for position in found] == [
            rank if rank < NUM_RANKS else None for rank in wanted(model)
        ]


def test_texts_that_are_too_short_to_be_rehearsed_have_no_ranks(tmp_path: Path) -> None:
    (plain, *_) = made()
    short = row(plain.name, 0, tokens=(1,) * LEAST_LEN, figures={})
    assert recorded(_job(plain, []), [short], tmp_path / "ranks") == ()
    assert not (tmp_path / "ranks").exists()


def pair_of(target: str, drafter: str) -> Measured:
    """What `measure` would have written of the pair with these costs; its passes are slow alone."""

    def node(name: str, plain: float, apart: float, beside: float) -> MeasuredNode:
        curves = (((1, ms), (7, ms + 6.0)) for ms in (plain, apart, beside))
        return MeasuredNode(
            *(name, "float32", "cpu:0", "fused", 1, *curves, 0.5, 0.0),
            *(Hosts(200.0, 200.0, 200.0), None),
        )

    (positions,) = TRACE
    ranks = tuple(position.rank for position in positions)
    scores = tuple(position.scores for position in positions)
    text = SeenText((1,), (2,) * len(ranks), 7, (0.7,) * len(ranks), ranks, scores)
    nodes = node(target, 30.0, 60.0, 40.0), node(drafter, 1.0, 4.0, 4.0)
    return Measured(FORMAT, VERSION, "here", *nodes, 3.0, (chances_of(0.0, [text]),))


def test_a_file_of_the_pair_predicts_its_arms_and_no_others() -> None:
    fixed = {"target_device": "cpu:0"}
    arms = made({"policy": "tree"}, {"policy": "tree", "link": "drafter:delay=50ms"}, **fixed)
    rows = [as_measured(arm) for arm in arms]
    pair = pair_of(arms[0].pair.target, arms[0].pair.drafter)
    predicted = predict_of_pair(pair, arms, rows)
    assert set(predicted) == {arm.name for arm in arms}
    ar, *_, tree, far = (predicted[arm.name] for arm in arms)
    assert ar == pytest.approx(101 / (FIRST_S + 100 * 0.0302), rel=0.01)
    assert far < tree
    for other in ({"drafter": "ngram"}, {"verify": "token"}, {"target_device": "cpu:1"}):
        (arm,) = (one for one in made({"policy": "tree", **other}) if one.table == "tree")
        assert predict_of_pair(pair, [arm], [as_measured(arm)]) == {}
    other = pair_of(arms[0].pair.target, "another")
    assert set(predict_of_pair(other, arms, rows)) == {arms[0].name}  # it does not draft


@pytest.mark.parametrize("drafter_s", [0.004, 0.012, 0.001])
def test_a_simulation_that_is_slower_than_what_was_measured_is_too_slow(drafter_s: float) -> None:
    arms = made()[1:]
    syncs = [(arm.speculation, Decoding.of([as_measured(arm)])) for arm in arms]
    drafter = NodeCosts(Forwards(((1, drafter_s),)), hop_s=0.003)
    for miss in too_slow(arms[0].pair, (TARGET, drafter), syncs, TRACE):
        if drafter_s == 0.004:
            assert miss == pytest.approx(0.0, abs=0.01)
        else:
            assert (miss > 0.02) == (drafter_s > 0.004)
            assert (miss < -0.02) == (drafter_s < 0.004)


@pytest.mark.long
def test_what_the_hosts_take_beside_simulated_devices_is_found_again_and_a_link_is_added() -> None:
    fixed = {"simulate_target_ms": 24.0, "simulate_draft_ms": 3.0}
    arms = made(
        {"policy": "sync", "link": "drafter:delay=5ms", "num_speculative_tokens": 2}, **fixed
    )
    target = NodeCosts(Forwards(((1, 0.024),)), 0.0009)
    drafter = NodeCosts(Forwards(((1, 0.003),)), 0.0004, 0.0005)
    far = NodeCosts(Forwards(((1, 0.003),)), 0.0004, 0.0055)
    figures = {
        arm.name: rehearse(
            arm.speculation.make(arm.pair),
            target,
            far if arm.pair.link else drafter,
            TRACE,
            is_whole=True,
        )
        for arm in arms
    }
    rows = [measured(arm, figures[arm.name], 0.0, 0.0) for arm in arms]
    decodings = {one.arm: Decoding.of([one]) for one in rows}
    syncs = [(arm.speculation, decodings[arm.name]) for arm in arms[1:4]]
    found_target, found = simulated_costs(arms[0].pair, decodings["ar"], syncs, TRACE)
    assert found_target.forward.of(9) == 0.024
    assert found.forward.of(1) == 0.003
    assert found.hop_s == pytest.approx(0.0005, rel=0.1)
    assert found_target.host_s == pytest.approx(0.0009, rel=0.01)
    assert found.host_s == pytest.approx(0.0004, rel=0.1)
    predicted = predict(arms, rows, TRACE)
    assert len(predicted) == 5
    for one in rows:
        assert predicted[one.arm] == pytest.approx(one.tokens_per_second, rel=0.02)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "p.json was not made by this release's `measure`; make it again"),
        (None, "no arm has target with another on the file's devices; `measure` your pair"),
    ],
)
def test_a_file_of_another_pair_is_refused_before_anything_is_measured(
    content: str | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    other = pair_of(made()[0].pair.target, "another")
    Path("p.json").write_text(as_json(other) if content is None else content)
    Path("e.toml").write_text('title = "t"\n[[arms]]\npolicy = ["ar", "tree"]\n')
    monkeypatch.setattr("sys.argv", ["slipstream", "experiment", "e.toml", "--pair", "p.json"])
    assert run(command_line(plugins.commands())) == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --pair: {words}")
    assert len(line) <= 100
