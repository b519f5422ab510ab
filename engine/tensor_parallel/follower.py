"""A follower rank: loads its part of the model, then executes rank 0's calls."""

import gc
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
    """Load this rank's part, join the other ranks, and execute calls until the channel closes.

    Raises:
        ModelError: the model cannot be used here.
        RankError: communication with the other ranks has failed.
    """
    pin(start.device)
    loaded = load_model(
        start.model,
        revision=start.revision,
        dtype=start.dtype,
        device=start.device,
        rank=following(start),
        max_len=start.max_len,
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
    """Executes rank 0's calls on this rank's part of the model and its newest backend."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._backend: Backend | None = None
        self._why = "has no backend"

    def answer(self, call: Call) -> None:
        """Do this rank's part of a call.

        A ModelError (this backend cannot run the model) is not raised: rank 0 mostly meets it too,
        and makes another backend. Until then this rank has none.

        Raises:
            EngineError: rank 0 calls a backend that could not be made, or has failed, on this rank.
        """
        running.begin()
        try:
            self._answer(call)
        except ModelError as error:
            self._backend, self._why = None, str(error)
        finally:
            running.end()

    def _answer(self, call: Call) -> None:
        """Do this rank's part of a call. Raises ModelError and EngineError."""
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
                # As on rank 0 (`load` in node/loading.py), because all wait for this rank.
                if not is_loading:
                    gc.collect()
                    gc.freeze()
