"""Slipstream for programs in any folder: the Python API and the command.

    from slipstream import LLM, SamplingParams

This package finds the others where they are: beside it in a checkout, inside it where a wheel was
installed (docs/adr/0001). `import slipstream` alone takes no other name. Each name of the API is
imported when it is first used; from then on `proto` and `coordinator` are ours in this process.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from slipstream.finding import claim_names

if TYPE_CHECKING:
    from coordinator import (
        LLM,
        AsyncEngineArgs,
        AsyncLLM,
        AsyncLLMEngine,
        CompletionOutput,
        Counter,
        EngineArgs,
        Gauge,
        Histogram,
        Logprob,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
        Vector,
    )
    from proto.errors import (
        AwayError,
        BusyError,
        ClosedError,
        ConfigurationError,
        IncompatibleError,
        ModelError,
        NodeError,
        SlipstreamError,
        TransportError,
    )

__version__ = "0.1.0"  # the one place: the build and the nodes' hosts read it; the lab has the same

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "AwayError",
    "BusyError",
    "ClosedError",
    "CompletionOutput",
    "ConfigurationError",
    "Counter",
    "EngineArgs",
    "Gauge",
    "Histogram",
    "IncompatibleError",
    "Logprob",
    "ModelError",
    "NodeError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SlipstreamError",
    "StructuredOutputsParams",
    "TransportError",
    "Vector",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    claim_names()
    from proto.installation import COORDINATOR, refusal

    line = refusal("", COORDINATOR)
    if line:
        raise ImportError(line)
    home = "proto.errors" if name.endswith("Error") else "coordinator"
    return getattr(import_module(home), name)
