"""Make a backend with its cache by name, on all ranks of a model."""

from functools import partial

from engine.checkpoint.files import one_line
from engine.checkpoint.model import LoadedModel
from engine.choice.coupling_on_gpu import capture_on
from engine.choice.logit_graphs import Captures
from engine.errors import kind_of
from engine.forward import graphs
from engine.forward.forward import Backend, HuggingFaceBackend, Layers
from engine.forward.fused import FusedBackend
from engine.forward.graphs import GraphBackend
from engine.layout.slots import LaneLayout
from engine.tensor_parallel.backend import LeadingBackend
from engine.tensor_parallel.calls import MakeBackend


def make_backend(
    name: str, loaded: LoadedModel, lanes: LaneLayout, row_counts: tuple[int, ...], layers: Layers
) -> Backend:
    """Make a backend with its cache; on rank 0 of several, on all ranks. Return it.

    name                reference, fused or graphs
    row_counts, layers  the numbers of rows and the layers' hidden states for which it makes
                        graphs, as for `ModelExecutor`

    Raises:
        ModelError: the backend cannot run the model, or its cache does not fit into memory.
    """
    make = partial(_make_backend, name, loaded, lanes, row_counts, layers)
    if loaded.rank is None or loaded.rank.followers is None:
        return make()
    call = MakeBackend(name, lanes, row_counts, layers)
    return LeadingBackend(loaded.rank.followers, loaded.rank, loaded.device, call, make)


def _make_backend(
    name: str, loaded: LoadedModel, lanes: LaneLayout, row_counts: tuple[int, ...], layers: Layers
) -> Backend:
    """Make and return a backend in this process only. Raises ModelError as `make_backend`."""
    assert name in ("fused", "graphs", "reference")
    if loaded.device.type in graphs.RECORDED_DEVICES:
        # Pad choices to the same numbers of rows as recordings do, without recording any; this also
        # drops the recordings of a backend that was tried before.
        capture_on(loaded.device, Captures(None, row_counts) if row_counts else None)
    try:
        if name == "graphs":
            return GraphBackend(loaded, lanes, row_counts, layers)
        if name == "fused":
            return FusedBackend(loaded, lanes)
        return HuggingFaceBackend(loaded, lanes)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
    ) as error:
        raise kind_of(error)(
            f"{loaded.name}: no cache of {lanes.total} slots on {loaded.device} "
            f"({one_line(error)}); try a shorter maximum length, or another model"
        ) from error
