"""The table of policies: one row each. No other code asks for a policy's name.

A policy says when to draft, how much, and when to verify. One mechanism runs them all. The drafter
grows a tree of drafted tokens below the last committed token (the root), likeliest nodes first. The
target starts a pass from its own copy of that tree. Its verdict moves the root along the accepted
tokens, and the nodes below the new root stay. A drafted token is named by the hash of the whole
path to it: it survives if the target chose exactly this path, whoever drafted it and whenever. A
policy is a setting of these numbers:

    most, k        most drafts in one pass (K)
    launch_min     drafts under the root at which the target starts a pass after a rejection
    launch_accepted     the same after a pass in which everything was accepted
    runs_ahead     the drafter goes on while the target verifies, `window` tokens deep
    width          most nodes that one draft step expands (W)
    branches       children that are kept of each node (R); 1: the tree is a chain
    detours        most second and later children on one path: below them a chain is drafted
    subtree        a pass verifies the likeliest nodes, and not the best chain alone
    prices_rows    measured costs decide how many drafts a pass verifies
    prices_waits   measured costs decide whether the target waits for drafts
    prices_awaited  measured costs decide also for how many drafts in a row it waits
    rest_after     above 0: after so many passes it is tried whether plain decoding is faster; if it
                   is, the drafter rests

A new policy needs only a new row, if these numbers can express it: the nodes receive the numbers
with every `Open` (`proto.messages.Policy`) and do not know the rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Literal

from proto.errors import did_you_mean, shown
from proto.messages import MAX_BRANCHES, MAX_WIDTH, MAX_WINDOW, Policy

PolicyName = Literal["auto", "ar", "sync", "pearl", "amusd", "pipelined", "ssd", "tree"]
REST_AFTER = 96  # passes; long enough to measure how much drafts help on such text
MIN_SCORE = -3.0  # e^-3: a draft step on such unlikely paths is hardly ever of use (docs/LOG.md)
# e^-2.5, for the policy `tree`, which weighs no costs: where a draft step is long beside a pass, a
# verdict has to wait until the step ends.
UNLIKELY_IN_TREE = -2.5
NO_OPTIONS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One row of the table: it makes a `Policy` of a number of drafts K and a window.

    summary     for the help of the command line
    paper       where it was described; "": it is not speculative
    most        drafts in a pass are at most this many, whatever K
    k, window   the defaults
    launch_min, launch_accepted  K if that is less; launch_accepted None: the same as launch_min
    min_score   no draft step is made if the chance that the text reaches one of its nodes is less
                (natural logarithm)
    rest_after  number of passes after which the target tries whether decoding without the drafter
                is faster; 0: never
    """

    name: PolicyName
    summary: str
    paper: str = ""
    most: int = MAX_WINDOW
    k: int = 4
    window: int = 16
    launch_min: int = MAX_WINDOW
    launch_accepted: int | None = None
    runs_ahead: bool = False
    width: int = 1
    branches: int = 1
    detours: int = MAX_WINDOW
    subtree: bool = False
    min_score: float = -1e9
    prices_rows: bool = False
    prices_waits: bool = False
    prices_awaited: bool = False
    rest_after: int = 0

    @property
    def drafts(self) -> bool:
        """True if anything is drafted under this policy, by whatever source."""
        return self.most > 0

    @property
    def is_tree(self) -> bool:
        """True if the policy drafts a tree, which needs coupled verification, and not a chain."""
        return self.branches > 1

    @property
    def is_adaptive(self) -> bool:
        """True if measured costs decide anything."""
        return self.prices_rows or self.prices_waits or self.rest_after > 0

    def make(
        self,
        k: int | None = None,
        window: int | None = None,
        *,
        adaptive: bool = True,
        options: Mapping[str, float] = NO_OPTIONS,
    ) -> Policy:
        """Return the `Policy` that the nodes get, with this K and window (None: the row's own).

        k         most drafted tokens in one pass
        window    most tokens that a drafter which runs ahead may be ahead of the last verdict
        adaptive  False: the target prices neither rows nor waits, and the drafter never rests
        options   values that replace the row's own, by the names in `OPTIONS`

        Raises ValueError for an unknown option, or a value out of its range.
        """
        k = min(self.k if k is None else k, self.most)
        window = max(k, self.window if window is None else window)
        launch_min, accepted = min(k, self.launch_min), self.launch_accepted
        policy = Policy(
            self.name,
            num_speculative_tokens=k,
            launch_min=launch_min,
            launch_accepted=launch_min if accepted is None else min(k, accepted),
            window=window if self.runs_ahead else k,
            # Drafts beyond those that start a pass cannot be used before the next verdict.
            group=1 if self.is_tree or not self.runs_ahead else k,
            min_score=self.min_score,
            prices_rows=self.prices_rows,
            prices_waits=self.prices_waits,
            prices_awaited=self.prices_awaited,
            rest_after=self.rest_after,
            width=self.width,
            branches=self.branches,
            detours=self.detours,
            subtree=self.subtree,
        )
        return with_options(policy if adaptive else without_prices(policy), options)


TABLE = (
    # Measured costs decide everything: how many rows a draft step and a pass have, how many drafts
    # the target waits for, and whether to draft at all. The numbers below are upper limits.
    PolicyRow(
        "auto",
        "like tree, but measured costs decide how many drafts are verified and how long the target "
        "waits",
        "cf. SwiftSpec, 2506.11309",
        k=15,  # with the committed token as many rows as `--reproducible` has
        window=32,
        launch_min=2,
        runs_ahead=True,
        width=12,
        branches=4,
        subtree=True,
        min_score=MIN_SCORE,
        prices_rows=True,
        prices_waits=True,
        prices_awaited=True,
        rest_after=REST_AFTER,
    ),
    PolicyRow("ar", "no drafts; the target writes alone (plain decoding)", most=0),
    # Accepted, partly or not at all: the drafter waits, and then drafts K below what was said.
    PolicyRow(
        "sync",
        "draft K tokens, then wait until the target has verified them",
        "Leviathan et al., 2211.17192; Chen et al., 2302.01318",
    ),
    # All drafts accepted: the next block was drafted meanwhile, and is verified whole (the paper's
    # post-verify). A rejection: the drafts below it are lost, as in the paper, and the first new
    # draft is verified at once while the others are drafted (pre-verify). In the paper a rejection
    # of the first draft also costs a whole block's time; here the drafter hears of it between two
    # steps.
    PolicyRow(
        "pearl",
        "draft the next block while the target verifies this one",
        "Liu et al., 2408.11850",
        launch_min=1,
        launch_accepted=MAX_WINDOW,
        runs_ahead=True,
    ),
    # All drafts accepted: the next pass takes what was drafted meanwhile. A rejection: the target
    # does not wait and goes on alone until drafts come. The paper's two models exchange what they
    # have at any time, as here; its target verifies all the drafts that it has, ours at most K.
    PolicyRow(
        "amusd",
        "neither waits; the target verifies the drafts that are there",
        "McDanel, 2410.17375",
        launch_min=0,
        runs_ahead=True,
    ),
    # The same chain, but while fewer than two drafts are there the target waits for two, if that
    # pays. Two, and e^-3, were measured best (docs/LOG.md).
    PolicyRow(
        "pipelined",
        "continue a chain of drafts while the target verifies",
        "PEARL, 2408.11850; AMUSD, 2410.17375",
        launch_min=2,
        runs_ahead=True,
        min_score=MIN_SCORE,
        prices_rows=True,
        prices_waits=True,
        rest_after=REST_AFTER,
    ),
    # While K drafts are verified, the drafter guesses which other tokens the target could choose in
    # the place of each draft (F = branches - 1 guesses), and drafts on after each guess as a chain.
    # If all drafts are accepted, or a guess is right, the next block is there. Else K are drafted
    # anew. The paper gives each position a fixed number of guesses and steps; here the likeliest
    # come first, and the drafter hears of the verdict between two steps.
    PolicyRow(
        "ssd",
        "while the target verifies, draft for each likely verdict",
        "Kumar et al. (Saguaro), 2603.03251",
        runs_ahead=True,
        width=8,
        branches=3,
        detours=1,
    ),
    # Each draft step expands the W likeliest nodes. A pass starts with two drafts in a row under
    # the root and verifies a subtree. The nodes below the tokens that the verdict commits are kept.
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
        "launch_accepted": (0, MAX_WINDOW),
        "group": (1, MAX_WINDOW),
        "width": (1, MAX_WIDTH),
        "branches": (1, MAX_BRANCHES),
        "detours": (0, MAX_WINDOW),
        "subtree": (0, 1),
        "min_score": (-1e9, 0.0),
        "prices_rows": (0, 1),
        "prices_waits": (0, 1),
        "prices_awaited": (0, 1),
        "rest_after": (0, 1 << 20),
    }
)
"""The names that `--policy-option` takes, besides K and the window, and the range of each."""


def checked_options(options: Mapping[str, float]) -> dict[str, float]:
    """Return the options, each as the type of its `Policy` field.

    Raises ValueError for an unknown name or a value out of its range; the message lists what is
    valid.
    """
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
    """Return the policy with these values in place of its own.

    Raises ValueError as `checked_options` does. launch_min and launch_accepted stay at most K.
    """
    most = policy.num_speculative_tokens
    changed = replace(policy, **checked_options(options))  # type: ignore[arg-type]
    return replace(
        changed,
        launch_min=min(most, changed.launch_min),
        launch_accepted=min(most, changed.launch_accepted),
    )


def as_chain(policy: Policy) -> Policy:
    """Return the policy without branches: the classical rules can judge only a chain.

    The number of drafts to wait for is then the policy's own: the chances that would decide it are
    measured under coupled verification.
    """
    return replace(policy, width=1, branches=1, subtree=False, prices_awaited=False)


def without_drafter(policy: Policy) -> Policy:
    """Return the policy for a target that drafts by itself and so waits for no drafter."""
    return replace(policy, launch_min=0, launch_accepted=0, window=0)


def drafts_ahead(policy: Policy, *, takes_turns: bool) -> bool:
    """True if the drafter drafts on while a pass runs; else it waits for the verdict.

    Drafter and target both ask: where no more drafts can come before the verdict, each side sends
    what the other one waits for before it does anything else.

    takes_turns  the drafter makes no step during the pass, whatever the policy says
    """
    return policy.window > policy.num_speculative_tokens and not takes_turns


def without_prices(policy: Policy) -> Policy:
    """Return the policy with its own numbers, whatever is measured; its drafter never rests."""
    return replace(
        policy, prices_rows=False, prices_waits=False, prices_awaited=False, rest_after=0
    )
