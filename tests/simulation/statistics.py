"""Many short texts through the real machines, counted and compared with the exact distribution.

    python -m tests.simulation.statistics NUM_TEXTS

Every text has a seed of its own, so the texts are independent, and their counts are compared with
the target's joint distribution by Pearson's chi-square test. The level is 1e-4 per case; the power
is what the planted mistakes in `test_statistics.py` show: every one of them is rejected.
"""

import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from coordinator.text.session import Session
from coordinator.text.session_events import Emit, EmitRead
from coordinator.text.timed_session import Result as TextResult
from proto.messages import (
    Limits,
    Lookup,
    Policy,
    Role,
    Rule,
)
from proto.policies import POLICIES as TABLE_OF
from proto.policies import with_options, without_drafter
from rehearsal.lossless.chi_square import p_value
from tests.policies import pipelined, synchronous
from tests.simulation.sampled import NUM_SYMBOLS, Sampling
from tests.simulation.scenario import Costs, Crash, Faults, Scenario, Text
from tests.simulation.toys import ToyModel
from tests.simulation.world import World

LEVEL = 1e-4
PROMPT = (0, 2)
LENGTH = 4
POLICIES = {"sync": synchronous(3), "pipelined": pipelined(3, 6)}
LIMIT_S = 120.0  # of virtual time, for one text


@dataclass(frozen=True, slots=True)
class Case:
    """A rule, a policy, whether messages are lost and nodes die, what the target drafts, costs."""

    rule: Rule
    policy: Policy
    faulty: bool
    lookup: Lookup | None = None
    draft_s: float = 0.01
    row_s: float = 0.002

    @property
    def name(self) -> str:
        """For people."""
        words = [self.rule.name.lower(), self.policy.name]
        words += ["ngram"] if self.lookup is not None else []
        words += ["earlier"] if self.lookup is not None and self.lookup.remember else []
        words += ["alone"] if not self.policy.has_drafter else []
        words += ["dear rows"] if self.row_s > 0.002 else []
        return " ".join(words + ["faults"] * self.faulty)


CASES = [
    Case(rule, policy, faulty)
    for rule in (Rule.COUPLED, Rule.TOKEN, Rule.BLOCK)
    for policy in POLICIES.values()
    for faulty in (False, True)
]
# Drafts that the target makes itself: besides a drafter's, and alone under each rule.
COPIES = Lookup(1, 3, (0, 2, 1, 1, 0, 1, 2, 2, 0, 0, 2, 1, 0))
CASES += [
    Case(rule, policy, faulty, COPIES)
    for rule, policy in (
        (Rule.COUPLED, POLICIES["pipelined"]),
        (Rule.COUPLED, without_drafter(POLICIES["sync"])),
        (Rule.TOKEN, without_drafter(POLICIES["sync"])),
        (Rule.BLOCK, without_drafter(POLICIES["sync"])),
    )
    for faulty in (False, True)
]

# A tree of two choices each, of which a pass verifies the likeliest: only coupling can.
TREE = with_options(TABLE_OF["tree"].make(3, 6), {"branches": 2, "width": 4})
CASES += [Case(Rule.COUPLED, TREE, faulty) for faulty in (False, True)]
CASES += [Case(Rule.COUPLED, TREE, True, COPIES)]
# What texts said is offered to those that come after them.
CASES += [Case(Rule.COUPLED, TREE, True, replace(COPIES, remember=True))]

# Where rows are dear, drafts that are at hand are not all verified.
DEAR_S = 0.03
CASES += [
    Case(rule, POLICIES["pipelined"], False, row_s=DEAR_S) for rule in (Rule.TOKEN, Rule.BLOCK)
]


class Recorder:
    """Stands where the judge of texts with one right continuation stands; keeps what is written."""

    def __init__(self, _scenario: Scenario, timeline: Any) -> None:
        self.timeline = timeline
        self.counts: Counter[tuple[int, ...]] = Counter()
        self._texts: dict[int, list[int]] = {}  # by session, of those that are being written
        self._begun_at = 0.0  # of the newest

    def begun(self, session: Session, _text: Text) -> None:
        """A text begins."""
        self._texts[session.session] = []
        self._begun_at = self.timeline.now

    def delivered(self, session: int, item: Emit | EmitRead) -> None:
        """Tokens, or how far the prompt was read."""
        if isinstance(item, Emit):
            self._texts[session] += item.tokens

    def completed(self, session: int, _result: TextResult) -> None:
        """The end."""
        self.counts[tuple(self._texts.pop(session))] += 1

    def watch_clock(self) -> None:
        """No text may hang."""
        assert self.timeline.now < self._begun_at + LIMIT_S, "a text does not end"

    def _ignore(self, *_: Any) -> None:
        pass

    launched = occupied = heard = sent = handled = routed = rested = _ignore
    disturbed = told = passed_on = ended = _ignore


@dataclass(frozen=True, slots=True)
class Result:
    """What a case came to."""

    p_value: float
    num_texts: int
    num_judged: int
    num_accepted: int
    seconds: float

    @property
    def passes(self) -> bool:
        """Whether the texts may be the target's."""
        return self.p_value >= LEVEL


def run(case: Case, num_texts: int, models: Sampling | None = None, *, seed: int = 1) -> Result:
    """Write the texts of a case and test them."""
    models = models or Sampling()
    started = time.perf_counter()
    world = World(_scenario(case, num_texts, seed), models=models, make_judge=Recorder)
    world.run()
    recorder = world.judge
    assert isinstance(recorder, Recorder)
    assert sum(recorder.counts.values()) == num_texts
    return Result(
        p_value=p_value(recorder.counts, models.joint(PROMPT, LENGTH)),
        num_texts=num_texts,
        num_judged=models.num_judged,
        num_accepted=models.num_accepted,
        seconds=time.perf_counter() - started,
    )


def _scenario(case: Case, num_texts: int, seed: int) -> Scenario:
    """Short texts, one after another; all faults go on until the end."""
    random = Random(seed)
    text = Text(PROMPT, Limits(len(PROMPT) + LENGTH, ()))
    crashes: list[Crash] = []
    if case.faulty:
        at_s = 0.0
        while at_s < num_texts:
            at_s += random.uniform(0.2, 4.0)
            role = random.choice((Role.DRAFTER, Role.TARGET))
            crashes.append(Crash(at_s, role, random.uniform(0.01, 0.1)))
    rates = (0.05, 0.1, 0.1) if case.faulty else (0.0, 0.0, 0.0)
    return Scenario(
        seed=seed,
        model=ToyModel(salt=0, vocab_size=NUM_SYMBOLS, agreement=0.5),
        policy=case.policy,
        texts=(text,) * num_texts,
        costs=Costs(
            pass_s=0.06,
            row_s=case.row_s,
            draft_s=case.draft_s,
            drafter_hop_s=0.004,
            target_hop_s=0.001,
            jitter_s=0.01,
            detect_s=0.05,
        ),
        faults=Faults(*rates, tuple(crashes), float("inf") if case.faulty else 0.0),
        fixed_rows=None,
        drafter_max_len=1 << 20,
        rule=case.rule,
        temperature=1.0,
        blocking=True,
        lookup=case.lookup,
        submit_every_s=None,
    )


def main() -> int:
    """Run every case; exit status 1 if one is rejected."""
    num_texts = int(sys.argv[1])
    passed = True
    for case in CASES:
        result = run(case, num_texts)
        passed &= result.passes
        rate = result.num_accepted / max(1, result.num_judged)
        print(  # noqa: T201
            f"{case.name:26} p = {result.p_value:.4f}  {result.num_texts} texts, "
            f"{rate:.0%} of {result.num_judged} drafts accepted, {result.seconds:.0f} s",
            flush=True,
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
