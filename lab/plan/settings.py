"""The flags of `plan`: what everything costs, and which texts are written."""

from typing import Annotated, get_args

from pydantic import Field

from coordinator.api.config_base import Frozen
from lab.testbeds.shapes import Published
from proto.messages import MAX_SESSIONS

MIN_TOKENS = 64
USUAL_ACCEPTANCE = "0.75"
USUAL_HOP_MS, USUAL_HOST_US, USUAL_DRAFT_HOST_US = 0.1, 100.0, 50.0
MODELS: tuple[Published, ...] = get_args(Published)

Milliseconds = Annotated[float, Field(ge=0, le=1e6)]
Duration = Annotated[float, Field(ge=1e-3, le=1e6)]  # milliseconds
Amount = Annotated[float, Field(ge=1, le=1e18)]


class Costs(Frozen):
    """The costs: forwards as given, of a model by its name, or by the roofline; hosts; messages."""

    pair: Annotated[
        str,
        Field(
            description="Take costs and acceptance from what `measure` has written. "
            "Other flags replace single values of it: for example --hop-ms 5 says what a slower "
            "link would change.",
            json_schema_extra={"metavar": "FILE"},
        ),
    ] = ""
    like: Annotated[
        Published | None,
        Field(
            description="The target has the shape of this model.\n"
            f"{', '.join(MODELS)}.\n"
            "A pass takes the time to read the bfloat16 weights, or the time of the arithmetic if "
            "that is longer. The number of H100 SXM is the smallest power of two that holds the "
            "weights. For other devices set --target-bandwidth and --target-flops."
        ),
    ] = None
    drafter_like: Annotated[
        Published | None,
        Field(
            description="The drafter has the shape of this model. Default with --like: the "
            "smallest model of the family, llama-3.2-1b or qwen3-0.6b."
        ),
    ] = None
    target_ms: Annotated[
        Duration | None, Field(description="How long a target pass of one row takes.")
    ] = None
    draft_ms: Annotated[
        Duration | None, Field(description="How long a draft step of one row takes.")
    ] = None
    verify_ms_per_token: Annotated[
        Milliseconds, Field(description="How much each further row adds to a target pass.")
    ] = 0.0
    draft_ms_per_row: Annotated[
        Milliseconds, Field(description="How much each further row adds to a draft step.")
    ] = 0.0
    hop_ms: Annotated[
        Milliseconds | None,
        Field(
            description="How long a message between the nodes takes. It is the time from drafter "
            f"to target, one way. Default: as in --pair, or {USUAL_HOP_MS:g}."
        ),
    ] = None
    host_us: Annotated[
        Milliseconds | None,
        Field(
            description="Time of the target's host for each pass. The time of the model is not "
            f"part of it. Default: as in --pair, or {USUAL_HOST_US:g}."
        ),
    ] = None
    draft_host_us: Annotated[
        Milliseconds | None,
        Field(
            description="Time of the drafter's host for each draft step. The time of the model "
            f"is not part of it. Default: as in --pair, or {USUAL_DRAFT_HOST_US:g}."
        ),
    ] = None
    target_params: Annotated[
        Amount | None,
        Field(
            description="The target's number of parameters, such as 8e9. With --target-bandwidth "
            "it replaces --target-ms (roofline)."
        ),
    ] = None
    target_bytes: Annotated[
        Amount | None,
        Field(description="Bytes of the target's weights. Default: 2 for each parameter."),
    ] = None
    target_bandwidth: Annotated[
        Amount | None,
        Field(
            description="Memory bandwidth of the target's device, bytes a second. For example "
            "3.35e12."
        ),
    ] = None
    target_flops: Annotated[
        Amount | None,
        Field(
            description="Peak speed of the target's device, FLOPs a second. For example 9.9e14. "
            "Default: no limit."
        ),
    ] = None
    draft_params: Annotated[
        Amount | None,
        Field(
            description="The drafter's number of parameters, such as 5e8. With --draft-bandwidth "
            "it replaces --draft-ms (roofline)."
        ),
    ] = None
    draft_bytes: Annotated[
        Amount | None,
        Field(description="Bytes of the drafter's weights. Default: 2 for each parameter."),
    ] = None
    draft_bandwidth: Annotated[
        Amount | None,
        Field(
            description="Memory bandwidth of the drafter's device, bytes a second. For example "
            "3.35e12."
        ),
    ] = None
    draft_flops: Annotated[
        Amount | None,
        Field(
            description="Peak speed of the drafter's device, FLOPs a second. For example 9.9e14. "
            "Default: no limit."
        ),
    ] = None


class Texts(Frozen):
    """The texts: how often drafts are right, how many texts, how long."""

    acceptance: Annotated[
        str | None,
        Field(
            description="How often the drafter's first choice is the target's token. The same for "
            "its second choice, its third and so on may follow: 0.75,0.12,0.05. After a single "
            "number, the second choice gets 0.4 of the remaining probability, and each further "
            'choice 0.25 of what then remains. This is not the "% of drafts accepted" that '
            "`generate` shows; `measure` measures it. "
            f"Default: as in --pair, or {USUAL_ACCEPTANCE}.",
            json_schema_extra={"metavar": "SHARE,..."},
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Field(
            ge=0.0,
            le=2.0,
            description="Which texts of --pair: those of the nearest temperature. Default: 0.",
        ),
    ] = None
    trace: Annotated[
        str,
        Field(
            description="Take the acceptance of a real pair from this file. It is one that "
            "`experiment --predict` has recorded, such as results/NAME/ranks-0.jsonl. The file "
            "replaces --acceptance.",
            json_schema_extra={"metavar": "FILE"},
        ),
    ] = ""
    num_texts: Annotated[
        int, Field(ge=1, le=MAX_SESSIONS, description="How many texts are written at once.")
    ] = 1
    num_tokens: Annotated[
        int,
        Field(ge=MIN_TOKENS, le=1 << 16, description="How many tokens of each text are rehearsed."),
    ] = 320
