"""The table of policies: a row each. Nobody else asks for a policy's name.

One mechanism runs them all. The drafter grows a tree below the last committed token, best first;
the target starts a pass by itself, from its own copy of that tree, and a verdict moves the root and
keeps what hangs below it. What is *kept* is content-addressed: a draft survives if its path is what
the target said, whoever drafted it and whenever. A policy is a setting of numbers:

    most, k        drafts in one pass (K)
    launch_min     drafts under the root at which the target starts a pass after a rejection ...
    launch_hit     ... and after a pass in which everything was accepted
    runs_ahead     the drafter goes on while the target verifies, `window` tokens deep
    width          nodes that one draft step expands, at most (W)
    branches       children that are kept of each node (R); 1: the tree is a chain
    detours        second and later children on one path, at most: below them a chain is drafted
    subtree        a pass verifies the likeliest nodes, and not the best chain alone
    rest_after     prices decide what pays: rows, waits, the drafter as a whole

To add a policy is to add a row, if these numbers say what it does; the nodes read them from every
`Open` (`proto.messages.Policy`) and know no rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Literal

from proto.errors import did_you_mean, shown
from proto.messages import MAX_BRANCHES, MAX_WIDTH, MAX_WINDOW, Policy

PolicyName = Literal["auto", "ar", "sync", "pearl", "amusd", "pipelined", "ssd", "tree"]
REST_AFTER = 96  # passes; long enough to know what drafts are worth on such text
UNLIKELY = -3.0  # e^-3: a draft step on so unlikely paths is hardly ever of use (docs/LOG.md)
# Of a tree whose rows have no price, e^-2.5: where a step is long beside a pass, a verdict waits.
UNLIKELY_IN_TREE = -2.5
NO_OPTIONS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """What makes a `Policy` of K and a window.

    summary     for the help of the command line
    paper       where it was described; "": it is not speculative
    most        drafts in a pass are at most so many, whatever K
    k, window   if nobody says
    launch_min, launch_hit  K if that is less; launch_hit None: as launch_min
    min_score   no draft step if the chance that the text comes to one of its nodes is less
                (natural logarithm)
    rest_after  passes after which the target tries whether it is faster alone; 0: never
    """

    name: PolicyName
    summary: str
    paper: str = ""
    most: int = MAX_WINDOW
    k: int = 4
    window: int = 16
    launch_min: int = MAX_WINDOW
    launch_hit: int | None = None
    runs_ahead: bool = False
    width: int = 1
    branches: int = 1
    detours: int = MAX_WINDOW
    subtree: bool = False
    min_score: float = -1e9
    rest_after: int = 0

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted, by whomever."""
        return self.most > 0

    @property
    def is_tree(self) -> bool:
        """Whether it needs coupled verification to be what it is; else it is a chain."""
        return self.branches > 1

    def make(
        self,
        k: int | None = None,
        window: int | None = None,
        *,
        adaptive: bool = True,
        options: Mapping[str, float] = NO_OPTIONS,
    ) -> Policy:
        """The numbers for the nodes.

        k         most drafted tokens in one pass
        window    most tokens that a drafter which runs ahead may be ahead of the last verdict
        adaptive  False: the target prices neither rows nor waits, and the drafter never rests
        options   other numbers, by the names in `OPTIONS`

        Raises ValueError for an option that there is not, or out of its range.
        """
        k = min(self.k if k is None else k, self.most)
        window = max(k, self.window if window is None else window)
        launch_min = min(k, self.launch_min)
        policy = Policy(
            self.name,
            num_speculative_tokens=k,
            launch_min=launch_min,
            launch_hit=launch_min if self.launch_hit is None else min(k, self.launch_hit),
            window=window if self.runs_ahead else k,
            # What comes beyond those that start a pass cannot be used before the next verdict.
            group=1 if self.is_tree or not self.runs_ahead else k,
            min_score=self.min_score,
            rest_after=self.rest_after if adaptive else 0,
            width=self.width,
            branches=self.branches,
            detours=self.detours,
            subtree=self.subtree,
        )
        return with_options(policy, options)


TABLE = (
    # All of it by price: how many rows a step and a pass have, what is waited for, and whether to
    # draft at all. The numbers below are the most of each.
    PolicyRow(
        "auto",
        "like tree; how much and how long is decided by measured costs",
        "cf. SwiftSpec, 2506.11309",
        k=15,  # with the committed token as many rows as `--reproducible` has
        window=32,
        launch_min=2,
        runs_ahead=True,
        width=12,
        branches=4,
        subtree=True,
        min_score=UNLIKELY,
        rest_after=REST_AFTER,
    ),
    PolicyRow("ar", "no drafts; the target writes alone (plain decoding)", most=0),
    # Accepted, partly or not at all: the drafter waits, and then drafts K below what was said.
    PolicyRow(
        "sync",
        "draft K tokens, then wait until the target has verified them",
        "Leviathan et al., 2211.17192; Chen et al., 2302.01318",
    ),
    # All accepted: the next block is there, drafted meanwhile, and is verified whole (the paper's
    # post-verify). Rejected: the first new draft is verified at once while the others are drafted
    # (pre-verify). Partly: what hangs below the rejection dies, as in the paper. There a rejection
    # of the first draft also costs a whole block's time; here the drafter hears of it between two
    # steps.
    PolicyRow(
        "pearl",
        "draft the next block while the target verifies this one",
        "Liu et al., 2408.11850",
        launch_min=1,
        launch_hit=MAX_WINDOW,
        runs_ahead=True,
    ),
    # All accepted: the pass after takes what was drafted meanwhile. Rejected: the target does not
    # wait and goes on alone until drafts come. The paper's two models exchange what they have at
    # any time, as here; it verifies what it has, we at most K.
    PolicyRow(
        "amusd",
        "neither waits; the target verifies the drafts that are there",
        "McDanel, 2410.17375",
        launch_min=0,
        runs_ahead=True,
    ),
    # The same chain, but where fewer than two drafts are there they are waited for, if that pays.
    # Two, and e^-3, were measured best (docs/LOG.md).
    PolicyRow(
        "pipelined",
        "continue a chain of drafts while the target verifies",
        "PEARL, 2408.11850; AMUSD, 2410.17375",
        launch_min=2,
        runs_ahead=True,
        min_score=UNLIKELY,
        rest_after=REST_AFTER,
    ),
    # While K drafts are verified, what could be said in the place of each is guessed (F = branches
    # - 1), and each guess is drafted on as a chain. All accepted or a guess is right: the next
    # block is there. Else K are drafted anew. The paper gives each position a fixed number of
    # guesses and steps; here the likeliest come first, and the drafter hears of the verdict between
    # two steps.
    PolicyRow(
        "ssd",
        "while the target verifies, draft for each likely verdict",
        "Kumar et al. (Saguaro), 2603.03251",
        runs_ahead=True,
        width=8,
        branches=3,
        detours=1,
    ),
    # Best first, W nodes a step; a pass starts with two drafts in a row under the root and verifies
    # a subtree. Whatever is said, what was drafted below it is kept.
    PolicyRow(
        "tree",
        "continue a tree of drafts; the target verifies its likeliest nodes",
        "cf. SwiftSpec, 2506.11309",
        k=8,
        window=32,
        launch_min=2,
        runs_ahead=True,
        width=12,
        branches=4,
        subtree=True,
        min_score=UNLIKELY_IN_TREE,
    ),
)
POLICIES: dict[PolicyName, PolicyRow] = {row.name: row for row in TABLE}

OPTIONS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "launch_min": (0, MAX_WINDOW),
        "launch_hit": (0, MAX_WINDOW),
        "group": (1, MAX_WINDOW),
        "width": (1, MAX_WIDTH),
        "branches": (1, MAX_BRANCHES),
        "detours": (0, MAX_WINDOW),
        "subtree": (0, 1),
        "min_score": (-1e9, 0.0),
        "rest_after": (0, 1 << 20),
    }
)
"""What `--policy-option` takes, besides K and the window, and its range."""


def checked_options(options: Mapping[str, float]) -> dict[str, float]:
    """The same options, each of its own type. Raises ValueError, which says what there is."""
    kinds = {field.name: field.type for field in fields(Policy)}
    values: dict[str, float] = {}
    for name, value in options.items():
        if name not in OPTIONS:
            known = ", ".join(OPTIONS)
            meant = did_you_mean(name, OPTIONS)
            raise ValueError(f"there is no {shown(name)}; there are {known}{meant}")
        low, high = OPTIONS[name]
        is_whole = kinds[name] is not float
        if not low <= value <= high or (is_whole and value != int(value)):
            kind = "a whole number" if is_whole else "a number"
            raise ValueError(f"{name} is {kind} in {low:g}..{high:g}, not {value:g}")
        values[name] = bool(value) if kinds[name] is bool else int(value) if is_whole else value
    return values


def with_options(policy: Policy, options: Mapping[str, float]) -> Policy:
    """The policy with other numbers. Raises ValueError."""
    most = policy.num_speculative_tokens
    changed = replace(policy, **checked_options(options))  # type: ignore[arg-type]
    return replace(
        changed,
        launch_min=min(most, changed.launch_min),
        launch_hit=min(most, changed.launch_hit),
    )


def as_chain(policy: Policy) -> Policy:
    """The same policy without branches: all that a rule other than coupling can judge."""
    return replace(policy, width=1, branches=1, subtree=False)


def without_drafter(policy: Policy) -> Policy:
    """The same policy for a target that drafts by itself: there is nobody to wait for."""
    return replace(policy, launch_min=0, launch_hit=0, window=0)
