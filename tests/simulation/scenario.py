"""What one seed means: the models, the policy, the texts, the costs and the faults."""

from dataclasses import dataclass, replace
from random import Random

from drafter_node.translation.text import Languages
from node.economics import WAIT_S_MAX
from proto.liveness import SILENCE_LIMIT_S
from proto.messages import MAX_WINDOW, Limits, Lookup, Policy, Role, Rule
from proto.policies import REST_AFTER, as_chain, without_drafter, without_prices
from rehearsal.setting import NUM_TREE_SLOTS, Forwards, NodeCosts, Setting
from rehearsal.setting import Text as Text
from tests.policies import autoregressive, pipelined, synchronous
from tests.simulation.languages import toy_languages
from tests.simulation.toys import LIKELY, ToyModel

POLICIES = ("ar", "sync", "pipelined")
ORACLE_TOKENS = 60
MAX_TEXTS = 6
# By how much a draft is faster than a pass: slow, usual and fast drafters.
SHARE_TRANSLATED = 0.35  # of the scenarios in which the drafters may have other tokens
SHARE_WITH_DEATHS = 0.15  # of the scenarios in which the coordinator may die
JOINED_S = 2.0  # after the coordinator was started again, until nodes and clients are back
SHARE_WITH_TARGETS = 0.2  # of the scenarios with two targets
TARGET_SILENCE_S = 3 * SILENCE_LIMIT_S
SHARE_WITH_PLACES = 0.3  # of the scenarios in which the passes may run on the core of the drafter
STEPS_PER_TOKEN = 3  # letters of the longest token of a target
SPEED_UPS = ((0.5, 2.0), (1.0, 12.0), (4.0, 30.0))


@dataclass(frozen=True, slots=True)
class Crash:
    """A node dies at `at_s` and is ready again after `down_s`. `index`: which of its role."""

    at_s: float
    role: Role
    down_s: float
    index: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """A target cannot be reached from `at_s` on, for `lasts_s`; it works on meanwhile."""

    at_s: float
    lasts_s: float
    index: int = 0


@dataclass(frozen=True, slots=True)
class Death:
    """The coordinator dies at `at_s`, and is started again after `down_s`."""

    at_s: float
    down_s: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of virtual time. A hop is one way; `jitter_s` is added at random to every hop."""

    pass_s: float
    row_s: float
    draft_s: float
    drafter_hop_s: float
    target_hop_s: float
    jitter_s: float
    detect_s: float  # until the coordinator notices that a node is gone or back


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances per message, until `heal_s`; from then on everything works."""

    drop: float
    repeat: float
    reorder: float
    crashes: tuple[Crash, ...]
    heal_s: float
    cuts: tuple[Cut, ...] = ()
    deaths: tuple[Death, ...] = ()  # of the coordinator, one after the other
    sync_s: float = 0.0  # until what it notes in its journal is on the disk


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that one seed has drawn."""

    seed: int
    model: ToyModel
    policy: Policy
    texts: tuple[Text, ...]
    costs: Costs
    faults: Faults
    fixed_rows: int | None
    drafter_max_len: int
    rule: Rule
    temperature: float  # only whether it is zero matters here
    blocking: bool  # a node reads its messages only between two forwards: the host computes
    lookup: Lookup | None = None  # how the target drafts by itself
    num_drafters: int = 1
    max_num_seqs: int = 1  # texts that are open at once at each target
    drafter_lanes: int = 1  # of them, as many as a drafter has room for
    num_per_pass: int = 64  # most texts that share one
    # Between two texts. 0: all at the start; None: each a while after the one before is complete.
    submit_every_s: float | None = 0.0
    is_head: bool = False  # the drafters read the target's features
    languages: Languages | None = None  # the drafters have other tokens than the target
    placement: str = ""  # "shared" and, at times, "auto": the models take turns on some cores
    num_targets: int = 1
    same_bits: bool = True  # the targets say that they compute the same bits
    keeps_bits: bool = False  # no text goes on at a target that does not

    @property
    def setting(self) -> Setting:
        """What the machines are given of it."""
        costs = self.costs
        target = Forwards(((1, costs.pass_s),), costs.row_s)
        drafter = Forwards(((1, costs.draft_s),), costs.row_s)
        return Setting(
            policy=self.policy,
            texts=self.texts,
            target=NodeCosts(target, hop_s=costs.target_hop_s),
            drafter=NodeCosts(drafter, hop_s=costs.drafter_hop_s),
            fixed_rows=self.fixed_rows,
            drafter_max_len=self.drafter_max_len,
            rule=self.rule,
            temperature=self.temperature,
            blocking=self.blocking,
            lookup=self.lookup,
            num_drafters=self.num_drafters,
            max_num_seqs=self.max_num_seqs,
            drafter_lanes=self.drafter_lanes,
            num_per_pass=self.num_per_pass,
            submit_every_s=self.submit_every_s,
            is_head=self.is_head,
            languages=self.languages,
            placement=self.placement,
            expected=self.expected,
            num_targets=self.num_targets,
            by_hand=bool(self.faults.cuts),
            same_bits=self.same_bits,
            keeps_bits=self.keeps_bits,
        )

    @property
    def expected(self) -> float:
        """After which part of a forward's time it should have ended; in half of the seeds it has.

        In the others forwards take up to three times as long as expected.
        """
        random = Random(f"late {self.seed}")
        return 1.0 if random.random() < 0.5 else random.uniform(1 / 3, 1)

    @property
    def takes_turns(self) -> bool:
        """Whether the drafter may have to draft nothing while a pass runs."""
        return bool(self.placement) and self.policy.prices_awaited

    @property
    def capacity(self) -> int:
        """Slots of a cache that is large enough."""
        return max(text.limits.max_len for text in self.texts) + NUM_TREE_SLOTS

    @property
    def is_oracle(self) -> bool:
        """Whether all drafts are right: the drafter's are, and it reads the whole text."""
        is_right = self.model.agreement == 1.0 and self.lookup is None
        if self.languages is not None and len(self.model.stop_ids) > 1:
            is_right = False  # it knows a single end of a text
        return is_right and self.drafter_max_len >= self.capacity

    @property
    def healed_at_s(self) -> float:
        """When links are perfect and no node is down any more."""
        ends = [crash.at_s + crash.down_s for crash in self.faults.crashes]
        ends += [cut.at_s + cut.lasts_s for cut in self.faults.cuts]
        # Then all nodes join anew.
        ends += [one.at_s + one.down_s + JOINED_S for one in self.faults.deaths]
        return max([self.faults.heal_s, *ends])

    @property
    def round_trip_s(self) -> float:
        """From the target to the drafter and back, at worst."""
        costs = self.costs
        return 2 * (costs.drafter_hop_s + costs.target_hop_s + 2 * costs.jitter_s)

    @property
    def at_once(self) -> int:
        """Texts that may share a node."""
        return min(self.max_num_seqs * self.num_targets, len(self.texts))

    @property
    def turns(self) -> int:
        """Passes of which each of them has a part in one; every other one may be missed."""
        return 1 if self.at_once == 1 else 2 * -(-self.at_once // self.num_per_pass)

    @property
    def num_steps(self) -> int:
        """Steps of a drafter for one token of the target, at worst."""
        return 1 if self.languages is None else STEPS_PER_TOKEN

    @property
    def step_s(self) -> float:
        """What a draft takes, with those of other texts and other branches."""
        num_rows = self.at_once * self.policy.width
        forward_s = self.costs.draft_s + (num_rows - 1) * self.costs.row_s
        return forward_s * self.turns * self.num_steps

    @property
    def num_wanted(self) -> int:
        """Drafts that a pass may wait for."""
        if self.takes_turns:
            return self.policy.num_speculative_tokens
        return max(self.policy.launch_min, self.policy.launch_accepted)

    @property
    def can_keep_up(self) -> bool:
        """Whether a drafter that has fallen behind can get ahead of the target again."""
        policy, pass_s, step_s = self.policy, self.costs.pass_s, self.step_s
        if not policy.has_drafter or step_s >= pass_s:
            return False
        if self.drafter_lanes < self.at_once:
            return False  # a text may have no room at the drafter until another ends
        if policy.window <= self.num_wanted or self.takes_turns:
            if self.round_trip_s + self.num_wanted * step_s >= WAIT_S_MAX:
                return False
            if self.takes_turns or policy.window <= min(policy.launch_min, policy.launch_accepted):
                return True  # it is waited for as long as that takes
        window = min(policy.window, int(-policy.min_score / -LIKELY) + 1) // self.num_steps
        ahead_s = (window - policy.group) * pass_s
        return ahead_s > self.round_trip_s and pass_s > 1.25 * step_s

    @property
    def token_s(self) -> float:
        """What a token costs at worst: a pass, and the longest wait that is worth it."""
        policy, costs = self.policy, self.costs
        num_rows = self.at_once * (1 + policy.num_speculative_tokens)
        pass_s = (costs.pass_s + (num_rows - 1) * costs.row_s) * self.turns
        waited_s = self.round_trip_s + self.num_wanted * (self.step_s + costs.row_s)
        if policy.window <= self.num_wanted:
            return pass_s + waited_s
        ahead_s = self.num_wanted * pass_s
        return pass_s + (max(ahead_s, waited_s) if self.takes_turns else ahead_s)

    def prefill_s(self, length: int) -> float:
        """What both nodes need at most to read a text, and others meanwhile, the longest first."""
        others = sorted((text.limits.max_len for text in self.texts), reverse=True)
        return sum(map(self._read_s, (length, *others[: self.at_once - 1])))

    def _read_s(self, length: int) -> float:
        num_chunks, costs = -(-length * self.num_steps // 256), self.costs
        num_rows = (1 + self.num_steps) * length
        return num_chunks * (costs.pass_s + costs.draft_s) + num_rows * costs.row_s


def draw(
    seed: int,
    policy: str | None = None,
    *,
    oracle: bool = False,
    plain: bool = False,
    alone: bool = False,
    chain: bool = False,
    leaving: bool = False,
) -> Scenario:
    """The scenario of a seed, with another policy if one is given.

    oracle  the drafter is always right and the texts are longer: what costs only speed shows
    plain   two texts and one drafter with the target's tokens, all else being equal
    alone   one text at a time, and drafters with the target's tokens, all else being equal
    chain   the drafter has one choice, all else being equal
    leaving most readers leave before their text has come to its end, all else being equal
    """
    random = Random(seed)
    model = _model(random)
    if oracle:
        model = replace(model, agreement=1.0, stop_ids=(), stop_rate=0.0)
    more = ORACLE_TOKENS if oracle else 0
    texts = _texts(random, model, more=more)
    if not plain:
        texts = _more_or_less(Random(f"texts {seed}"), model, texts, more=more)
    drawn = {name: _policy(random, name) for name in POLICIES}
    name = random.choices(POLICIES, (1, 4, 6))[0]
    costs = _costs(random)
    num_tokens = sum(text.limits.max_len - len(text.prompt) for text in texts)
    chosen = drawn[policy or name]
    if chosen.window > chosen.launch_min:
        # Apart, so that the other draws stay as they are.
        chosen = _holding_back(chosen, Random(f"policy {seed}"), oracle=oracle)
    if chosen.window > chosen.launch_min and not chain:
        chosen = _branching(chosen, model, Random(f"tree {seed}"))
    else:
        model = replace(model, num_children=1)
    scenario = Scenario(
        seed=seed,
        model=model,
        policy=chosen,
        texts=texts,
        costs=costs,
        faults=_faults(random, num_tokens * costs.pass_s),
        fixed_rows=random.choice((None, None, 16)),
        drafter_max_len=1 << 20,
        rule=Rule.COUPLED,
        temperature=0.0,
        blocking=random.random() < 0.25,  # most nodes hear messages during a forward
        submit_every_s=None,
    )
    classical = random.choice((Rule.COUPLED, Rule.COUPLED, Rule.COUPLED, Rule.TOKEN, Rule.BLOCK))
    if classical is not Rule.COUPLED:
        # A model with one choice has the same text under every rule.
        model, chain = replace(model, num_children=1), as_chain(chosen)
        scenario = replace(scenario, model=model, policy=chain, rule=classical, temperature=1.0)
    if not oracle:
        scenario = _with_lookup(_on_cores(scenario), Random(f"lookup {seed}"))
    if not plain:
        scenario = _at_once(scenario, Random(f"at once {seed}"))
    if leaving:
        scenario = _left_early(scenario, Random(f"readers {seed}"))
    by_itself = replace(scenario, max_num_seqs=1, drafter_lanes=1)
    several = scenario if plain else _several(scenario, may_die=not (oracle or leaving))
    scenario = by_itself if alone else several
    if random.random() < 0.1 and not oracle:
        longest = max(text.limits.max_len for text in texts)
        return replace(scenario, drafter_max_len=random.randint(2, longest))
    return scenario


def _on_cores(scenario: Scenario) -> Scenario:
    """In some of the scenarios passes may run on the drafter's core."""
    random = Random(f"cores {scenario.seed}")
    if random.random() > SHARE_WITH_PLACES or scenario.fixed_rows:
        return scenario
    return replace(scenario, placement=random.choice(("shared", "auto")))


def _at_once(scenario: Scenario, random: Random) -> Scenario:
    """How many texts are open at once, when they come, and how many drafters, of which kind."""
    max_num_seqs = random.randint(1, MAX_TEXTS)
    apart = Random(f"lanes {scenario.seed}")
    scenario = replace(
        scenario,
        max_num_seqs=max_num_seqs,
        drafter_lanes=max_num_seqs if apart.random() < 0.8 else apart.randint(1, max_num_seqs),
        num_per_pass=apart.choice((64, 64, 64, 1, 2)),
        is_head=Random(f"head {scenario.seed}").random() < 0.25,
        submit_every_s=random.choice((None, 0.0, 5 * random.random())),
    )
    if random.random() > 0.25:
        return scenario
    faults = scenario.faults
    crashes = tuple(
        replace(crash, index=random.randrange(2)) if crash.role is Role.DRAFTER else crash
        for crash in faults.crashes
    )
    return replace(scenario, num_drafters=2, faults=replace(faults, crashes=crashes))


def _at_targets(scenario: Scenario) -> Scenario:
    """In some of the scenarios there are two targets: both may die, or one cannot be reached."""
    random = Random(f"targets {scenario.seed}")
    if random.random() > SHARE_WITH_TARGETS:
        return scenario
    faults, costs = scenario.faults, scenario.costs
    if random.random() < 0.5:
        crashes = tuple(
            replace(crash, index=random.randrange(2)) if crash.role is Role.TARGET else crash
            for crash in faults.crashes
        )
        faults = replace(faults, crashes=crashes)
    else:
        # Users have started both: one that was silent for too long may wake again.
        crashes = tuple(crash for crash in faults.crashes if crash.role is Role.DRAFTER)
        longest = max(text.limits.max_len - len(text.prompt) for text in scenario.texts)
        at_s = random.uniform(0, longest * costs.pass_s / 2)
        lasts_s = random.choice((1.0, TARGET_SILENCE_S)) * random.uniform(1.01, 1.2)
        cuts = (Cut(at_s, lasts_s, random.randrange(2)),)
        faults = replace(faults, crashes=crashes, cuts=cuts)
    return replace(
        scenario,
        num_targets=2,
        faults=faults,
        same_bits=random.random() < 0.7,
        keeps_bits=random.random() < 0.3,
    )


def _several(scenario: Scenario, *, may_die: bool) -> Scenario:
    """Draw other vocabularies, several targets, and several coordinators one after another."""
    scenario = _at_targets(_translated(scenario))
    return _with_deaths(scenario) if may_die else scenario


def _with_deaths(scenario: Scenario) -> Scenario:
    """In some of the scenarios the coordinator dies once or twice, and goes on with its journal."""
    random = Random(f"coordinator {scenario.seed}")
    if random.random() > SHARE_WITH_DEATHS or scenario.faults.cuts:
        return scenario
    longest = max(text.limits.max_len - len(text.prompt) for text in scenario.texts)
    deaths, now = [], 0.0
    for _ in range(random.randint(1, 2)):
        at_s = now + random.uniform(0, longest * scenario.costs.pass_s / 2)
        deaths.append(Death(at_s, random.uniform(0.05, 2.0)))
        now = at_s + deaths[-1].down_s
    sync_s = random.choice((0.002, 0.03, 0.3))
    faults = replace(scenario.faults, deaths=tuple(deaths), sync_s=sync_s)
    return replace(scenario, faults=faults)


def _translated(scenario: Scenario) -> Scenario:
    """In some of the scenarios the drafters have another vocabulary than the target."""
    random = Random(f"languages {scenario.seed}")
    may_be = scenario.rule is Rule.COUPLED and scenario.policy.has_drafter and not scenario.is_head
    if random.random() > SHARE_TRANSLATED or not may_be:
        return scenario
    return replace(scenario, languages=toy_languages(scenario.model, random))


def _with_lookup(scenario: Scenario, random: Random) -> Scenario:
    """In a third of the scenarios the target drafts by itself: alone, or besides the drafter."""
    is_alone, is_also = random.random() < 0.15, random.random() < 0.2
    if not is_alone and (not is_also or scenario.rule is not Rule.COUPLED):
        return scenario
    reference: tuple[int, ...] = ()
    if random.random() < 0.7:
        # What will be said, with a mistake here and there.
        text = random.choice(scenario.texts)
        said, _ = scenario.model.complete(text.prompt, text.limits)
        rate = random.choice((0.0, 0.05, 0.2))
        reference = tuple(0 if random.random() < rate else token for token in said)
    ngram_min = random.randint(1, 3)
    ngram_max = ngram_min + random.randint(0, 3)
    remember = scenario.rule is Rule.COUPLED and random.random() < 0.5
    lookup = Lookup(ngram_min, ngram_max, reference, remember)
    policy = without_drafter(scenario.policy) if is_alone else scenario.policy
    return replace(scenario, lookup=lookup, policy=policy)


def _model(random: Random) -> ToyModel:
    vocab_size = random.randint(5, 11)
    has_stop = random.random() < 0.5
    return ToyModel(
        salt=random.getrandbits(64),
        vocab_size=vocab_size,
        agreement=random.choice((1.0, 1.0, 1.0, 0.0, random.random(), random.random())),
        num_children=random.choice((1, 1, 2, 3)),
        stop_ids=tuple(range(vocab_size, vocab_size + random.randint(1, 2))) if has_stop else (),
        stop_rate=random.choice((0.1, 0.02)) if has_stop else 0.0,
    )


def _texts(random: Random, model: ToyModel, *, more: int) -> tuple[Text, ...]:
    """Two texts, the second beginning as the first does: a chat's next turn, or an edited one."""
    num_tokens = model.vocab_size + len(model.stop_ids)
    length = random.randint(257, 600) if random.random() < 0.1 else random.randint(1, 60)
    prompt = tuple(random.randrange(num_tokens) for _ in range(length))
    first = Text(prompt, _limits(random, model, length + more))
    return first, _next_turn(random, model, first, more=more)


def _next_turn(random: Random, model: ToyModel, before: Text, *, more: int) -> Text:
    """A text that begins as another does."""
    num_tokens = model.vocab_size + len(model.stop_ids)
    said, _ = model.complete(before.prompt, before.limits)
    shared = said[: random.randint(0, len(said))]
    prompt = shared + tuple(random.randrange(num_tokens) for _ in range(random.randint(1, 20)))
    return Text(prompt, _limits(random, model, len(prompt) + more))


def _more_or_less(
    random: Random, model: ToyModel, texts: tuple[Text, ...], *, more: int
) -> tuple[Text, ...]:
    """One to six texts of these and others like them; most often two or three."""
    number = random.choices(range(1, MAX_TEXTS + 1), (3, 6, 4, 1, 1, 1))[0]
    while len(texts) < number:
        texts = (*texts, _next_turn(random, model, random.choice(texts), more=more))
    return texts[:number]


def _limits(random: Random, model: ToyModel, prompt_len: int) -> Limits:
    return Limits(
        prompt_len + random.choice((random.randint(1, 8), random.randint(1, 100))), model.stop_ids
    )


def _left_early(scenario: Scenario, random: Random) -> Scenario:
    """The same texts, and readers most of whom leave early."""
    lengths = [random.randint(1, one.limits.max_len - len(one.prompt)) for one in scenario.texts]
    texts = tuple(
        replace(text, read_len=length if random.random() < 0.8 else None)
        for text, length in zip(scenario.texts, lengths, strict=True)
    )
    return replace(scenario, texts=texts)


def _policy(random: Random, name: str) -> Policy:
    if name == "ar":
        return autoregressive()
    if name == "sync":
        return synchronous(random.randint(1, 8))
    k = random.choice((random.randint(1, 8), random.randint(1, 64)))
    return pipelined(
        k,
        random.choice((random.randint(1, 4), random.randint(1, 16), random.randint(16, 64))),
    )


def _holding_back(policy: Policy, random: Random, *, oracle: bool) -> Policy:
    """When a drafter sends, which drafts it makes, and when it rests."""
    group, min_score = random.choice((1, 1, policy.num_speculative_tokens)), -1e9
    if random.random() < 0.5:
        min_score = LIKELY * random.randint(0, 12)
    # A rest of an oracle would be lost time.
    rest_after = 0 if oracle else random.choice((0, random.randint(1, 10), REST_AFTER))
    changed = replace(policy, group=group, min_score=min_score, rest_after=rest_after)
    return changed if rest_after else without_prices(changed)


def _branching(policy: Policy, model: ToyModel, random: Random) -> Policy:
    """Some shape of a tree, if the model has several choices; when a pass starts after a hit."""
    k = policy.num_speculative_tokens
    if model.num_children > 1:  # the largest trees take the most time, and show no more
        policy = replace(policy, min_score=max(policy.min_score, random.choice((-1.5, -3.0, -5.0))))
    return replace(
        policy,
        branches=model.num_children,
        prices_awaited=policy.prices_waits and model.num_children > 1,
        width=random.choice((1, 2, 4, 8)),
        detours=random.choice((MAX_WINDOW, MAX_WINDOW, 1)),
        subtree=model.num_children > 1 and random.random() < 0.8,
        launch_accepted=random.choice((policy.launch_min, policy.launch_min, 0, k)),
    )


def _costs(random: Random) -> Costs:
    pass_s = random.uniform(0.02, 0.3)
    hop_s = pass_s * random.choice((0.01, 0.1, 0.5, random.uniform(0, 3)))
    return Costs(
        pass_s=pass_s,
        row_s=pass_s * random.choice((0.0, 0.05)),
        draft_s=pass_s / random.uniform(*random.choice(SPEED_UPS)),
        drafter_hop_s=hop_s,
        target_hop_s=hop_s * random.choice((0.01, 1.0)),
        jitter_s=hop_s * random.choice((0.0, 0.5)),
        detect_s=random.uniform(0.01, 1.0),
    )


def _faults(random: Random, plain_s: float) -> Faults:
    """Four kinds of weather; `plain_s` is how long the texts take at most without any drafter."""
    weather = random.choice(("calm", "disorder", "loss", "storm"))
    heal_s = plain_s * random.choice((random.uniform(0.01, 0.1), random.uniform(0.05, 0.6)))
    if weather == "calm":
        return Faults(0.0, 0.0, 0.0, (), 0.0)
    if weather == "disorder":
        return Faults(0.0, random.choice((0.0, 0.1)), random.choice((0.05, 0.3)), (), heal_s)
    crashes: tuple[Crash, ...] = ()
    if weather == "storm":
        crashes = tuple(_crash(random, heal_s) for _ in range(random.randint(1, 4)))
    drop = random.choice((0.02, 0.1, 0.3, 0.5))
    return Faults(drop, random.choice((0.0, 0.1)), random.choice((0.0, 0.2)), crashes, heal_s)


def _crash(random: Random, heal_s: float) -> Crash:
    role = random.choice((Role.DRAFTER, Role.TARGET))
    return Crash(random.uniform(0, heal_s), role, random.uniform(0.01, 1.0))
