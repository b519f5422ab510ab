"""The flags of `plan`: what everything costs, and which texts are written."""

from typing import Annotated, get_args

from pydantic import Field

from coordinator.api.config_base import Frozen
from lab.testbeds.shapes import Published
from proto.messages import MAX_SESSIONS

MIN_TOKENS = 64
MODELS: tuple[Published, ...] = get_args(Published)

Milliseconds = Annotated[float, Field(ge=0, le=1e6)]
Duration = Annotated[float, Field(ge=1e-3, le=1e6)]  # milliseconds
Amount = Annotated[float, Field(ge=1, le=1e18)]


class Costs(Frozen):
    """The costs: forwards as given, of a model by its name, or by the roofline; hosts; messages."""

    like: Annotated[
        Published | None,
        Field(
            description="The target has the shape of this model, and a pass takes what reading "
            "its bfloat16 weights or the arithmetic takes, on as many H100 SXM as hold them "
            f"(other devices: --target-bandwidth, --target-flops). {', '.join(MODELS)}."
        ),
    ] = None
    drafter_like: Annotated[
        Published | None,
        Field(
            description="The drafter has the shape of this model. Default with --like: the "
            "smallest of the same family, llama-3.2-1b or qwen3-0.6b."
        ),
    ] = None
    target_ms: Annotated[
        Duration | None, Field(description="A target pass of one row takes so long.")
    ] = None
    draft_ms: Annotated[
        Duration | None, Field(description="A draft step of one row takes so long.")
    ] = None
    verify_ms_per_token: Annotated[
        Milliseconds, Field(description="Each further row of a target pass.")
    ] = 0.0
    draft_ms_per_row: Annotated[
        Milliseconds, Field(description="Each further row of a draft step.")
    ] = 0.0
    hop_ms: Annotated[
        Milliseconds, Field(description="A message from drafter to target, one way.")
    ] = 0.1
    host_us: Annotated[
        Milliseconds, Field(description="On the target's host for each pass, besides the model.")
    ] = 100.0
    draft_host_us: Annotated[
        Milliseconds, Field(description="On the drafter's host for each step, likewise.")
    ] = 50.0
    target_params: Annotated[
        Amount | None, Field(description="Roofline, instead of --target-ms: parameters (8e9).")
    ] = None
    target_bytes: Annotated[
        Amount | None, Field(description="Bytes of its weights. Default: 2 for each parameter.")
    ] = None
    target_bandwidth: Annotated[
        Amount | None, Field(description="Of its memory, bytes a second (3.35e12).")
    ] = None
    target_flops: Annotated[
        Amount | None, Field(description="Its peak, FLOPs a second (9.9e14). Default: no limit.")
    ] = None
    draft_params: Annotated[
        Amount | None, Field(description="Roofline, instead of --draft-ms: as for the target.")
    ] = None
    draft_bytes: Annotated[Amount | None, Field(description="As for the target.")] = None
    draft_bandwidth: Annotated[Amount | None, Field(description="As for the target.")] = None
    draft_flops: Annotated[Amount | None, Field(description="As for the target.")] = None


class Texts(Frozen):
    """The texts: how often drafts are right, how many texts, how long."""

    acceptance: Annotated[
        str,
        Field(
            description="How often the target says the drafter's first choice, its second, and so "
            "on: 0.75,0.12,0.05. After a single number the second has 0.4 of what is left, each "
            "further one 0.25 of that."
        ),
    ] = "0.75"
    trace: Annotated[
        str,
        Field(
            description="A file, instead: what a real pair did, as recorded by "
            "python -m lab.measure.ranks."
        ),
    ] = ""
    num_texts: Annotated[
        int, Field(ge=1, le=MAX_SESSIONS, description="Texts that are written at once.")
    ] = 1
    num_tokens: Annotated[
        int, Field(ge=MIN_TOKENS, le=1 << 16, description="Tokens of each that are rehearsed.")
    ] = 320
