"""The messages, and the rules that both ends must share. docs/protocol.md tells their story.

Lengths count tokens of the whole text (prompt included); `*_hash` is a path hash (`proto.tree`);
durations are microseconds of the sender's own monotonic clock: two clocks are never subtracted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from proto.sampling import GREEDY_BELOW as GREEDY_BELOW
from proto.sampling import OFF as OFF
from proto.sampling import Logprobs as Logprobs
from proto.sampling import SamplingSpec as SamplingSpec

# -- meeting ---------------------------------------------------------------------------------------

# How nodes and coordinator meet: the roles, and what each says of itself before any work.

PROTOCOL_VERSION = 14


class Role(StrEnum):
    """What a node does."""

    DRAFTER = "drafter"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What two tokenizers must agree on. `digest` is empty for a model without a tokenizer."""

    vocab_size: int
    digest: str
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hello:
    """Node -> coordinator, once loaded and warm: who I am and what I can do.

    num_lanes  texts that the node has room for at once
    host       where it runs, for people
    backend    which forward runs there, for people
    simulated_us, simulated_us_per_row  of its forwards, as on another device; 0: not simulated
    layers      a drafter that is a head: whose features it reads (see `Features`)
    hidden_size how wide they are: the target's own, or those that a head was made for
    num_layers  of the target
    heads       a target with heads of its own: their kind, for people
    """

    version: int
    role: Role
    secret: str
    fingerprint: Fingerprint
    logits_size: int
    max_model_len: int
    model: str
    dtype: str
    device: str
    num_parameters: int
    load_us: int
    num_lanes: int
    host: str = ""
    backend: str = ""
    simulated_us: int = 0
    simulated_us_per_row: int = 0
    layers: tuple[int, ...] = ()
    hidden_size: int = 0
    num_layers: int = 0
    heads: str = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Coordinator -> node: you are in.

    vocab_size  token ids from here on are never drafted
    source      in a drafter's drafts and their acks; the second drafter's is 2 (see MODEL_SOURCE)
    traced      record what the loop does, and say it (`TracePart`)
    """

    vocab_size: int
    source: int
    traced: bool = False


# -- policy ----------------------------------------------------------------------------------------

# The numbers that a policy is.

MAX_WINDOW = 64
MAX_WIDTH, MAX_BRANCHES = 16, 8


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy is a setting of these numbers (`proto.policies`); no code asks for its name.

    num_speculative_tokens  most drafted tokens in one target pass (K)
    launch_min, launch_hit  drafts at which a pass starts; and after one that accepted all it had
    window                  most tokens that the drafter may be ahead of the last verdict it applied
    group                   drafts that cannot be used before a verdict are sent so many at a time
    rest_after              passes after which the target tries whether it is faster alone; 0: never
    width                   nodes that one draft step expands at most (W)
    branches                children that are kept of each, the likeliest (R); 1: a chain
    detours                 children on a path that are not the first of theirs, at most
    subtree                 a pass verifies the likeliest nodes, and not the best chain alone
    min_score               least estimated chance (natural logarithm) that the text comes to one of
                            the nodes of a draft step
    """

    name: str
    num_speculative_tokens: int
    launch_min: int
    launch_hit: int
    window: int
    group: int = 1
    min_score: float = -1e9
    rest_after: int = 0
    width: int = 1
    branches: int = 1
    detours: int = MAX_WINDOW
    subtree: bool = False

    @property
    def has_drafter(self) -> bool:
        """Whether drafts come from another process."""
        return self.window > 0

    @property
    def is_priced(self) -> bool:
        """Whether prices decide what pays: rows, waits, the drafter as a whole."""
        return self.rest_after > 0

    @property
    def prices_waits(self) -> bool:
        """Whether the target decides each time how many drafts in a row it waits for."""
        return self.is_priced and self.branches > 1


# -- messages --------------------------------------------------------------------------------------

# Limits that the codec enforces before anything is allocated.
MAX_FRAME_BYTES = 1 << 23
MAX_TEXT_LEN = 1 << 20
MAX_NODES_PER_DRAFT = 256
MAX_TOKENS_PER_VERDICT = 1 << 12
MAX_SESSIONS = 64
MAX_SOURCES = 8
MAX_LAYERS = 8  # of which features are wanted
MAX_FEATURE_BYTES = 1 << 22  # in one message
MAX_NGRAM = 16
MAX_REFERENCE_LEN = 1 << 16
MAX_CANDIDATES = 1 << 10
ATTEMPT_BITS = 20  # attempts of one life of the target: more than a text has rejections
SESSION_KEY_BYTES = 16
MAX_BIASES = 4096
MAX_BANS, MAX_BAN_TOKENS = 1024, 8192
MAX_STOP_IDS = 256
MAX_LOGPROBS = 20  # alternatives per token
MAX_LOGPROB_VALUES = 1 << 17  # in one message
TRACE_RECORD_BYTES, MAX_TRACE_RECORDS = 16, 1 << 15  # see `proto.stopwatch`; in one message


class FinishReason(StrEnum):
    """Why a text ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class Cause(IntEnum):
    """Why the target started a pass when it did."""

    ALONE = 0  # the policy has no drafter, or no draft could be used (one token was left)
    READY = 1  # enough drafts had come, or the drafter had no more to offer
    LATE = 2  # the deadline passed before enough drafts had come
    QUIET = 3  # the drafter has been silent for so long that it is not waited for
    CHEAP = 4  # to go on alone promised more than to wait for drafts
    RESTING = 5  # the target is faster alone, as measured: the drafter rests while it reads this


class Hit(IntEnum):
    """Whether the first token that a pass made had been drafted, and if not, why."""

    NOBODY = 0  # drafted for this pass
    HIT = 1
    TIMING = 2  # nothing was there when the pass began, or the right one came during it
    CONTENT = 3  # drafts were there, and none was right
    WIDTH = 4  # the right one was there and not verified


class Rule(IntEnum):
    """How drafts are verified.

    COUPLED  a draft is right if the target chooses it; both choose with the same noise
    TOKEN    by the ratio of the two distributions, one token after the other (2211.17192)
    BLOCK    by the ratio, a whole block at once (2403.10444)
    """

    COUPLED = 0
    TOKEN = 1
    BLOCK = 2


# Who drafted a token: the first drafter, or the target by itself, from what was written before in
# this text or in earlier ones, or by heads on its own features.
MODEL_SOURCE, NGRAM_SOURCE, EARLIER_SOURCE, HEADS_SOURCE = 0, 1, 6, 7
OWN_SOURCES = frozenset((NGRAM_SOURCE, EARLIER_SOURCE, HEADS_SOURCE))
COPIES = frozenset((NGRAM_SOURCE, EARLIER_SOURCE))


class FaultCode(StrEnum):
    """What went wrong, for the program; `Fault.detail` says it to people."""

    GAP = "gap"  # the node's text is not the coordinator's: answer with Open
    REFUSED = "refused"  # the handshake failed
    FAILED = "failed"  # the node, or this text alone, cannot go on; another time it might
    UNUSABLE = "unusable"  # its model or its settings: a user must mend them
    CLOSED = "closed"  # the coordinator ends: a node that was started by hand waits for another


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a text ends.

    max_len   most tokens of the whole text
    stop_ids  tokens that end the text (they are part of it)
    """

    max_len: int
    stop_ids: tuple[int, ...]

    def trim(
        self, start_len: int, tokens: Sequence[int]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Cut `tokens`, which follow a text of `start_len`, at the first of stop token and length.

        A stop token on the last allowed position is a stop.
        """
        allowed = tuple(tokens[: self.max_len - start_len])
        for index, token in enumerate(allowed):
            if token in self.stop_ids:
                return allowed[: index + 1], FinishReason.STOP
        done = start_len + len(allowed) >= self.max_len
        return allowed, FinishReason.LENGTH if done else None

    def max_drafts(self, length: int) -> int:
        """Most drafts worth having after a text of `length`: the target adds one token itself."""
        return max(0, self.max_len - length - 1)


@dataclass(frozen=True, slots=True)
class Lookup:
    """The target drafts what followed its last tokens before (engine/layout/ngram.py).

    ngram_min, ngram_max  how many of the last tokens must have been there, the most first
    reference             a text to copy from, besides the one that is written
    remember              copy from earlier texts as well (layout/earlier.py), and keep this one
                          for later ones; only if COUPLED
    """

    ngram_min: int
    ngram_max: int
    reference: tuple[int, ...] = ()
    remember: bool = False


@dataclass(frozen=True, slots=True)
class Open:
    """Coordinator -> node: this is the text now. First start, restart and repair are the same.

    incarnation  grows with every Open of the session, to whichever node; older lives are ignored
    rule         greedy texts are always COUPLED: all three are equality there
    attempt      classical rules: at which drafting begins or goes on (see Verdict)
    key          of the path hashes
    tokens       the committed text
    num_prompt   how many of them are the prompt (prefilled in chunks whatever the policy)
    lookup       for the target: it drafts by itself as well; with a drafter only if COUPLED
    layers       for the target: of which it hands out `Features`; none: a drafter wants none
    """

    session: int
    incarnation: int
    key: bytes
    tokens: tuple[int, ...]
    num_prompt: int
    sampling: SamplingSpec
    policy: Policy
    limits: Limits
    rule: Rule = Rule.COUPLED
    attempt: int = 0
    lookup: Lookup | None = None
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Proposal:
    """The distribution that a drafted token was sampled from: `ids` ascending, `probs` float32.

    Both ends divide by the sum of `probs`, so that they mean the same to the last bit.
    """

    ids: tuple[int, ...]
    probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafter -> coordinator -> target: nodes of the speculation tree.

    first_number..number  the draft numbers that this message stands for (one, unless sent again)
    parent_hash, parent_len  the path that `parents[i] == -1` hangs on
    parents   index of the parent within this message, or -1; parents come first
    scores    natural log of the estimated chance that the target chooses the token, given its path
    done      it holds all that the drafter has below this parent, its root, or will have
    num_steps, model_us  forwards since the last draft, and what they took
    attempt   the drafter's, which it has from a Verdict: drafts of another one are not judged
    proposals  one per token for the classical rules; else none
    """

    session: int
    incarnation: int
    source: int
    first_number: int
    number: int
    parent_hash: int
    parent_len: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    done: bool
    model_us: int
    num_steps: int = 0
    attempt: int = 0
    proposals: tuple[Proposal, ...] = ()


@dataclass(frozen=True, slots=True)
class Ack:
    """Every draft of this life of this source up to `number` has arrived."""

    source: int
    incarnation: int
    number: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Target -> coordinator -> drafter: the text goes on with `tokens` after the base.

    num_drafted, num_accepted  drafted tokens in the pass; those of them that are in `tokens`
    rejected                   the first drafted token that was not accepted, and those after it
    logprobs                   of `tokens`, if the session asked for them
    num_rolled_back            tree nodes of the target that died by this verdict
    num_stale                  drafted tokens that came too late or did not fit, since the last one
    wait_us, model_us, host_us waiting for drafts, in the model, and on the host besides
    drafter_us                 in the drafter's model, by the drafts that came since the last one
    attempt                    classical rules: drafts of an earlier one are worth nothing
    sources                    of the accepted drafts, one each; none if all are source 0's
    hit                        what became of the first token
    plain_us                   what a pass of these texts without drafts takes, as far as is known
    """

    session: int
    incarnation: int
    base_len: int
    base_hash: int
    tokens: tuple[int, ...]
    acks: tuple[Ack, ...]
    cause: Cause
    num_drafted: int
    num_accepted: int
    num_rolled_back: int
    num_stale: int
    wait_us: int
    model_us: int
    host_us: int
    drafter_us: int = 0
    rejected: tuple[int, ...] = ()
    attempt: int = 0
    logprobs: Logprobs | None = None
    sources: tuple[int, ...] = ()
    hit: Hit = Hit.NOBODY
    plain_us: int = 0


@dataclass(frozen=True, slots=True)
class Features:
    """Target -> coordinator -> drafter: what a drafter that is a head reads beside the tokens.

    The feature of a token is the target's hidden state where it was read, in the layers that `Open`
    names, side by side. Told are those *before* the last tokens of a path: where its last token was
    chosen, where the one before was, and so on. They come ahead of the verdict that has the tokens.

    end_len, end_hash  the path: its length and its hash
    num_rows           so many of its last tokens
    dtype              of the numbers, as torch calls it
    data               [num_rows, width of all layers], row by row, little-endian
    """

    session: int
    incarnation: int
    end_len: int
    end_hash: int
    num_rows: int
    dtype: str
    data: bytes


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Target -> coordinator: logprobs of the prompt's tokens from position `start` (>= 1) on."""

    session: int
    incarnation: int
    start: int
    logprobs: Logprobs


BROKEN_OFF = "failed"  # why a session is over that came to no end of its own


@dataclass(frozen=True, slots=True)
class Close:
    """Coordinator -> node: the session is over."""

    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class SessionMark:
    """How far a session is at the sender.

    incarnation  of a node: its own; of the coordinator: of the newest Open to whom it is told
    """

    session: int
    incarnation: int
    length: int
    path_hash: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Both ways: I am alive; `progress` counts finished forwards, `state` is for people.

    times_us        of a node: in each phase of its loop so far (`proto.stopwatch.Phase`), while no
                    device was at work beside it
    beside_us       of a node: the same while one was
    num_uncaptured  of a node: decode passes so far that no captured graph had room for
    num_overruns    of a node: forwards so far that took longer than the device that is simulated
    late_us         of a node: by how much, all of them together
    stamp_us        of the coordinator: when it was sent; of a node: the latest that has come
    held_us         of a node: how long ago that came
    clock_us        of a node: its own clock when this was sent, the clock of its `TracePart`s
    """

    marks: tuple[SessionMark, ...]
    progress: int
    state: str
    times_us: tuple[int, ...] = ()
    beside_us: tuple[int, ...] = ()
    num_uncaptured: int = 0
    num_overruns: int = 0
    late_us: int = 0
    stamp_us: int = 0
    held_us: int = 0
    clock_us: int = 0


@dataclass(frozen=True, slots=True)
class TracePart:
    """Node -> coordinator, with each beat of a node that is traced: what its loop did.

    number       1 for the first part, and so on: a lost one shows
    num_dropped  records so far that there was no room for; those of a part are missing behind it
    records      as `proto.stopwatch.records_of` reads them, in the order of time
    """

    number: int
    num_dropped: int
    records: bytes


@dataclass(frozen=True, slots=True)
class Fault:
    """Both ways: something is wrong with `session` (0: with the node)."""

    session: int
    incarnation: int
    code: FaultCode
    detail: str


Message = (
    Open
    | Draft
    | Verdict
    | Close
    | Hello
    | Welcome
    | Heartbeat
    | Fault
    | Features
    | PromptLogprobs
    | TracePart
)
