"""The settings of a pair of models and of speculation, with their ranges, defaults and help.

The flags of the command line are made of these fields (`coordinator.cli.flags`).
"""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from coordinator.api.config_base import Frozen, called, named
from coordinator.api.models.heads import kind_of
from coordinator.api.models.settings import NGRAM as NGRAM
from coordinator.api.models.settings import ModelsConfig
from coordinator.cluster.link import Links, parse_links
from coordinator.launching.devices import num_ranks, shares
from coordinator.text.metrics import Simulated
from proto.errors import ConfigurationError
from proto.head_kinds import HeadKind
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
from proto.node_config import MAX_RANKS, Placement
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
Backend = Literal["auto", "fused", "graphs", "reference"]
Quantization = Literal["int8", "int4"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

# Rows (token positions) of every pass in reproducible mode. The number must not depend on the
# policy, or `ar` and `sync` would round differently; so it bounds K, the drafts of a pass.
REPRODUCIBLE_ROWS = 16

# Default for the most tokens of a text in reproducible mode, where a text must not depend on how
# much memory was free.
REPRODUCIBLE_LEN = 4096

# Defaults for the number of texts at once. In reproducible mode every pass has the rows of all
# lanes (a lane is one text's part of the cache), even of empty ones, so more than one lane helps
# only with many texts.
NUM_SEQS, REPRODUCIBLE_NUM_SEQS = 8, 1


NumRanks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Milliseconds = Annotated[float, Field(ge=0, le=60_000)]


def _check_links(texts: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    try:
        parse_links(texts)
    except ConfigurationError as error:
        raise ConfigurationError(f"{named('link', info)}: {error}") from error
    return texts


def _refuse_compiled(name: object, info: ValidationInfo) -> object:
    if name == "compiled":
        raise ConfigurationError(
            f"{named('backend', info)}: compiled is gone, because fused is as fast on CPUs; leave "
            "it out"
        )
    return name


class PairConfig(ModelsConfig):
    """Settings of the two models: where and how they run, and what hardware is simulated."""

    target_device: Annotated[
        str,
        Field(
            description="Where the target runs.\n"
            "cuda:0: that GPU. cpu: all cores. cpu:0, cpu:0-6: these cores.\n"
            "cuda:0-3 or cpu:0,cpu:1: these devices share the model.\n"
            "Default: each model has a GPU, or both share the only one. Without a GPU the "
            "drafter gets one core, and the target gets as many of the cores as make it "
            "fastest (see --placement)."
        ),
    ] = ""  # chosen by `devices.default_devices`
    drafter_device: Annotated[
        str,
        Field(description="Where the drafter runs. It is written as for --target-device."),
    ] = ""
    placement: Annotated[
        Placement,
        Field(
            description="Which CPU cores the target uses beside a drafter. Only without a GPU, and "
            "without --target-device and --drafter-device.\n"
            "apart: all but the drafter's. shared: also the drafter's.\n"
            "auto: whichever makes more tokens a second; it is measured again and again.\n"
            "Texts without drafts may use all cores."
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        NumRanks,
        Field(
            description="How many processes share the target. They run on that many GPUs, "
            "counted from --target-device, or divide its cores. Default: one for "
            "each device in --target-device."
        ),
    ] = 1
    drafter_tensor_parallel_size: Annotated[
        NumRanks,
        Field(
            description="How many processes share the drafter. Default: one for each device in "
            "--drafter-device."
        ),
    ] = 1
    dtype: Annotated[
        Dtype,
        Field(
            description="The models' number type. float32, bfloat16, float16, or auto: that of "
            "the checkpoint."
        ),
    ] = "auto"
    drafter_dtype: Annotated[
        Dtype | Literal["", "fastest"],
        Field(
            description="The drafter's number type. A value of --dtype, or fastest: that of the "
            "checkpoint or float32, whichever is faster by timing. Default: fastest on a CPU; "
            "--dtype on a GPU and for a head."
        ),
    ] = ""
    quantization: Annotated[
        Quantization | None,
        Field(
            description="Round the target's weights to 8 or 4 bits at load. For "
            "plain checkpoints of llama, mistral, qwen2 and qwen3 on CPUs: a pass then reads "
            "fewer bytes. The text is that of the rounded weights. int8, int4."
        ),
    ] = None
    drafter_quantization: Annotated[
        Quantization | None,
        Field(
            description="The same for the drafter's weights. Default: they are not rounded, but "
            "those of a head on a CPU to 4 bits, unless --drafter-dtype is given."
        ),
    ] = None
    max_model_len: Annotated[
        Annotated[int, Field(ge=2, le=1 << 20)] | None,
        Field(
            description="The most tokens of prompt and answer together. The cache is made for "
            "this length. A drafter with a shorter limit stops drafting there; heads "
            "in the target's process lower the limit to theirs. Default: the model's "
            "own limit, or what fits into memory; with --reproducible "
            f"{REPRODUCIBLE_LEN}. A model with factors for long texts (longrope) uses them "
            "if this is beyond its original length, which is its default."
        ),
    ] = None
    backend: Annotated[
        Backend,
        BeforeValidator(_refuse_compiled),
        Field(
            description="Which forward pass runs the models.\n"
            "fused: our own, for llama, mistral, qwen2 and qwen3.\n"
            "graphs: fused as CUDA graphs; for other families, reference as CUDA "
            "graphs.\n"
            "reference: that of transformers.\n"
            "auto: graphs on a GPU, else fused, if its results agree with reference."
        ),
    ] = "auto"
    reproducible: Annotated[
        bool,
        Field(
            description="The same seed gives the same text in every number type. This holds for "
            "every policy, and costs speed where the target is not exact (see status)."
        ),
    ] = False
    max_num_seqs: Annotated[
        Annotated[int, Field(ge=1, le=MAX_SESSIONS)] | None,
        Field(
            description="The most texts that are written at once at a target. A pass reads the "
            f"weights once for all of them. Default: {NUM_SEQS}, or {REPRODUCIBLE_NUM_SEQS} with "
            "--reproducible; fewer if memory is short."
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        Annotated[float, Field(gt=0, le=1)] | None,
        Field(
            description="The share of a device's memory for weights and cache. For example 0.9. "
            "On a CPU it is a share of the machine's memory. If both models are on one device, it "
            "is for both together. Default: as much as leaves room for other programs."
        ),
    ] = None
    start_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            le=86_400,
            description="How long the nodes may load without telling anything new. A node that "
            "reads weights tells how much it has read.",
        ),
    ] = 600.0
    target_restarts: Annotated[
        int,
        Field(
            ge=0,
            le=6,
            description="How many restarts in a row a target gets. It is started again after it "
            "has ended or has been silent for 15 s. Texts wait and go on with the same tokens. "
            "After these restarts everything ends. 0: everything ends at once.",
        ),
    ] = 3
    drafter_restarts: Annotated[
        int,
        Field(
            ge=0,
            le=6,
            description="How many quick restarts a drafter gets after it has ended. The texts "
            "continue meanwhile, and the wait before each restart grows. After these restarts "
            "a drafter that had worked is started again every two minutes. 0: never.",
        ),
    ] = 3
    busy_poll_us: Annotated[
        int,
        Field(
            ge=0,
            le=10_000,
            description="How long a process polls before it sleeps. Polling makes messages "
            "faster, but keeps a core busy for each process.",
        ),
    ] = 0
    keep_speeds: Annotated[
        bool,
        Field(
            description="Keep for later runs whether drafts pay on this machine. Texts of the "
            "same models then begin in the faster way: with the drafter or alone. "
            "--no-keep-speeds: they begin with the drafter, and nothing is kept.",
        ),
    ] = True
    max_draft_candidates: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_CANDIDATES,
            description="The most tokens from which a draft is sampled. Only --verify token "
            "and block use this.",
        ),
    ] = 64
    simulate_target_ms: Annotated[
        Milliseconds,
        Field(
            description="Simulate another device for the target. Each of its passes then takes "
            "at least this long."
        ),
    ] = 0.0
    simulate_target_ms_per_row: Annotated[
        Milliseconds,
        Field(
            description="Simulate a longer target pass for more rows. Each row of a pass adds "
            "this time."
        ),
    ] = 0.0
    simulate_draft_ms: Annotated[
        Milliseconds,
        Field(
            description="Simulate another device for the drafter. Each draft step then takes at "
            "least this long, also a step of heads in the target's process."
        ),
    ] = 0.0
    simulate_draft_ms_per_row: Annotated[
        Milliseconds,
        Field(
            description="Simulate a longer draft step for more rows. Each row of a step adds "
            "this time."
        ),
    ] = 0.0
    link: Annotated[
        tuple[str, ...],
        AfterValidator(_check_links),
        Field(
            description="Simulate a slow or lossy link to a node. For example\n"
            "drafter:delay=5ms,jitter=1ms,loss=1%\n"
            "Other settings are bandwidth=100Mbit and reorder (messages may overtake "
            "each other). For the link to the target, write target: in the place of "
            "drafter:. To slow one direction only, write to-drafter: or from-drafter:. May be "
            "given once for each node or direction."
        ),
    ] = ()
    link_seed: Annotated[
        int,
        Field(
            ge=0,
            description="Seed of the random numbers of --link. They decide which messages are "
            "lost and how late the others are.",
        ),
    ] = 0

    @model_validator(mode="after")
    def _placement_is_free(self) -> Self:
        """Refuse a placement where something else decides it."""
        if self.placement == "auto":
            return self
        if self.target_device or self.drafter_device:
            raise ConfigurationError(
                f"{called('placement')} is for default devices; leave it out, or name no device"
            )
        if self.has_several:
            raise ConfigurationError(
                f"{called('placement')} is for one target and one drafter; leave it out"
            )
        if self.reproducible and self.placement == "shared":
            raise ConfigurationError(
                f"{called('placement')} shared goes not with {called('reproducible')}, which has "
                "fixed cores; leave one out"
            )
        return self

    @property
    def num_seqs(self) -> int:
        """Return how many texts at once the nodes are asked to make room for."""
        default = REPRODUCIBLE_NUM_SEQS if self.reproducible else NUM_SEQS
        return default if self.max_num_seqs is None else self.max_num_seqs

    @property
    def asked_len(self) -> int:
        """Return the most tokens of a text that the nodes are asked for; 0: as many as possible."""
        default = REPRODUCIBLE_LEN if self.reproducible else 0
        return default if self.max_model_len is None else self.max_model_len

    @property
    def ranks(self) -> dict[Role, int]:
        """Return how many processes share each model, by role."""
        return {
            Role.TARGET: num_ranks(self._first(Role.TARGET), self.tensor_parallel_size),
            Role.DRAFTER: num_ranks(self._first(Role.DRAFTER), self.drafter_tensor_parallel_size),
        }

    def _first(self, role: Role) -> str:
        """Return the device of the first node of this role. Raises ConfigurationError."""
        is_target = role is Role.TARGET
        name, number = (
            (self.target_device, self.targets)
            if is_target
            else (self.drafter_device, self.drafters)
        )
        return shares(role, name, number)[0]

    def check(self) -> None:
        """Raise ConfigurationError if the models cannot be used with these settings."""
        self.check_heads()
        is_none = self.drafter == NGRAM and not self.heads
        kind = self.drafter_head
        if self.drafter == NGRAM and self.heads:
            kind = kind_of(self.heads, self.heads_revision)
        stays = {
            HeadKind.MEDUSA: "a Medusa head",
            HeadKind.MTP: "a layer of the target",
            HeadKind.DFLASH: "a DFlash head",
        }
        if self.drafter_quantization and (is_none or kind in stays):
            what = "none" if is_none or kind is None else stays[kind]
            raise ConfigurationError(
                f"{called('drafter_quantization')} is for a draft model or an EAGLE head, and the "
                f"drafter is {what}; leave it out"
            )
        if self.drafter_is_head and self.ranks[Role.DRAFTER] > 1 and self.has_draft_process:
            raise ConfigurationError(
                f"the drafter, {self.drafter}, is a head, and a head runs in one process; give it "
                "one device"
            )

    @property
    def links(self) -> dict[Role, Links]:
        """Return the simulated links, by the role of the node at their end."""
        return parse_links(self.link)

    @property
    def simulated(self) -> Simulated | None:
        """Return the simulated hardware; None if nothing is simulated."""
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
    return "\n".join(
        ("How drafts are made and verified.", *(f"{row.name}: {row.summary}." for row in TABLE))
    )


def _check_options(options: dict[str, float], info: ValidationInfo) -> dict[str, float]:
    try:
        checked_options(options)
    except ValueError as error:
        raise ConfigurationError(f"{named('policy_option', info)}: {error}") from error
    return options


NgramLen = Annotated[int, Field(ge=1, le=MAX_NGRAM)]


class SpeculationConfig(Frozen):
    """Settings of speculation: policy, number of drafts, verification, n-gram drafts."""

    policy: Annotated[PolicyName, Field(description=_policies())] = "auto"
    num_speculative_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            le=48,
            description="K: the most drafts in one target pass. Default: the policy decides.",
        ),
    ] = None
    window: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_WINDOW,
            description="How far the drafter may run ahead. The most tokens beyond the last "
            "verdict of the target. Default: the policy decides.",
        ),
    ] = None
    policy_option: Annotated[
        # NaN and infinity pass here: `_check_options` has the better error message.
        dict[str, Annotated[float, Field(allow_inf_nan=True)]],
        AfterValidator(_check_options),
        Field(
            description=f"Set other numbers of the policy. Their names are {', '.join(OPTIONS)}. "
            "The file proto/policies.py explains them."
        ),
    ] = Field(default_factory=dict)
    adaptive: Annotated[
        bool,
        Field(
            description="Decide by measured costs how much is drafted. The costs also decide how "
            "many drafts are verified and, under auto and pipelined, whether the drafter rests "
            "while the target is faster alone."
        ),
    ] = True
    verify: Annotated[
        VerifyName,
        Field(
            description="The rule by which drafts are accepted.\n"
            "coupled: drafter and target sample with the same noise, and the seed "
            "decides the text.\n"
            "token, block: by the ratio of the two models' probabilities (Leviathan "
            "et al.; Sun et al.)."
        ),
    ] = "coupled"
    also_ngram: Annotated[
        bool,
        Field(
            description="Add n-gram drafts to those of the draft model. The target copies what "
            "followed its last tokens earlier in the text."
        ),
    ] = False
    ngram_max: Annotated[
        NgramLen,
        Field(
            description="N-gram drafts: the most tokens that must match. The target looks for "
            "its last tokens earlier in the text, for the longest match first."
        ),
    ] = 4
    ngram_min: Annotated[
        NgramLen, Field(description="N-gram drafts: the fewest tokens that must match.")
    ] = 2
    reference: Annotated[
        str,
        Field(
            description="N-gram drafts: a file to copy from. It is searched besides prompt and "
            "answer."
        ),
    ] = ""
    remember: Annotated[
        bool,
        Field(
            description="N-gram drafts that also copy from earlier texts. The target remembers "
            "the last 262,144 tokens of the texts that were written with this "
            "setting."
        ),
    ] = False

    @property
    def drafts(self) -> bool:
        """True if tokens are drafted; False if the target decodes alone."""
        return POLICIES[self.policy].drafts

    @property
    def rule(self) -> Rule:
        """Return the rule by which drafts are verified."""
        return Rule[self.verify.upper()]

    @property
    def also_copies(self) -> bool:
        """True if the target drafts n-grams or earlier text besides the draft model."""
        return self.also_ngram or self.remember

    def uses_ngrams(self, pair: PairConfig) -> bool:
        """True if the target drafts by copying from earlier tokens."""
        return self.drafts and (self.also_copies or pair.drafter == NGRAM)

    def lookup(self, reference: tuple[int, ...]) -> Lookup:
        """Return the settings of n-gram drafts; `reference`: tokens to copy from as well."""
        return Lookup(self.ngram_min, self.ngram_max, reference, self.remember)

    def _drafters(self, pair: PairConfig) -> list[str]:
        """Return the names of the drafters in use that only coupled drafting may combine."""
        drafters = {
            called("also_ngram") if self.also_ngram else NGRAM: (
                self.also_ngram or pair.drafter == NGRAM
            ),
            called("heads") if pair.heads else "heads": (
                pair.home_drafter is not None and not pair.has_default_heads
            ),
            "the drafter": pair.has_draft_process,
        }
        return [name for name, is_used in drafters.items() if is_used]

    @property
    def needs_one_tokenizer(self) -> str:
        """Return the line that refuses a classical rule for a drafter with another tokenizer.

        Such rules compare the chances that both models give to one token.
        """
        rule = f"{called('verify')} {self.verify}"
        return f"{rule} needs a drafter with the target's tokenizer; use coupled"

    def check(self, pair: PairConfig) -> None:
        """Raise ConfigurationError if these settings contradict each other or the pair's."""
        if self.drafts:
            pair.check()
        self.make(pair)
        several = self._drafters(pair) if self.verify != "coupled" else []
        if len(several) > 1:
            raise ConfigurationError(
                f"{several[0]} beside {several[1]} needs coupled verification, not {self.verify}: "
                "to choose between two drafters would bias the text"
            )
        if self.drafts and self.verify != "coupled" and pair.drafts_in_other_words:
            raise ConfigurationError(self.needs_one_tokenizer)
        if self.remember and self.verify != "coupled":
            raise ConfigurationError(
                f"{called('remember')} needs coupled verification, not {self.verify}: copies of "
                "earlier texts would bias the text"
            )
        if self.ngram_min > self.ngram_max:
            raise ConfigurationError(
                f"{called('ngram_min')} is {self.ngram_min}, which is above "
                f"{called('ngram_max')}, {self.ngram_max}"
            )
        if self.reference and not self.uses_ngrams(pair):
            raise ConfigurationError(
                f"{called('reference')} is a text for n-gram drafts; choose the drafter ngram or "
                f"{called('also_ngram')}, and not the policy ar"
            )

    def make(self, pair: PairConfig) -> Policy:
        """Return the policy in the form that the nodes read. Raises ConfigurationError.

        Without a drafter process the policy has no drafter, so the target waits for no drafts.
        """
        policy = self._policy(reproducible=pair.reproducible)
        if not self.drafts or pair.has_draft_process:
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
                f"{called('num_speculative_tokens')} is {k}; with {called('reproducible')} it must "
                f"be below {REPRODUCIBLE_ROWS}, the rows of every pass"
            )
        return policy if self.verify == "coupled" else as_chain(policy)


ALONE = SpeculationConfig(policy="ar")  # plain decoding, without drafts
