"""The events and actions of a `Session` (pure). Events are facts, actions are imperatives."""

from dataclasses import dataclass, replace

from coordinator.text.watching import DeviceSpan
from proto.messages import (
    ANY_ID,
    Draft,
    Fault,
    FinishReason,
    Logprobs,
    Message,
    PromptLogprobs,
    Role,
    Verdict,
)

NodeId = bytes  # names one node process; a process that is started anew has another


@dataclass(frozen=True, slots=True)
class Started:
    """The text begins. Nodes that are not there yet are told of it when they join.

    layers  layers of the target whose hidden states (features) a drafter will read (`Open.layers`)
    num_ids  number of the target's logits (`Open.num_ids`)
    """

    layers: tuple[int, ...] = ()
    num_ids: int = ANY_ID


@dataclass(frozen=True, slots=True)
class VerdictArrived:
    """A verdict of the target has arrived: the result of a pass."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class DraftArrived:
    """A drafter's draft for a text that is watched has come; it was passed on already."""

    draft: Draft


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The target has sent the logprobs of a part of the prompt."""

    message: PromptLogprobs


@dataclass(frozen=True, slots=True)
class FaultArrived:
    """A node reports that its copy of the text is not ours, or that it cannot go on."""

    node: NodeId
    fault: Fault


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node is ready to work on this text.

    layers  for a drafter that is a head: layers of the target whose hidden states it reads
    """

    node: NodeId
    role: Role
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node that worked on this text is gone."""

    node: NodeId
    role: Role


@dataclass(frozen=True, slots=True)
class RoundTripMeasured:
    """The time that a message to this node and its answer need was measured."""

    node: NodeId
    seconds: float


@dataclass(frozen=True, slots=True)
class Progressed:
    """The target works, as its heartbeat says: a pass has ended, or one is under way.

    num_read  tokens of the text that its cache holds
    """

    num_read: int = 0


@dataclass(frozen=True, slots=True)
class Overran:
    """A pass of the target takes far longer than is expected there; `words` say how long."""

    words: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent at regular intervals."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message to a node."""

    node: NodeId
    message: Message


@dataclass(frozen=True, slots=True)
class Emit:
    """Give the reader the new tokens of one target pass.

    The first `num_accepted` tokens were drafted. One more token, if there is one, is the target's
    own: the recovered token in the place of rejected[0], a bonus after only accepted drafts, or a
    plain token of a pass without drafts. Tokens of lost verdicts that the target sends again come
    as several plain ones. `logprobs` belong to the tokens, if they are wanted. `sources` says who
    drafted each accepted token; it is empty if the drafter drafted all. `spans` says what both
    devices did since the last Emit, if the text is watched.
    """

    tokens: tuple[int, ...]
    num_accepted: int
    num_drafted: int
    rejected: tuple[int, ...]
    logprobs: Logprobs | None = None
    sources: tuple[int, ...] = ()
    spans: tuple[DeviceSpan, ...] = ()

    def first(self, num_tokens: int) -> "Emit":
        """Return an Emit of the first `num_tokens` tokens only."""
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
    """Give the reader the logprobs of the prompt from its second token on, before any Emit."""

    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class EmitRead:
    """Tell the reader how far the target has read the prompt, which takes it a while."""

    num_read: int
    num_prompt: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The text is complete; `reason` says why it ended."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    """The text cannot be completed; `detail` says why."""

    detail: str


Event = (
    Started
    | VerdictArrived
    | DraftArrived
    | PromptScored
    | FaultArrived
    | NodeJoined
    | NodeLost
    | RoundTripMeasured
    | Progressed
    | Overran
    | Tick
)
Action = Send | Emit | EmitPrompt | EmitRead | Finish | Fail
