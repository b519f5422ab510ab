"""The table of policies: a row each. Nobody else asks for a policy's name.

To add a policy is to add a row, if these numbers say what it does; the nodes read them from every
`Open` (`proto.messages.Policy`) and know no rows.
"""

from dataclasses import dataclass, replace
from typing import Literal

from proto.messages import MAX_WINDOW, Policy

PolicyName = Literal["ar", "sync", "pipelined"]
REST_AFTER = 96  # passes; long enough to know what drafts are worth on such text


@dataclass(frozen=True, slots=True)
class Row:
    """What makes a `Policy` of K and a window.

    summary     for the help of the command line
    paper       where it was described; "": it is not speculative
    most        drafts in a pass are at most so many, whatever K
    launch_min  drafts at which the target starts a pass, or K if that is less
    runs_ahead  the drafter goes on while the target verifies, up to the window; else up to K
    min_score   below a path whose chance is less (natural logarithm), nothing is drafted
    rest_after  passes after which the target tries whether it is faster alone; 0: never
    """

    name: PolicyName
    summary: str
    paper: str = ""
    most: int = MAX_WINDOW
    launch_min: int = MAX_WINDOW
    runs_ahead: bool = False
    min_score: float = -1e9
    rest_after: int = 0

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted, by whomever."""
        return self.most > 0

    def make(self, k: int, window: int, *, adaptive: bool = True) -> Policy:
        """The numbers for the nodes.

        k         most drafted tokens in one pass
        window    most tokens that a drafter which runs ahead may be ahead of the last verdict
        adaptive  False: the drafter never rests
        """
        k = min(k, self.most)
        return Policy(
            self.name,
            num_speculative_tokens=k,
            launch_min=min(k, self.launch_min),
            window=window if self.runs_ahead else k,
            # What comes beyond those that start a pass cannot be used before the next verdict.
            group=k if self.runs_ahead else 1,
            min_score=self.min_score,
            rest_after=self.rest_after if adaptive else 0,
        )


TABLE = (
    Row("ar", "target alone", most=0),
    Row(
        "sync",
        "draft K, wait for the verdict",
        "Leviathan et al., 2211.17192; Chen et al., 2302.01318",
    ),
    # Two drafts to start with, and e^-3, were measured best (docs/LOG.md). Where going on alone
    # promises more than to wait for the two, the target does not wait.
    Row(
        "pipelined",
        "draft on while the target verifies",
        "PEARL, 2408.11850; AMUSD, 2410.17375",
        launch_min=2,
        runs_ahead=True,
        min_score=-3.0,
        rest_after=REST_AFTER,
    ),
)
POLICIES: dict[PolicyName, Row] = {row.name: row for row in TABLE}


def without_drafter(policy: Policy) -> Policy:
    """The same policy for a target that drafts by itself: there is nobody to wait for."""
    return replace(policy, launch_min=0, window=0)
