"""What the machine of a text is told, and what it asks for (pure). Events are facts, actions
imperatives.
"""

from dataclasses import dataclass, replace

from proto.messages import Fault, FinishReason, Logprobs, Message, PromptLogprobs, Role, Verdict

NodeId = bytes  # names one node process; a process that is started anew has another


@dataclass(frozen=True, slots=True)
class Started:
    """Begin. Nodes that are not there yet are told when they join.

    layers  whose features a drafter reads that will be told of the text (`Open.layers`)
    """

    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VerdictArrived:
    """The target has spoken."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The target has read a part of the prompt whose logprobs are wanted."""

    message: PromptLogprobs


@dataclass(frozen=True, slots=True)
class FaultArrived:
    """A node says that its text is not ours, or that it cannot go on."""

    node: NodeId
    fault: Fault


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node is ready to work on this text.

    layers  a drafter that is a head: whose features it reads
    """

    node: NodeId
    role: Role
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone."""

    node: NodeId
    role: Role


@dataclass(frozen=True, slots=True)
class RoundTripMeasured:
    """So long takes a message to this node, and its answer back."""

    node: NodeId
    seconds: float


@dataclass(frozen=True, slots=True)
class Progressed:
    """The target has finished a forward (heard in a heartbeat)."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send to a node."""

    node: NodeId
    message: Message


@dataclass(frozen=True, slots=True)
class Emit:
    """New tokens of the text, of one target pass.

    The first `num_accepted` were drafted; one more, if there is one, is the target's own: the
    recovered token in the place of rejected[0], a bonus after only accepted drafts, or plain. What
    had been missed and is said again comes as several plain ones. `logprobs` of the tokens, if they
    are wanted. `sources` says who drafted the accepted ones; none if all are the drafter's.
    """

    tokens: tuple[int, ...]
    num_accepted: int
    num_drafted: int
    rejected: tuple[int, ...]
    logprobs: Logprobs | None = None
    sources: tuple[int, ...] = ()

    def first(self, num_tokens: int) -> "Emit":
        """The part of it that these tokens are."""
        if num_tokens >= len(self.tokens):
            return self
        return replace(
            self,
            tokens=self.tokens[:num_tokens],
            num_accepted=min(self.num_accepted, num_tokens),
            logprobs=self.logprobs and self.logprobs.part(0, num_tokens),
            sources=self.sources[:num_tokens],
        )


@dataclass(frozen=True, slots=True)
class EmitPrompt:
    """The logprobs of the prompt from its second token on, before any Emit."""

    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class Finish:
    """The text is complete."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    """The text cannot be completed."""

    detail: str


Event = (
    Started
    | VerdictArrived
    | PromptScored
    | FaultArrived
    | NodeJoined
    | NodeLost
    | RoundTripMeasured
    | Progressed
    | Tick
)
Action = Send | Emit | EmitPrompt | Finish | Fail
