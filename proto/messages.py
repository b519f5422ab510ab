"""Every message between coordinator, drafter and target, and the constants that both ends share.

docs/protocol.md describes how they are used. Lengths count tokens of the whole text (prompt
included); `*_hash` is a path hash, which names a whole text (`proto.tree`); durations are
microseconds of the sender's own monotonic clock: times of two clocks are never subtracted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from proto.head_kinds import MAX_LAYERS as MAX_LAYERS
from proto.sampling import GREEDY_BELOW as GREEDY_BELOW
from proto.sampling import OFF as OFF
from proto.sampling import Logprobs as Logprobs
from proto.sampling import SamplingSpec as SamplingSpec

# -- meeting ---------------------------------------------------------------------------------------

# The handshake: the roles, and what each side tells about itself before any work.

PROTOCOL_VERSION = 21


class Role(StrEnum):
    """The role of a node: it drafts tokens or it verifies them."""

    DRAFTER = "drafter"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The facts about a tokenizer in which two nodes must agree.

    digest       hash of the id -> token map; empty without a tokenizer
    file_digest  the same of tokenizer.json alone; empty if the files beside it add no token
    """

    vocab_size: int
    digest: str
    eos_ids: tuple[int, ...]
    file_digest: str = ""

    @property
    def digests(self) -> frozenset[str]:
        """Return the digests of all tokens and of tokenizer.json alone; empty without one."""
        return frozenset((self.digest, self.file_digest)) - {""}

    def is_like(self, other: "Fingerprint") -> bool:
        """True if token ids mean the same to both, but for those that only one of them has.

        That is so if one digest of this tokenizer is one of the other. The tokens that the files
        beside tokenizer.json add come behind all others. Where only they differ, the drafter's
        drafts are wrong at these tokens, and no answer changes: the target decides.
        """
        if not (self.digests or other.digests):
            return self.vocab_size == other.vocab_size
        return bool(self.digests & other.digests)


# How `Hello.home_drafter` ends.
HEADS_AT_HOME, MODEL_AT_HOME = "heads in the same process", "drafter in the same process"


@dataclass(frozen=True, slots=True)
class Hello:
    """Node -> coordinator, once loaded and warm: describes the node, its model and its limits.

    num_lanes   how many texts the node has room for at once
    host        name of the host on which it runs, for people
    backend     which implementation of the forward pass it uses, for people
    simulated_us, simulated_us_per_row  imitated duration of a forward pass, in all and for each
                                        row;
                0: not simulated
    layers      of a drafter that is a head: the target's layers whose features it reads (see
                `Features`)
    hidden_size width of the features: the target's own, or that for which the head was made
    num_layers  number of the target's layers
    home_drafter  of a target with a drafter in its own process: what runs it, for people
    forms       what computes its passes, for people
    bits        of a target whose logits do not depend on drafts, other texts or how a text was
                read: a digest of what decides their bits. "": texts may differ at near ties
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
    home_drafter: str = ""
    forms: str = ""
    bits: str = ""

    @property
    def has_heads(self) -> bool:
        """Return whether heads draft in its process; its texts are no longer than theirs."""
        return self.home_drafter.endswith(HEADS_AT_HOME)


@dataclass(frozen=True, slots=True)
class Welcome:
    """Coordinator -> node: the node is accepted.

    vocab_size  token ids from this number on are never drafted
    source      number of a drafter as a source of drafts, in its drafts and in acks; the second
                drafter's is 2 (see MODEL_SOURCE)
    traced      True: record what the loop does, and send it (`TracePart`)
    tokenizer   of a drafter whose tokenizer is another one than the target's: the target's
                tokenizer.json, packed by zlib; else b""
    """

    vocab_size: int
    source: int
    traced: bool = False
    tokenizer: bytes = b""


# -- policy ----------------------------------------------------------------------------------------

# The numbers that make up a policy (the strategy that says when to draft and when to verify).

MAX_WINDOW = 64
MAX_WIDTH, MAX_BRANCHES = 16, 8


@dataclass(frozen=True, slots=True)
class Policy:
    """Says when to draft, how much, and when to verify; no code depends on the policy's name.

    num_speculative_tokens  most drafted tokens in one target pass (K)
    launch_min  number of drafts at which a pass starts
    launch_accepted  the same after a pass in which all drafts were accepted
    window      most tokens that the drafter may be ahead of the last verdict it applied
    group       drafts that cannot be used before the next verdict are sent in groups of this size
    prices_rows    True: measured costs decide how many drafts a pass verifies
    prices_waits   True: measured costs decide whether the target waits for drafts
    prices_awaited  True: they decide also for how many drafts in a row it waits
    rest_after  number of passes after which the target tries whether decoding without the drafter
                is faster; 0: never
    width       most nodes of the tree that one draft step expands (W)
    branches    number of children, the likeliest, that are kept of each node (R); 1: a chain
    detours     most nodes on one path that are not the first child of their parent
    subtree     True: a pass verifies the likeliest nodes of the tree; False: the best chain alone
    min_score   a draft step is only made if the estimated chance (its natural logarithm) that the
                text reaches one of its nodes is at least this
    """

    name: str
    num_speculative_tokens: int
    launch_min: int
    launch_accepted: int
    window: int
    group: int = 1
    min_score: float = -1e9
    prices_rows: bool = False
    prices_waits: bool = False
    prices_awaited: bool = False
    rest_after: int = 0
    width: int = 1
    branches: int = 1
    detours: int = MAX_WINDOW
    subtree: bool = False

    @property
    def has_drafter(self) -> bool:
        """True if drafts come from a drafter, whose machine has this policy too."""
        return self.window > 0

    @property
    def may_rest(self) -> bool:
        """True if the drafter stops where plain decoding is measured to be faster."""
        return self.rest_after > 0


# -- messages --------------------------------------------------------------------------------------

# Limits that the codec enforces before anything is allocated.
MAX_FRAME_BYTES = 1 << 23
MAX_TOKENIZER_BYTES = 7 << 20
MAX_TEXT_LEN = 1 << 20
MAX_NODES_PER_DRAFT = 256
MAX_TOKENS_PER_VERDICT = 1 << 12
MAX_SESSIONS = 64
MAX_SOURCES = 8
MAX_FEATURE_BYTES = 1 << 22  # in one message
MAX_NGRAM = 16
MAX_REFERENCE_LEN = 1 << 16
MAX_CANDIDATES = 1 << 10
ATTEMPT_BITS = 20  # attempts (see Verdict) after one Open: more than a text can have rejections
SESSION_KEY_BYTES = 16
MAX_BIASES = 4096
MAX_ALLOWED = 1 << 18  # tokens of a text that may have no others
MAX_BANS, MAX_BAN_TOKENS = 1024, 8192
MAX_GRAMMAR_LEN = 1 << 17  # characters
MAX_STOP_IDS = 256
MAX_LOGPROBS = 20  # alternatives for each token
ANY_ID = (1 << 31) - 1  # no token id is greater
MAX_LOGPROB_VALUES = 1 << 17  # in one message
TRACE_RECORD_BYTES, MAX_TRACE_RECORDS = 16, 1 << 15  # of `proto.stopwatch`; most in one message


class FinishReason(StrEnum):
    """Why a text ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class Cause(IntEnum):
    """Why the target started a pass when it did."""

    ALONE = 0  # the policy has no drafter, or no draft could be used (one token was left)
    READY = 1  # enough drafts had arrived, or the drafter had no more to offer
    LATE = 2  # the deadline passed before enough drafts had come
    QUIET = 3  # the drafter has been silent for so long that the target no longer waits for it
    CHEAP = 4  # without drafts more tokens a second were promised, or it joins another text's pass
    RESTING = 5  # plain decoding is measured to be faster: the drafter stops while it is told this


class Hit(IntEnum):
    """Whether the first token of a pass had been drafted and verified, and if not, why."""

    NOBODY = 0  # nobody drafted for this pass
    HIT = 1
    TIMING = 2  # no draft was there when the pass began, or the right one came during it
    CONTENT = 3  # drafts were there, and none was right
    WIDTH = 4  # the right draft was there, and was not verified


class Rule(IntEnum):
    """The rule by which the target judges drafts: coupled, token or block.

    COUPLED  a draft is accepted if the target chooses the same token; both choose with the same
             noise
    TOKEN    by the ratio p/q of the two distributions, one token after the other (2211.17192)
    BLOCK    by the ratio p/q, all drafts of a pass together (2403.10444)
    """

    COUPLED = 0
    TOKEN = 1
    BLOCK = 2


# Who drafted a token (its source): the first drafter, or the target's process: by copying from this
# text or from earlier ones, or with heads on its own hidden states. The others are more drafters.
MODEL_SOURCE, NGRAM_SOURCE, EARLIER_SOURCE, HEADS_SOURCE = 0, 1, 6, 7
OWN_SOURCES = frozenset((NGRAM_SOURCE, EARLIER_SOURCE, HEADS_SOURCE))
COPIES = frozenset((NGRAM_SOURCE, EARLIER_SOURCE))


class FaultCode(StrEnum):
    """What went wrong, for the program; `Fault.detail` explains it to people."""

    GAP = "gap"  # the node's text differs from the coordinator's: the answer is an Open
    REFUSED = "refused"  # the handshake failed
    FAILED = "failed"  # the node, or this text alone, cannot go on; a new attempt might work
    UNUSABLE = "unusable"  # the model or the settings of the node: a user must mend them
    CLOSED = "closed"  # the coordinator ends: a node that was started by hand waits for another
    OUTSIDE = "outside"  # a message was outside of what its text allows, and was dropped


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a text: its greatest length, and the tokens that end it.

    max_len   most tokens of the whole text, prompt included
    stop_ids  tokens that end the text (the token that ends it is part of it)
    """

    max_len: int
    stop_ids: tuple[int, ...]

    def trim(
        self, start_len: int, tokens: Sequence[int]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Cut new tokens at a stop token or at max_len; returns those kept and why the text ends.

        tokens  follow a text of `start_len` tokens

        The reason is None if the text goes on. A stop token on the last allowed position counts as
        a stop.
        """
        allowed = tuple(tokens[: self.max_len - start_len])
        for index, token in enumerate(allowed):
            if token in self.stop_ids:
                return allowed[: index + 1], FinishReason.STOP
        done = start_len + len(allowed) >= self.max_len
        return allowed, FinishReason.LENGTH if done else None

    def max_drafts(self, length: int) -> int:
        """Return how many drafts are useful after `length` tokens (the target adds one token)."""
        return max(0, self.max_len - length - 1)


@dataclass(frozen=True, slots=True)
class Lookup:
    """Makes the target draft by copying what followed its last tokens earlier (n-gram lookup).

    The search is in engine/layout/ngram.py.

    ngram_min, ngram_max  how many of the last tokens must occur earlier; the most are tried first
    reference             token ids of a text to copy from, besides the text that is being written
    remember              copy from earlier texts as well (layout/earlier.py), and keep this one for
                          later ones; only under the rule COUPLED
    """

    ngram_min: int
    ngram_max: int
    reference: tuple[int, ...] = ()
    remember: bool = False


@dataclass(frozen=True, slots=True)
class Open:
    """Coordinator -> node: the whole text so far; it starts, restarts or repairs a session.

    incarnation  grows with every Open of the session, to whichever node; an older Open is ignored
    rule         greedy texts are always COUPLED: there all three rules accept a draft if it is
                 equal
    attempt      classical rules: number at which drafting begins or goes on (see Verdict)
    key          of the keyed hash that makes the path hashes
    tokens       the committed text
    num_prompt   how many of its tokens are the prompt (prefilled in chunks under every policy)
    lookup       for the target: it also drafts by copying; beside a drafter only if COUPLED
    layers       for the target: the layers whose `Features` it sends; empty: no drafter wants any
    num_ids      token ids from this number on are no tokens: the target has no logits for them
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
    num_ids: int = ANY_ID


@dataclass(frozen=True, slots=True)
class Proposal:
    """The distribution from which a drafted token was sampled: `ids` ascending, `probs` float32.

    Both ends divide by the sum of `probs`, so that they compute the same numbers to the last bit.
    """

    ids: tuple[int, ...]
    probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafter -> coordinator -> target: drafted tokens, as nodes of the speculation tree.

    first_number..number  the draft numbers that this message stands for (one, unless sent again)
    parent_hash, parent_len  hash and length of the path below which nodes with `parents[i] == -1`
                             hang
    parents   index of the node's parent within this message, or -1; parents come first
    scores    natural log of the estimated chance that the target chooses the token, given its path
    done      True: this is all that the drafter has below this parent, its root, or will have
    num_steps, model_us  draft forward passes since the last draft, and the time they took
    attempt   classical rules: copied from the last Verdict; drafts of another attempt are not
              judged
    proposals  classical rules: one for each token; else none
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
    """Tells the drafter that its drafts up to `number` of this source and incarnation came."""

    source: int
    incarnation: int
    number: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Target -> coordinator -> drafter: the result of a pass; `tokens` are committed after a base.

    base_len, base_hash        the text before `tokens`: its length and its path hash
    num_drafted, num_accepted  drafted tokens in the pass; those of them that are in `tokens`
    rejected                   the first drafted token that was not accepted, and those after it
    logprobs                   of `tokens`, if the session asked for them
    num_rolled_back            nodes of the target's tree that died by this verdict
    num_stale                  drafted tokens that came too late or did not fit, since the last
                               verdict
    wait_us, model_us, host_us time spent waiting for drafts, in the model, and else on the host
    drafter_us                 time in the drafter's model, by the drafts since the last verdict
    attempt                    classical rules: drafts of an earlier attempt are never accepted; a
                               new one begins after a rejection
    sources                    who drafted each accepted token; empty if source 0 drafted them all
    hit                        whether the first token had been drafted
    plain_us                   what a pass of these texts without drafts takes, as far as is known
    num_awaited                drafts in a row below these tokens with which the next pass starts:
                               fewer are of no use to it unless it goes on without them
    least_chance               the models take turns, as the target computes on the drafter's core
                               too: the drafter expands no node that is less likely, tells when it
                               is done, and drafts nothing during the next pass; 0: it drafts on
    """

    session: int
    incarnation: int
    base_len: int
    base_hash: int
    tokens: tuple[int, ...]
    acks: tuple[Ack, ...]
    cause: Cause
    num_drafted: int = 0
    num_accepted: int = 0
    num_rolled_back: int = 0
    num_stale: int = 0
    wait_us: int = 0
    model_us: int = 0
    host_us: int = 0
    drafter_us: int = 0
    rejected: tuple[int, ...] = ()
    attempt: int = 0
    logprobs: Logprobs | None = None
    sources: tuple[int, ...] = ()
    hit: Hit = Hit.NOBODY
    plain_us: int = 0
    num_awaited: int = 0
    least_chance: float = 0.0


@dataclass(frozen=True, slots=True)
class Features:
    """Target -> coordinator -> drafter: hidden states of the target, which a head reads.

    The feature of a token is the target's hidden state in the row that read it, in the layers that
    `Open` names, side by side. The message has features for the last `num_rows` tokens of a path,
    and each is the feature of the token *before*: it belongs to the row that chose the path's last
    token, to the row before that, and so on. The message is sent ahead of the verdict that has the
    tokens.

    end_len, end_hash  the path: its length and its hash
    num_rows           how many of its last tokens have a feature here
    dtype              type of the numbers, by torch's name
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


BROKEN_OFF = "failed"  # the reason (`Close.reason`) if a session ends before its text is complete


@dataclass(frozen=True, slots=True)
class Close:
    """Coordinator -> node: the session is over."""

    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class SessionMark:
    """States how far the sender's copy of a session has come: its length and path hash.

    incarnation  from a node: its own; from the coordinator: that of the newest Open to that node
    num_read     from a node: how many of these tokens its cache holds; 0: from the coordinator, and
                 from a drafter with other tokens
    """

    session: int
    incarnation: int
    length: int
    path_hash: int
    num_read: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent both ways as a sign of life; `progress` counts finished forwards, `state` is for people.

    times_us        of a node: time in each phase of its loop so far (`proto.stopwatch.Phase`),
                    while no device was at work beside it
    beside_us       of a node: the same while a device was at work
    num_uncaptured  of a node: decode passes so far that no captured CUDA graph had room for
    num_overruns    of a node: forward passes so far that took longer than the device that is
                    simulated
    late_us         of a node: by how much, all of them together
    stamp_us        of the coordinator: the time at which it was sent; of a node: the latest such
                    time that it received
    held_us         of a node: how long ago it received that
    clock_us        of a node: its own clock when this was sent, the clock of its `TracePart`s
    pass_rows       of a node: rows of the forward pass that is under way; 0: there is none
    pass_us         of a node: for how long that pass has been under way
    pass_expected_us  of a node: how long such a pass usually takes there; 0: it is not known
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
    pass_rows: int = 0
    pass_us: int = 0
    pass_expected_us: int = 0


@dataclass(frozen=True, slots=True)
class TracePart:
    """Node -> coordinator, with each heartbeat of a node that is traced: what its loop did.

    number       1 for the first part, and so on, so that a lost part is noticed
    num_dropped  records so far that there was no room for; those dropped since the last part would
                 stand after the records of this one
    records      in order of time; `proto.stopwatch.records_of` reads them
    """

    number: int
    num_dropped: int
    records: bytes


@dataclass(frozen=True, slots=True)
class Fault:
    """Sent both ways: something is wrong with `session` (0: with the node itself).

    incarnation  of the text at the sender; with the code OUTSIDE, that of the dropped message
    """

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
