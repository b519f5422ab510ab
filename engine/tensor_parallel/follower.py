"""A rank that follows: it loads its part of the model, and does what rank 0 tells it."""

from multiprocessing.connection import Connection

import torch

from engine import running
from engine.checkpoint.model import LoadedModel, load_model
from engine.device import free_bytes, pin
from engine.errors import EngineError, ModelError
from engine.fastest import usual_num_threads
from engine.forward.backends import make_backend
from engine.forward.forward import Backend
from engine.tensor_parallel.calls import (
    Call,
    Chain,
    CopySlots,
    FindFree,
    FindNotFinite,
    Forward,
    Loading,
    MakeBackend,
    MoveSlots,
    Plain,
    Start,
    TakeOver,
    WipeSlots,
)
from engine.tensor_parallel.group import following, meet
from engine.tensor_parallel.split import lowest


def follow(start: Start, channel: Connection) -> None:
    """Load, meet the others, and follow until rank 0 closes the channel.

    Raises:
        ModelError: the model cannot be used here.
        RankError: the others have gone another way.
    """
    pin(start.device)
    loaded = load_model(
        start.model,
        revision=start.revision,
        dtype=start.dtype,
        device=start.device,
        rank=following(start),
    )
    if loaded.device.type == "cpu":
        torch.set_num_threads(usual_num_threads(loaded))
    meet(start.store, start.rank, start.num_ranks, loaded.device)
    follower = FollowerRank(loaded)
    while True:
        try:
            call: Call = channel.recv()
        except EOFError:
            return
        follower.answer(call)


class FollowerRank:
    """The part of a loaded model, and the backend that rank 0 has made last."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._backend: Backend | None = None
        self._why = "has no backend"

    def answer(self, call: Call) -> None:
        """Do this rank's part of a call.

        What rank 0 can mend, by another backend, it has met as well: it is no error here.

        Raises EngineError: only this rank has met it.
        """
        running.begin()
        try:
            self._answer(call)
        except ModelError as error:
            self._why = str(error)
        finally:
            running.end()

    def _answer(self, call: Call) -> None:
        match call:
            case Plain(ids):
                with torch.inference_mode():
                    there = torch.from_numpy(ids).to(self._loaded.device)
                    self._loaded.model(there, use_cache=False)
                return
            case FindFree():
                assert self._loaded.rank is not None
                lowest(free_bytes(self._loaded.device), self._loaded.rank, self._loaded.device)
                return
            case MakeBackend(name, lanes, row_counts, layers):
                self._backend = None  # the next one needs the memory
                self._backend = make_backend(name, self._loaded, lanes, row_counts, layers)
                return
        if self._backend is None:
            raise EngineError(self._why)
        match call:
            case Forward(rows, spans, num_visible, keep, layers):
                self._backend.forward(
                    torch.from_numpy(rows),
                    spans,
                    num_visible=num_visible,
                    keep=None if keep is None else torch.from_numpy(keep),
                    layers=layers,
                )
            case Chain(steps, num_visible, choice):
                self._backend.chain(torch.from_numpy(steps), num_visible=num_visible, choice=choice)
            case MoveSlots(sources, targets):
                self._backend.move(sources, targets)
            case CopySlots(source, target, length):
                self._backend.copy(source, target, length)
            case WipeSlots(first, length):
                self._backend.wipe(first, length)
            case FindNotFinite(first, length):
                assert self._loaded.rank is not None
                found = self._backend.not_finite(first, length)
                lowest(found, self._loaded.rank, self._loaded.device)
            case TakeOver(timed):
                self._backend.take_over(timed=timed)
            case Loading(is_loading):
                self._backend.is_loading = is_loading
