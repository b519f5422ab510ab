"""The table as Markdown: a row per arm, columns for each temperature."""

import dataclasses
from typing import Any

from lab.experiments.folder import AFTER_PROMPT, ArmRecord
from lab.experiments.results.markdown import NONE, markdown
from lab.experiments.results.summary import summarize
from lab.experiments.rows import Row
from tests.lab.experiments.results.made_up import arm, header, row

PEER = {"peer": "llamacpp 0.5.0-dev, 2 threads"}


def both(name: str, swept: str = "", **settings: Any) -> list[ArmRecord]:
    """The arm at both temperatures; `swept` stands behind the name of its sweep."""
    found = []
    for temperature in (0.0, 0.8):
        group = f"{name} T={temperature}"
        base = "" if name == "plain" else f"plain T={temperature}"
        one = arm(f"{group} {swept}".strip(), base, **settings, temperature=temperature)
        found.append(dataclasses.replace(one, swept_from=group if swept else ""))
    return found


ARMS = [
    *both("plain", policy="ar"),
    *both("sync", "K=2", num_speculative_tokens=2),
    *both("sync", "K=4", num_speculative_tokens=4),
    *both("llama.cpp", peer="llamacpp"),
]
SPEEDS = {
    "plain T=0.0": 20.0,
    "plain T=0.8": 20.0,
    "sync T=0.0 K=4": 30.0,
    "sync T=0.8 K=2": 24.0,
    "llama.cpp T=0.0": 25.0,
}


def rows() -> list[Row]:
    return [
        row(name, prompt, tokens_per_second=speed, hosts=PEER if "llama" in name else {})
        for name, speed in SPEEDS.items()
        for prompt in range(6)
    ]


def test_arms_that_differ_in_the_temperature_share_a_row_with_what_was_chosen_for_each() -> None:
    head = header(ARMS, speed=AFTER_PROMPT, repetitions=1)
    lines = markdown(head, summarize(head, rows())).splitlines()
    times = "times plain decoding (95 %)"
    assert lines[:5] == [
        f"|  | greedy: tokens/s | {times} | temperature 0.8: tokens/s | {times} |",
        "| --- | --- | --- | --- | --- |",
        f"| plain | 20.0 | {NONE} | 20.0 | {NONE} |",
        "| sync | **30.0** | 1.50 (1.50-1.50), K = 4 | **24.0** | 1.20 (1.20-1.20), K = 2 |",
        f"| llama.cpp (0.5.0-dev, 2 threads) | 25.0 | 1.25 (1.25-1.25) | {NONE} | {NONE} |",
    ]
    assert "Speeds count what comes after the first tokens of a text." in lines[-1]
    assert lines[-1].endswith("2026-01-01, torch 2.13.0, commit abcdef0.")


def test_an_arm_whose_texts_are_all_void_says_so() -> None:
    head = header(ARMS[:1])
    found = [dataclasses.replace(one, void="too slow") for one in rows()[:6]]
    assert "| plain | void |" in markdown(head, summarize(head, found))
