"""What a user can set of a pair and of speculation: the only home of ranges, defaults and help.

The flags of the command line are made of these fields (`coordinator.cli.flags`).
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from coordinator.api.config_base import Frozen, named
from coordinator.api.models.settings import NGRAM as NGRAM
from coordinator.api.models.settings import ModelsConfig
from coordinator.cluster.link import Links, parse_links
from coordinator.launching.devices import num_ranks
from coordinator.text.metrics import Simulated
from proto.errors import ConfigurationError
from proto.messages import (
    MAX_CANDIDATES,
    MAX_NGRAM,
    MAX_SESSIONS,
    MAX_WINDOW,
    Lookup,
    Policy,
    Role,
    Rule,
)
from proto.node_config import MAX_RANKS
from proto.policies import (
    OPTIONS,
    POLICIES,
    TABLE,
    PolicyName,
    as_chain,
    checked_options,
    without_drafter,
)

VerifyName = Literal["coupled", "token", "block"]
Backend = Literal["auto", "fused", "graphs", "compiled", "reference"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

# Rows of every pass in reproducible mode. It must not depend on the policy, or `ar` and `sync`
# would round differently; so it bounds K.
REPRODUCIBLE_ROWS = 16

# Most tokens of a text if nobody says: what a text is must not depend on how much memory was free.
REPRODUCIBLE_LEN = 4096

# Texts at once if nobody says. In reproducible mode every pass has the rows of all lanes, also of
# those without a text: more than one is for whoever has many texts.
NUM_SEQS, REPRODUCIBLE_NUM_SEQS = 8, 1


NumRanks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Milliseconds = Annotated[float, Field(ge=0, le=60_000)]


def _check_links(texts: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    try:
        parse_links(texts)
    except ConfigurationError as error:
        raise ConfigurationError(f"{named('link', info)}: {error}") from error
    return texts


class PairConfig(ModelsConfig):
    """The two models and where they run."""

    target_device: Annotated[
        str,
        Field(
            description="Where the target runs. cuda:0, cpu, cpu:0 (that core) or cpu:0-6 (those); "
            "cuda:0-3 or cpu:0,cpu:1: a part of the model on each. "
            "Default: a GPU each, or both the only one; without a GPU one core for the drafter, "
            "all others for the target."
        ),
    ] = ""  # chosen by `devices.default_devices`
    drafter_device: Annotated[
        str, Field(description="Where the drafter runs. As --target-device.")
    ] = ""
    tensor_parallel_size: Annotated[
        NumRanks,
        Field(
            description="Processes that share the target. They have so many GPUs from the one of "
            "--target-device on, or its cores divided. Default: as many as it names."
        ),
    ] = 1
    drafter_tensor_parallel_size: Annotated[
        NumRanks, Field(description="Processes that share the draft model.")
    ] = 1
    dtype: Annotated[
        Dtype,
        Field(description="Number type. auto (the checkpoint's), float32, bfloat16 or float16."),
    ] = "auto"
    drafter_dtype: Annotated[
        Dtype | Literal["", "fastest"],
        Field(
            description="The drafter's, or fastest: by timing. It does not decide the text. "
            "Default: fastest on a CPU, of a head and on a GPU --dtype."
        ),
    ] = ""
    max_model_len: Annotated[
        Annotated[int, Field(ge=2, le=1 << 20)] | None,
        Field(
            description="Most tokens of prompt and answer; the cache is made for it. A drafter "
            "that can take fewer drafts no further; heads in the target's process limit it. "
            "Default: the model's own limit, or what the memory holds; with --reproducible "
            f"{REPRODUCIBLE_LEN}."
        ),
    ] = None
    backend: Annotated[
        Backend,
        Field(
            description="Which forward runs. fused (our own: llama, mistral, qwen2, qwen3), "
            "graphs (the same, of other families the reference, "
            "as CUDA graphs), compiled (the same as one program: faster on a CPU, a minute to "
            "load, needs g++), reference (transformers' own), or auto: fused, on a GPU graphs, "
            "where that agrees with the reference."
        ),
    ] = "auto"
    reproducible: Annotated[
        bool,
        Field(description="Same seed, same text in bfloat16 too. Whatever the policy; slower."),
    ] = False
    max_num_seqs: Annotated[
        Annotated[int, Field(ge=1, le=MAX_SESSIONS)] | None,
        Field(
            description="Most texts at once. Passes read the weights once for all of them. "
            f"Default: {NUM_SEQS}, with --reproducible {REPRODUCIBLE_NUM_SEQS}; at most what fits "
            "into memory."
        ),
    ] = None
    start_timeout_s: Annotated[
        float, Field(gt=0, le=86_400, description="How long the nodes may take to load.")
    ] = 600.0
    drafter_restarts: Annotated[
        int,
        Field(
            ge=0,
            le=6,
            description="How often a drafter that ended is soon started again. If it had "
            "worked, later each time, and then every two minutes; the texts go on meanwhile. "
            "0: never.",
        ),
    ] = 3
    busy_poll_us: Annotated[
        int,
        Field(
            ge=0,
            le=10_000,
            description="Microseconds of polling before a process sleeps. A shorter way for "
            "messages, where each process has a core to burn.",
        ),
    ] = 0
    max_draft_candidates: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_CANDIDATES,
            description="Most tokens that a draft is sampled from. For --verify token and block.",
        ),
    ] = 64
    simulate_target_ms: Annotated[
        Milliseconds,
        Field(description="Simulate another device: a pass of the target takes so long."),
    ] = 0.0
    simulate_target_ms_per_row: Annotated[
        Milliseconds, Field(description="And so much more for each of its rows.")
    ] = 0.0
    simulate_draft_ms: Annotated[
        Milliseconds,
        Field(
            description="Simulate another device: a draft step takes so long. So does a step of "
            "heads in the target's process."
        ),
    ] = 0.0
    simulate_draft_ms_per_row: Annotated[
        Milliseconds, Field(description="And so much more for each of its rows.")
    ] = 0.0
    link: Annotated[
        tuple[str, ...],
        AfterValidator(_check_links),
        Field(
            description="Simulate a link between hosts, in each direction. "
            "drafter:delay=5ms,jitter=1ms,loss=1% (also target:...; bandwidth=100Mbit; reorder "
            "lets messages overtake each other; to-drafter:... or from-drafter:... for one "
            "direction). May be given once for each node or direction."
        ),
    ] = ()
    link_seed: Annotated[
        int, Field(ge=0, description="Of what --link loses and how late each message is.")
    ] = 0

    @property
    def num_seqs(self) -> int:
        """Texts at once, as the nodes are asked for it."""
        default = REPRODUCIBLE_NUM_SEQS if self.reproducible else NUM_SEQS
        return default if self.max_num_seqs is None else self.max_num_seqs

    @property
    def asked_len(self) -> int:
        """Most tokens of a text, as the nodes are asked for it; 0: what is possible."""
        default = REPRODUCIBLE_LEN if self.reproducible else 0
        return default if self.max_model_len is None else self.max_model_len

    @property
    def ranks(self) -> dict[Role, int]:
        """How many processes share each model."""
        return {
            Role.TARGET: num_ranks(self.target_device, self.tensor_parallel_size),
            Role.DRAFTER: num_ranks(self.drafter_device, self.drafter_tensor_parallel_size),
        }

    def check(self) -> None:
        """Raises ConfigurationError if the models cannot be used like this."""
        self.check_heads()
        if self.drafter_is_head and self.ranks[Role.DRAFTER] > 1 and self.has_draft_model:
            raise ConfigurationError(
                f"the drafter, {self.drafter}, is a head, and a head runs in one process; give it "
                "one device"
            )

    @property
    def links(self) -> dict[Role, Links]:
        """The links that are simulated, by the node that they lead to."""
        return parse_links(self.link)

    @property
    def simulated(self) -> Simulated | None:
        """What of the hardware is simulated; None: nothing."""
        simulated = Simulated(
            self.simulate_target_ms,
            self.simulate_target_ms_per_row,
            self.simulate_draft_ms,
            self.simulate_draft_ms_per_row,
            self.link,
            self.link_seed,
        )
        return simulated if simulated.words else None


def _policies() -> str:
    *others, last = (f"{row.name} ({row.summary})" for row in TABLE)
    return f"How drafts are made and verified. {', '.join(others)} or {last}."


def _check_options(options: dict[str, float], info: ValidationInfo) -> dict[str, float]:
    try:
        checked_options(options)
    except ValueError as error:
        raise ConfigurationError(f"{named('policy_option', info)}: {error}") from error
    return options


NgramLen = Annotated[int, Field(ge=1, le=MAX_NGRAM)]


class SpeculationConfig(Frozen):
    """The policy and its numbers."""

    policy: Annotated[PolicyName, Field(description=_policies())] = "auto"
    num_speculative_tokens: Annotated[
        int | None,
        Field(ge=1, le=48, description="K: most drafts in a target pass. Default: by policy."),
    ] = None
    window: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_WINDOW,
            description="Most tokens that the drafter may be ahead. Of the last verdict; default: "
            "by policy.",
        ),
    ] = None
    policy_option: Annotated[
        # Of a number that is none the table of options says more.
        dict[str, Annotated[float, Field(allow_inf_nan=True)]],
        AfterValidator(_check_options),
        Field(description=f"Other numbers of the policy. {', '.join(OPTIONS)}."),
    ] = Field(default_factory=dict)
    adaptive: Annotated[
        bool,
        Field(
            description="Measured prices decide how much is drafted. And verified, and whether "
            "the drafter rests where the target is faster alone (auto, pipelined)."
        ),
    ] = True
    verify: Annotated[
        VerifyName,
        Field(
            description="How drafts are judged. coupled: drafter and target share their noise, and "
            "the seed decides the text. By the ratio of their probabilities: token (Leviathan) or "
            "block (Sun)."
        ),
    ] = "coupled"
    also_ngram: Annotated[
        bool, Field(description="N-gram drafts besides those of the draft model.")
    ] = False
    ngram_max: Annotated[
        NgramLen,
        Field(description="N-gram drafts: most of the last tokens that must match."),
    ] = 4
    ngram_min: Annotated[NgramLen, Field(description="N-gram drafts: and fewest.")] = 2
    reference: Annotated[
        str,
        Field(description="N-gram drafts: a text to copy from. Besides prompt and answer."),
    ] = ""
    remember: Annotated[
        bool,
        Field(
            description="N-gram drafts, and copies of earlier texts. Those that were written with "
            "this setting: the target remembers the latest 262,144 tokens."
        ),
    ] = False

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted; else the target writes alone."""
        return POLICIES[self.policy].drafts

    @property
    def rule(self) -> Rule:
        """How drafts are verified."""
        return Rule[self.verify.upper()]

    @property
    def also_copies(self) -> bool:
        """Whether the target drafts by itself also where there is a draft model."""
        return self.also_ngram or self.remember

    def uses_ngrams(self, pair: PairConfig) -> bool:
        """Whether the target copies what was written before."""
        return self.drafts and (self.also_copies or pair.drafter == NGRAM)

    def lookup(self, reference: tuple[int, ...]) -> Lookup:
        """How it does that, as the target reads it."""
        return Lookup(self.ngram_min, self.ngram_max, reference, self.remember)

    def _drafters(self, pair: PairConfig) -> list[str]:
        """Who would draft, of those that a text may have besides each other."""
        drafters = {
            "also_ngram" if self.also_ngram else NGRAM: self.also_ngram or pair.drafter == NGRAM,
            "heads": pair.home_heads is not None,
            "the drafter": pair.has_draft_model,
        }
        return [name for name, is_used in drafters.items() if is_used]

    def check(self, pair: PairConfig) -> None:
        """Raises ConfigurationError if these settings do not go together, or not with the pair."""
        if self.drafts:
            pair.check()
        self.make(pair)
        several = self._drafters(pair) if self.verify != "coupled" else []
        if len(several) > 1:
            raise ConfigurationError(
                f"{several[0]} beside {several[1]} needs coupled verification, not {self.verify}: "
                "to choose between two drafters would bias the text"
            )
        if self.remember and self.verify != "coupled":
            raise ConfigurationError(
                f"remember needs coupled verification, not {self.verify}: an earlier text of the "
                "same seed had the luck that its copies would be judged by"
            )
        if self.ngram_min > self.ngram_max:
            raise ConfigurationError(
                f"ngram_min is {self.ngram_min}, which is above ngram_max, {self.ngram_max}"
            )
        if self.reference and not self.uses_ngrams(pair):
            raise ConfigurationError(
                "reference is a text for n-gram drafts; choose the drafter ngram, or also_ngram, "
                "and another policy than ar"
            )

    def make(self, pair: PairConfig) -> Policy:
        """The policy as the nodes read it. Raises ConfigurationError.

        Without a drafter's process the target waits for nobody.
        """
        policy = self._policy(reproducible=pair.reproducible)
        if not self.drafts or pair.has_draft_model:
            return policy
        return without_drafter(policy)

    def _policy(self, *, reproducible: bool) -> Policy:
        row = POLICIES[self.policy]
        policy = row.make(
            self.num_speculative_tokens,
            self.window,
            adaptive=self.adaptive,
            options=self.policy_option,
        )
        k = policy.num_speculative_tokens
        if reproducible and k >= REPRODUCIBLE_ROWS:
            raise ConfigurationError(
                f"num_speculative_tokens is {k}; with --reproducible it must be below "
                f"{REPRODUCIBLE_ROWS}, the rows of every pass"
            )
        return policy if self.verify == "coupled" else as_chain(policy)


ALONE = SpeculationConfig(policy="ar")  # nothing is drafted
