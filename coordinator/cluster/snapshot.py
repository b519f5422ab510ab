"""The present state of a coordinator, its nodes and its texts, for the command `status` (pure).

A snapshot has only numbers about a text, never its tokens. Every list and every string has a limit,
so a snapshot is always small.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from coordinator.cluster.node import Node
from coordinator.cluster.open_text import SessionNodes
from coordinator.cluster.routing import Router
from coordinator.text.timed_session import Result
from proto.errors import ClosedError, SlipstreamError, printable
from proto.messages import Role

# -- tally -----------------------------------------------------------------------------------------

# Counts of what has happened since the coordinator started.

MAX_CAUSES = 16
OTHERS = "other causes"
# The causes of refusals. One node makes several connections, and tries again.
NO_KEY = "a connection without a key that is known here (one node makes several)"
NAME_IN_USE = "a second process under a name that is in use"
OTHER_NAME = "a node that has another node's key"


@dataclass(slots=True)
class Tally:
    """Counts of the texts, restarts and refusals of one coordinator since its start.

    restarts  processes that were started to replace one that had ended, by role
    refusals  peers that were refused, by the reason that they were told: at most MAX_CAUSES reasons
    """

    num_complete: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    restarts: Counter[Role] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def ended(self, last: Result | SlipstreamError) -> None:
        """Count a text that has ended with this result or error."""
        if isinstance(last, Result):
            self.num_complete += 1
        elif isinstance(last, ClosedError):
            self.num_cancelled += 1
        else:
            self.num_failed += 1

    def restarted(self, role: Role) -> None:
        """Count a node of this role that is started again."""
        self.restarts[role] += 1

    def refused(self, cause: str, number: int = 1) -> None:
        """Count peers that were refused for this reason."""
        if cause not in self.refusals and len(self.refusals) >= MAX_CAUSES - 1:
            cause = OTHERS
        self.refusals[cause] += number


def ending_of(last: Result | SlipstreamError) -> str:
    """Return how a text has ended, for the log, without any part of its content."""
    if isinstance(last, Result):
        metrics = last.metrics
        return (
            f"complete ({last.reason}): {metrics.num_tokens} tokens after a prompt of "
            f"{metrics.num_prompt_tokens}, in {metrics.elapsed_s:.2f} s"
        )
    if last.__cause__ is not None:  # an unexpected error's message may contain parts of the text
        return f"failed by a mistake of the coordinator ({type(last.__cause__).__name__})"
    return f"ended: {last}"


# -- snapshot --------------------------------------------------------------------------------------

FORM = 1  # raised when a field changes its meaning or goes
MAX_LISTED = 64  # texts, and nodes
MAX_CHARS = 200


@dataclass(frozen=True, slots=True)
class NodeState:
    """The state of one node process.

    health      starting, ready, silent or gone
    doing       what the node says it is doing
    texts       number of texts that it works on; at most max_texts
    forwards    number of forward passes that it has finished
    pass_rows   rows of the pass that it is in; 0: it is in none
    pass_s, pass_expected_s  for how long it is in that pass, and how long such a pass usually takes
    bad_frames  frames from it that were dropped: not decodable, or outside of their text
    ready_s     seconds since it was ready; None: it never was
    silent_s    seconds since its last message
    forms       what computes its passes
    is_exact    a target's logits do not depend on drafts, other texts or how a text was read, so
                that its texts are the same in every number type; None: it is no target
    round_trip_ms, round_trip_at_start_ms  time of a message to it and back; None: not known yet
    """

    role: str
    name: str
    health: str
    doing: str
    host: str
    device: str
    backend: str
    dtype: str
    model: str
    pid: int | None
    texts: int
    max_texts: int
    forwards: int
    pass_rows: int
    pass_s: float
    pass_expected_s: float
    bad_frames: int
    ready_s: float | None
    silent_s: float
    round_trip_ms: float | None
    round_trip_at_start_ms: float | None
    forms: str
    is_exact: bool | None


@dataclass(frozen=True, slots=True)
class TextState:
    """The state of a text that is being generated.

    number            the text's number, as in the coordinator's log
    prompt_read       tokens of the prompt that the target has read
    max_tokens        most tokens that it may get after the prompt
    acceptance_rate   accepted / verified drafts; None: there were no drafts
    without_drafter   its policy has a drafter, but no drafter works on it now
    target            the target that writes it; "": none does now
    """

    number: int
    prompt_tokens: int
    prompt_read: int
    tokens: int
    max_tokens: int
    running_s: float
    tokens_per_s: float
    policy: str
    acceptance_rate: float | None
    without_drafter: bool
    target: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a coordinator, with its nodes and texts.

    texts     texts that are being generated: at most MAX_LISTED, the oldest first
    open      number of texts that are being generated
    queued    number of texts that wait for a lane (room for a text) on the target
    restarts  processes that have replaced another one, by role
    refusals  peers that were refused, by the reason that they were told
    """

    form: int
    nodes: tuple[NodeState, ...]
    texts: tuple[TextState, ...]
    open: int
    queued: int
    complete: int
    cancelled: int
    failed: int
    restarts: dict[str, int]
    refusals: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Return the snapshot as a dict for JSON."""
        return asdict(self)


def taken(router: Router, tally: Tally, pids: dict[str, int], now: float) -> Snapshot:
    """Return a snapshot of the present state; `pids`: process ids by the names of processes."""
    texts = router.open_texts
    return Snapshot(
        form=FORM,
        nodes=tuple(
            _node(node, texts, pids.get(node.id.decode(errors="replace")), now)
            for node in router.registry.nodes[:MAX_LISTED]
        ),
        texts=tuple(_text(text, now) for text in texts[:MAX_LISTED]),
        open=len(texts),
        queued=router.num_queued,
        complete=tally.num_complete,
        cancelled=tally.num_cancelled,
        failed=tally.num_failed,
        restarts={
            str(role): number for role, number in (tally.restarts + router.successors).items()
        },
        refusals={_cut(cause): number for cause, number in tally.refusals.items()},
    )


def _node(node: Node, texts: tuple[SessionNodes, ...], pid: int | None, now: float) -> NodeState:
    hello, trips = node.hello, node.round_trips
    health = "starting" if node.health.name == "EXPECTED" else node.health.name.lower()
    return NodeState(
        role=str(node.role),
        name=_cut(node.id.decode(errors="replace")),
        health=health,
        doing=_cut(node.state),
        host=_cut(hello.host) if hello else "",
        device=_cut(hello.device) if hello else "",
        backend=_cut(hello.backend) if hello else "",
        dtype=_cut(hello.dtype) if hello else "",
        model=_cut(hello.model) if hello else "",
        pid=None if health == "gone" else pid,
        texts=sum(node.id in text.workers(node.role) for text in texts),
        max_texts=node.num_lanes,
        forwards=node.progress + node.num_forwards_before,
        pass_rows=node.under_way.num_rows,
        pass_s=_rounded(node.under_way.took_s),
        pass_expected_s=_rounded(node.under_way.expected_s),
        bad_frames=node.num_bad_frames,
        ready_s=None if node.ready_at is None else _rounded(now - node.ready_at),
        silent_s=_rounded(node.detector.silence_s(now)),
        round_trip_ms=_ms(trips.now_s),
        round_trip_at_start_ms=_ms(trips.at_start_s),
        forms=_cut(hello.forms) if hello else "",
        is_exact=bool(hello.bits) if hello and node.role is Role.TARGET else None,
    )


def _text(text: SessionNodes, now: float) -> TextState:
    timed, machine = text.timed, text.timed.machine
    running_s = max(0.0, now - timed.started)
    counts = machine.counts
    return TextState(
        number=number_of(machine.session),
        prompt_tokens=machine.num_prompt,
        prompt_read=machine.num_prompt_read,
        tokens=machine.num_generated,
        max_tokens=machine.limits.max_len - machine.num_prompt,
        running_s=_rounded(running_s),
        tokens_per_s=_rounded(machine.num_generated / running_s) if running_s > 0 else 0.0,
        policy=_cut(machine.policy.name),
        acceptance_rate=(
            _rounded(counts.num_accepted / counts.num_drafted) if counts.num_drafted else None
        ),
        without_drafter=machine.policy.has_drafter and not text.drafters,
        target=_cut("".join(one.decode(errors="replace") for one in text.targets)),
    )


def number_of(session: int) -> int:
    """Return the number of a text among those of its coordinator, for people: 1, 2 ..."""
    return session & 0xFFFFFFFF


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else _rounded(seconds * 1e3)


def _rounded(number: float) -> float:
    return round(number, 3)


def _cut(words: str) -> str:
    """Return one printable line, at most MAX_CHARS long, of what a peer says of itself."""
    line = printable(words)
    return line if len(line) <= MAX_CHARS else line[: MAX_CHARS - 1] + "…"
