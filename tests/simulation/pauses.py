"""How long a reader waits for the next token where messages are lost, in virtual time.

    python -m tests.simulation.pauses FIRST LAST [--jobs N]
    python -m tests.simulation.pauses SEED

Eight texts at once, under every policy and rule, over the links of `--link`: so far away that the
way counts for more than the models do, unsteady, in order or not, and lossy in both directions. A
pause is the time between two pieces of a text that a reader is handed; the first is not waited for
here. Told is the worst of each policy, and of all of them which seed it was.
"""
# ruff: noqa: T201

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pool
from random import Random
from typing import Any

from coordinator.cluster.link import Direction, Link
from coordinator.text.session import Session
from coordinator.text.session_events import Emit, EmitPrompt, EmitRead
from coordinator.text.timed_session import Result
from proto.messages import Limits, Policy, Rule
from proto.policies import TABLE, PolicyRow, as_chain
from rehearsal import world
from rehearsal.setting import Forwards, NodeCosts, Setting, Text
from rehearsal.timeline import Timeline
from tests.simulation.models import Deterministic
from tests.simulation.story import Line
from tests.simulation.toys import ToyModel

NUM_TEXTS, NUM_TOKENS = 8, 80
DELAY_S, JITTER_S, LOSS = 0.05, 0.02, 0.02
ROUND_TRIP_S = 2 * DELAY_S  # from the coordinator to a node and back
MOST_S = 10 * ROUND_TRIP_S
VOCABULARY = 50
LIMIT_S = 600.0  # of virtual time


@dataclass(frozen=True, slots=True)
class Case:
    """What a seed has drawn. `limit_s` of virtual time are enough for all texts."""

    seed: int
    setting: Setting
    model: ToyModel
    link: Link
    limit_s: float = LIMIT_S

    @property
    def kind(self) -> str:
        """Its policy and how drafts are judged."""
        return f"{self.setting.policy.name} {self.setting.rule.name.lower()}"


@dataclass(frozen=True, slots=True)
class Worst:
    """The longest pause of a run: in which text, and when it was over."""

    seconds: float
    session: int
    ended_at: float


def draw(seed: int) -> Case:
    """The case of a seed: policies take turns."""
    random = Random(f"pauses {seed}")
    rows = [(row, rule) for row in TABLE for rule in (*[Rule.COUPLED] * 2, Rule.TOKEN, Rule.BLOCK)]
    row, rule = rows[seed % len(rows)]
    policy = _policy(random, row, rule)
    model = ToyModel(
        salt=random.getrandbits(64),
        vocab_size=VOCABULARY,
        agreement=random.choice((1.0, 0.9, 0.7, 0.4)),
        num_children=max(1, policy.branches),
    )
    lengths = [random.choice((5, 40, 300, 600)) for _ in range(NUM_TEXTS)]
    texts = tuple(
        Text(tuple(random.choices(range(VOCABULARY), k=num)), Limits(num + NUM_TOKENS, ()))
        for num in lengths
    )
    pass_s = random.choice((0.01, 0.02, 0.03))
    step_s = pass_s / random.choice((4, 8, 15))
    setting = Setting(
        policy=policy,
        texts=texts,
        target=NodeCosts(Forwards(((1, pass_s),), pass_s / 2000), timed_rows=(1, 2, 4, 8)),
        drafter=NodeCosts(Forwards(((1, step_s),), step_s / 2000), timed_rows=(1, 2, 4)),
        rule=rule,
        temperature=random.choice((0.0, 1.0)) if rule is Rule.COUPLED else 1.0,
        num_drafters=random.choice((1, 1, 2)),
        max_num_seqs=NUM_TEXTS,
        drafter_lanes=NUM_TEXTS,
        submit_every_s=0.0,
        is_head=random.random() < 0.25,
    )
    return Case(seed, setting, model, Link(DELAY_S, JITTER_S, LOSS, random.random() < 0.5))


def _policy(random: Random, row: PolicyRow, rule: Rule) -> Policy:
    policy = row.make(random.randint(1, 8), random.choice((8, 16, 32)))
    return policy if rule is Rule.COUPLED else as_chain(policy)


class Run:
    """One case from beginning to end. See `rehearsal.world.Watcher`."""

    def __init__(self, case: Case, tell: Callable[[Line], None] | None = None) -> None:
        self.case = case
        self.timeline = Timeline()
        self.worst = Worst(0.0, 0, 0.0)
        self.num_accepted = 0  # drafts, of all texts
        self._tell = tell
        self.sessions: list[Session] = []
        self._prompts: dict[int, Text] = {}  # by session
        self._written: dict[int, list[int]] = defaultdict(list)
        self._handed_at: dict[int, float] = {}  # when the newest piece of each was
        self._machines = world.World(
            case.setting,
            Deterministic(case.model),
            self.timeline,
            self,
            Random(f"luck {case.seed}"),
            make_link=partial(Lossy, self),
            tell=self.tell,
        )

    def run(self) -> Worst:
        """The longest pause. Raises AssertionError if a text is not the target's."""
        self._machines.begin()
        self._machines.run()
        assert len(self._written) == len(self.case.setting.texts)
        return self.worst

    def tell(self, who: str, verb: str, what: Any) -> None:
        """Add to the story."""
        if self._tell is not None:
            self._tell(Line(self.timeline.now, who, verb, what))

    # -- facts ------------------------------------------------------------------------------------

    def begun(self, session: Session, text: Text) -> None:
        """A text begins."""
        self.sessions.append(session)
        self._prompts[session.session] = text

    def delivered(self, session: int, item: Emit | EmitPrompt | EmitRead) -> None:
        """The reader of a text is handed something."""
        now = self.timeline.now
        if isinstance(item, Emit):
            self._written[session] += item.tokens
            self.num_accepted += item.num_accepted
        pause_s = now - self._handed_at.get(session, now)
        if pause_s > self.worst.seconds:
            self.worst = Worst(pause_s, session, now)
        self._handed_at[session] = now

    def completed(self, session: int, _result: Result) -> None:
        """The reader of a text is told that this is all."""
        text = self._prompts[session]
        whole, _ = self.case.model.complete(text.prompt, text.limits)
        assert self._written[session] == list(whole[len(text.prompt) :]), "another text"

    def watch_clock(self) -> None:
        """No text may hang."""
        assert self.timeline.now < self.case.limit_s, "a text does not end"

    def _ignore(self, *_: Any) -> None:
        pass

    disturbed = told = passed_on = routed = launched = occupied = sent = _ignore
    heard = handled = rested = ended = _ignore


class Lossy:
    """One way between two processes, as `--link` makes it."""

    def __init__(self, run: Run, name: str, _hop_s: float, deliver: Callable[[bytes], None]):
        self._run = run
        self._name = name
        self._deliver = deliver
        draw = Random(f"{run.case.seed} {name}").random
        self._direction: Direction[bytes] = Direction(run.case.link, draw)

    def send(self, frame: bytes) -> None:
        """Put a frame on the way."""
        timeline = self._run.timeline
        before = len(self._direction)
        self._direction.put(frame, timeline.now, may_be_lost=True)
        if len(self._direction) == before:
            self._run.tell(self._name, "dropped", frame)
        else:
            timeline.at(self._direction.newest_s, self._arrive)

    def _arrive(self) -> None:
        for frame in self._direction.take(self._run.timeline.now):
            self._run.tell(self._name, "arrives", frame)
            self._deliver(frame)


def pause_of(seed: int) -> tuple[int, str, Worst]:
    """The longest pause of a seed."""
    case = draw(seed)
    return seed, case.kind, Run(case).run()


def main() -> int:
    """Exit status 1 if a pause is longer than it may be."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.pauses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("seed", type=int)
    parser.add_argument("last", type=int, nargs="?", help="run all from SEED to this one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if arguments.last is None:
        case = draw(arguments.seed)
        print(case)
        worst = Run(case, print).run()
        print(f"{case.kind}: {worst}")
        return int(worst.seconds > MOST_S)
    seeds = range(arguments.seed, arguments.last + 1)
    with Pool(arguments.jobs) as pool:
        found = list(pool.imap_unordered(pause_of, seeds, 4))
    by_kind: dict[str, list[float]] = defaultdict(list)
    for _, kind, worst in found:
        by_kind[kind].append(worst.seconds)
    for kind, pauses_s in sorted(by_kind.items()):
        print(f"{kind:18} {len(pauses_s):5} seeds, worst pause {max(pauses_s):.2f} s")
    seed, kind, worst = max(found, key=lambda one: one[2].seconds)
    num_longer = sum(one[2].seconds > MOST_S for one in found)
    print(f"the longest pause: {worst.seconds:.2f} s, seed {seed} ({kind}), text {worst.session}")
    print(f"{num_longer} of {len(found)} seeds with a pause over {MOST_S:g} s, ten round trips")
    return int(num_longer > 0)


if __name__ == "__main__":
    sys.exit(main())
