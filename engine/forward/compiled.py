"""The compiled backend, for CPUs: the fused forward as one program, made by torch.compile at load.

The whole pass (norms, rotary embedding, attention, products) becomes C++ code, with the weights
packed into the blocks of inductor's own kernels. That saves the time between operators and the
memory traffic of their intermediate results: half of a pass of a small target. It needs a C++
compiler, at the first load up to half a minute for each number of rows (later loads find the
program: `kept_programs.py`), and a copy of the weights for each: so programs are made only if the
user asks for it; `auto` never uses them.

All other passes, prefills among them, run as in `fused`. So do passes for which `fused` is faster,
which is timed: on some processors a program of nine rows takes five times as long as one of one
row. Programs that were clearly slower are noted beside torch's cache, and not made at later starts.
The hidden states that are named at load are returned by every program; for others `fused` runs.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.checkpoint.files import one_line
from engine.checkpoint.model import LoadedModel
from engine.device import cpu_flags, processor
from engine.errors import ModelError
from engine.forward import forward
from engine.forward.forward import LAST, Backend, Layers, Output, Say, Spans, features_of, silent
from engine.forward.fused import FusedBackend
from engine.forward.kept_programs import (
    Lengths,
    Program,
    calls,
    forget,
    keep,
    kept,
    program_key,
)
from engine.forward.linears import Linear
from engine.forward.llama_parts import qkv_of
from engine.forward.masks import KindMasks
from engine.forward.operators import stack
from engine.layout.slots import LaneLayout, Span
from engine.quantised.linear import is_quantised

# -- code cache ------------------------------------------------------------------------------------

# Make compiled programs reusable from torch's cache: every process must produce the same source.
#
# Inductor stores what g++ compiles under a hash of the source. But the source names each constant
# by its address in memory, so no process finds what another one has compiled. Here constants are
# named by their shapes instead: a program gets its constants as arguments whenever it is called, so
# any model of the same shapes can use it. Besides, inductor parses a kernel's template anew for
# every matrix product; here it is parsed once.
#
# Both patch torch, whose version is pinned; if another version lacks these functions, nothing is
# patched.


def make_source_repeatable() -> None:
    """Patch inductor so that programs of the same shapes have the same source in every process.

    May be called repeatedly.
    """
    from torch._inductor.codegen.common import KernelTemplate
    from torch._inductor.graph import GraphLowering

    parse = getattr(KernelTemplate, "_template_from_string", None)
    if parse is not None and not hasattr(parse, "cache_info"):
        KernelTemplate._template_from_string = staticmethod(functools.cache(parse))  # type: ignore[method-assign]
    allocate: Any = getattr(GraphLowering, "allocate_non_dup_const_name", None)
    if allocate is None or hasattr(allocate, "__wrapped__"):
        return

    @functools.wraps(allocate)
    def allocate_by_shape(graph: Any, name: str | None, data: torch.Tensor) -> str:
        made: str = allocate(graph, name, data)
        graph.constant_reprs[made] = f"{data.dtype} {tuple(data.shape)} {data.layout}"
        return made

    patched: Any = GraphLowering
    patched.allocate_non_dup_const_name = allocate_by_shape


# -- verdicts --------------------------------------------------------------------------------------

# The record of programs that were slower than the fused forward: they are not made again.
#
# It is a file in the folder of torch's cache. If it cannot be read or written, the program is made
# and timed once more.

_VERDICTS = "slipstream-slower.json"
_CLEARLY = 1.1  # "clearly slower": at least so many times as long as the fused forward
_MOST_VERDICTS = 1000


def known_slower(about: str) -> set[int]:
    """Return the numbers of rows whose programs were clearly slower, for a `verdict_key`."""
    return {count for count in _verdicts().get(about, ()) if isinstance(count, int)}


def note_slower(about: str, counts: Collection[int]) -> None:
    """Record that programs of these numbers of rows are clearly slower, for a `verdict_key`."""
    found = _verdicts()
    found[about] = sorted(known_slower(about) | set(counts))
    while len(found) > _MOST_VERDICTS:
        found.pop(next(iter(found)))
    path = _verdicts_path()
    unfinished = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        unfinished.write_text(json.dumps(found))
        unfinished.replace(path)


def verdict_key(loaded: LoadedModel, num_lanes: int, layers: Layers) -> str:
    """Return a hash of all that a program's speed depends on, except its number of rows."""
    shapes = [(name, tuple(tensor.shape)) for name, tensor in loaded.model.named_parameters()]
    here = processor(), sorted(cpu_flags())
    said = torch.__version__, torch.__config__.show(), here, torch.get_num_threads()
    asked = loaded.dtype, shapes, num_lanes, layers
    return hashlib.sha256(repr((*said, *asked)).encode()).hexdigest()


def _verdicts_path() -> Path:
    """Return the path of the record of slower programs."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / _VERDICTS


def _verdicts() -> dict[str, list[int]]:
    """Return the record of slower programs; empty if it cannot be read."""
    try:
        found = json.loads(_verdicts_path().read_text())
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(found, dict) and all(isinstance(one, list) for one in found.values())
    return found if is_ours else {}


# -- compiled --------------------------------------------------------------------------------------


def _settings(dtype: torch.dtype) -> dict[str, Any]:
    """Return inductor's settings for programs in `dtype`.

    Matrix products are inductor's own kernels in float32, and with AMX (there nothing else was
    measured). Else oneDNN's, which in bfloat16 multiply in hardware: inductor's widen each weight
    to float32 first. Timing both at compile time decides wrongly, because a single matrix stays in
    a cache that the whole model does not fit into.
    """
    is_own = dtype == torch.float32 or "amx_tile" in cpu_flags()
    return {
        "freezing": True,
        "max_autotune": True,
        "max_autotune_gemm_backends": "CPP" if is_own else "ATEN",
        "cpp_wrapper": True,
    }


_Program = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""Function that runs a pass: returns logits [n, V], and features as in `Output`"""
# Weights of `_CompiledPass` that are in no matrix product; tied embeddings equal the head's weight.
_LOOKED_UP = ("embeddings",)
_TIMED_SLOTS = 256
_NUM_TIMED = 15


class CompiledBackend(Backend):
    """Backend for CPUs whose decode passes are programs made by torch.compile; see `Backend`."""

    def __init__(
        self,
        loaded: LoadedModel,
        lanes: LaneLayout,
        row_counts: Sequence[int],
        layers: Layers = (),
    ) -> None:
        """Prepare, without compiling: a program is made when a pass first has its number of rows.

        row_counts  numbers of rows for which programs are made, ascending
        layers  layers whose hidden states the programs return

        Raises:
            ModelError: this backend cannot run the model, or cannot compile here.
        """
        if loaded.device.type != "cpu":
            raise ModelError(f"{loaded.name}: the compiled forward is for CPUs; use fused")
        self._about = verdict_key(loaded, lanes.count, layers)
        self._asked = self._about, lanes, loaded.model.config.to_json_string(), _code()
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            raise ModelError("the compiled forward needs a C++ compiler: install g++, or use fused")
        if is_quantised(loaded.model):
            raise ModelError(f"{loaded.name}: the compiled forward has plain weights; use fused")
        self._fused = FusedBackend(loaded, lanes)
        self._name = loaded.name
        self._num_lanes = lanes.count
        self._kinds = self._fused.kinds
        self._masks = KindMasks(self._kinds, loaded.device, loaded.dtype)
        self.cache = self._fused.cache
        # One tensor per layer: after a write to a view of an input, all of it would be copied back.
        self._caches = list(self.cache.unbind())
        self.row_counts = tuple(row_counts)
        self._layers = layers
        self._made: set[int] = set()  # numbers of rows for which there is a program
        self._lengths = Lengths(lanes.num_slots)
        self._direct: dict[int, Program] = {}  # by rows: those that later starts find again
        self._program: _Program | None = None  # torch's, of all that are not found
        if self.row_counts:
            self._pass = _CompiledPass(loaded, self._fused, layers).eval()

    @property
    def name(self) -> str:  # type: ignore[override]
        """Return "compiled" if any pass is run by a program, else "fused": what runs them all."""
        return "compiled" if self.row_counts else self._fused.name

    def take_over(self, *, timed: bool = True, say: Say = silent) -> None:
        """Time the programs against the fused forward, and keep only those that are faster.

        Programs have copies of the weights. Other passes use the model's own weights; if a program
        is dropped or there are several lanes, they use packed copies, which take as much memory as
        one program.
        """
        del say
        if not timed:
            return
        packed = self._fused.packed()
        taken = {
            count: self._times_fused(packed, (fewer + 1 + count) // 2, count)
            for fewer, count in zip((0, *self.row_counts), self.row_counts, strict=False)
        }
        slower = [count for count, times in taken.items() if times > _CLEARLY]
        if slower:
            note_slower(self._about, slower)
        kept = tuple(count for count, times in taken.items() if times < 1)
        is_all = kept == self.row_counts and self._num_lanes == 1
        if not is_all or known_slower(self._about):
            self._fused = packed
            self.row_counts = kept
            self._direct = {n: one for n, one in self._direct.items() if n in kept}  # frees memory

    def _times_fused(self, packed: FusedBackend, num_rows: int, count: int) -> float:
        """Return the time of the program of `count` rows, divided by that of `num_rows` fused."""
        # Not all slots of a short cache: `fused` runs the passes that see all.
        num_visible = min(_TIMED_SLOTS, self._lengths.all[-1])
        windows = len(self._kinds.windows)
        program, rows = _rows(count, windows), _rows(num_rows, windows)
        self.forward(program, (Span(0, count),), num_visible=num_visible)  # makes it
        best, best_fused = math.inf, math.inf
        for _ in range(_NUM_TIMED):  # in turn: other load on the machine then slows both
            best = min(best, _seconds(self, program, num_visible))
            best_fused = min(best_fused, _seconds(packed, rows, num_visible))
        return best / best_fused

    def forward(
        self,
        rows: torch.Tensor,
        spans: Spans,
        *,
        num_visible: int,
        keep: torch.Tensor | None = None,
        layers: Layers = (),
    ) -> Output:
        """Run n rows, write their keys and values; return logits and features (see `Backend`)."""
        is_covered = keep is None and layers in ((), self._layers)
        if not is_covered or not self._has_program(spans, num_visible):
            return self._fused.forward(
                rows, spans, num_visible=num_visible, keep=keep, layers=layers
            )
        num_rows = rows.shape[1]
        _, masks = self._masks.build(rows, num_visible, (num_rows,))
        mask = masks[0] if len(masks) == 1 else torch.cat(masks)
        inputs = *rows.unbind()[:3], mask
        if num_rows not in self._made:
            self._made.add(num_rows)
            logits, features = self._make(*inputs)
        elif num_rows in self._direct:
            logits, features = self._run(self._direct[num_rows], inputs)
        else:
            assert self._program is not None
            with torch.no_grad():
                logits, features = self._program(*inputs, self._caches)
        return Output(logits, features if layers else None)

    def _has_program(self, spans: Spans, num_visible: int) -> bool:
        """True if a program can run the pass: one in the first lane that does not see all slots."""
        if num_visible not in self._lengths.all:
            return False
        return spans[0].first_slot == 0 and len(spans) == 1 and spans[0].num_rows in self.row_counts

    def _make(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Find the program for this many rows, or compile it; run it; return (logits, features)."""
        num_rows = len(inputs[0])
        key = program_key(*self._asked, num_rows)
        found = kept(key, self._pass)
        if found is not None:
            self._direct[num_rows] = found
            return self._run(found, inputs)
        with calls() as called:
            made = self._compile(*inputs)
        if self._lengths.is_any and len(called) == 1:
            tensors = *inputs, *self._caches
            num_visible = inputs[-1].shape[3]
            found = keep(key, self._pass, called[0], tensors, num_visible, looked_up=_LOOKED_UP)
            if found is not None and _are_equal(self._run(found, inputs), made):
                self._direct[num_rows] = found
            else:
                forget(key)
        return made

    def _run(
        self, program: Program, inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a program without torch's checks; return logits, and features or None."""
        mask = inputs[-1]
        assert mask.is_contiguous()
        logits, *features = program((*inputs, *self._caches), mask.shape[3])
        return logits, features[0] if features else None

    def _compile(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compile and run the program for this number of rows; return (logits, features).

        Raises ModelError if torch.compile fails.
        """
        if self._program is None:
            self._program = _compiled(self._pass, self._lengths)
        # The number of visible slots varies; everything else is fixed.
        torch._dynamo.mark_dynamic(inputs[-1], 3)
        try:
            # The settings count when the program is traced, so they are set for all of it.
            with (
                torch.compiler.set_stance("default"),
                torch._inductor.config.patch(_settings(self.cache.dtype)),
                torch.no_grad(),
            ):
                return self._program(*inputs, self._caches)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise ModelError(
                f"{self._name}: torch.compile fails ({one_line(error)}); use the backend fused"
            ) from error
        finally:
            # Later passes that fit no program run uncompiled, instead of compiling half a minute.
            torch.compiler.set_stance("eager_on_recompile")

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots of the cache, all reads before any write (see `Backend.move`)."""
        self._fused.move(sources, targets)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy `length` slots of the cache from `source` on to `target` on (see `Backend.copy`)."""
        self._fused.copy(source, target, length)

    def wipe(self, first: int, length: int) -> None:
        """Write zeros to `length` slots of the cache from `first` on (see `Backend.wipe`)."""
        self._fused.wipe(first, length)

    def not_finite(self, first: int, length: int) -> int | None:
        """Return where NaN or infinity first occurred in these slots, or None (see `Backend`)."""
        return self._fused.not_finite(first, length)


def _rows(num_rows: int, num_windows: int) -> torch.Tensor:
    """Return the rows of a chain at the start of a text, as in `Backend.forward`."""
    where = torch.arange(num_rows)
    seen = torch.zeros_like(where), (2 << where) - 1
    return torch.stack((where, where, where, *seen * (1 + num_windows)))


def _seconds(backend: Backend, rows: torch.Tensor, num_visible: int) -> float:
    """Return the seconds of a pass of these rows."""
    started = time.perf_counter()
    backend.forward(rows, (Span(0, rows.shape[1]),), num_visible=num_visible)
    return time.perf_counter() - started


def _are_equal(
    one: tuple[torch.Tensor, torch.Tensor | None], other: tuple[torch.Tensor, torch.Tensor | None]
) -> bool:
    """True if two passes gave the same logits and features, bit by bit."""
    pairs = zip(one, other, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


@functools.cache
def _code() -> str:
    """Return a hash of the source files that define programs."""
    files = Path(__file__), Path(forward.__file__)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _compiled(module: torch.nn.Module, compiler: Lengths) -> _Program:
    """Return the module wrapped by torch.compile, with the patches above applied."""
    # Imported here, because the import takes seconds.
    import torch._dynamo
    import torch._inductor.select_algorithm

    torch._inductor.select_algorithm.PRINT_AUTOTUNE = False
    make_source_repeatable()
    # A process runs one model. Programs made earlier to time another one must not be counted.
    torch._dynamo.reset()
    compiled: _Program = torch.compile(module, fullgraph=True, dynamic=False, backend=compiler)
    return compiled


class _CompiledPass(torch.nn.Module):
    """One forward pass of the llama family over a slot cache, in plain operators for torch.compile.

    All constants are parameters or buffers, so that they become part of the program.
    """

    def __init__(self, loaded: LoadedModel, fused: FusedBackend, wanted: Layers) -> None:
        super().__init__()
        model = loaded.model.model
        config = model.config
        attention = model.layers[0].self_attn
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.dim = int(attention.head_dim)
        self.scale = float(attention.scaling)
        self.wanted = wanted
        self.kinds = fused.kinds.of_layers
        self.head = loaded.model.lm_head
        self.last_norm = model.norm
        # A copy, because tied embeddings are the head's matrix, and packed weights must have no
        # other use.
        self.embeddings = torch.nn.Parameter(
            model.embed_tokens.weight.detach().clone(), requires_grad=False
        )
        self.layers = model.layers
        self.register_buffer("rotations", fused.rotations)
        self.qkv = torch.nn.ModuleList(_stacked(qkv_of(layer)) for layer in model.layers)
        self.gate_up = torch.nn.ModuleList(
            _stacked([layer.mlp.gate_proj, layer.mlp.up_proj]) for layer in model.layers
        )

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        mask: torch.Tensor,
        caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits [n, V], and the features of the wanted layers or None.

        ids, positions, slots  [n] int64, as in `Backend.forward`
        mask    [kinds of layers, 1, n, num_visible], added to the scores
        caches  one per layer, [2 kv_heads, slots, dim]: keys, then values; written in place
        """
        assert isinstance(self.rotations, torch.Tensor)
        cos, sin = self.rotations.index_select(1, positions)
        hidden = F.embedding(ids, self.embeddings)
        states = {}
        for number, layer in enumerate(self.layers):
            states[number] = hidden
            qkv = self.qkv[number](_rms_norm(layer.input_layernorm, hidden))
            seen = mask if len(mask) == 1 else mask[self.kinds[number]][None]
            out = self._attend(layer.self_attn, qkv, cos, sin, slots, seen, caches[number])
            hidden = hidden + layer.self_attn.o_proj(out)
            gate_up = self.gate_up[number](_rms_norm(layer.post_attention_layernorm, hidden))
            gate, up = gate_up.chunk(2, dim=-1)
            hidden = hidden + layer.mlp.down_proj(F.silu(gate) * up)
        states[LAST] = _rms_norm(self.last_norm, hidden)
        return self.head(states[LAST]), features_of(states, self.wanted)

    def _attend(
        self,
        attention: Any,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        mask: torch.Tensor,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        """Write keys and values to `cache`; return the heads' outputs [n, heads * dim]."""
        num_rows, heads, kv_heads = qkv.shape[0], self.num_heads, self.num_kv_heads
        apart = qkv.view(num_rows, heads + 2 * kv_heads, self.dim)
        turned = apart[:, : heads + kv_heads]
        if hasattr(attention, "q_norm"):
            query = _rms_norm(attention.q_norm, turned[:, :heads])
            turned = torch.cat((query, _rms_norm(attention.k_norm, turned[:, heads:])), dim=1)
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((second, first), dim=-1) * sin
        written = torch.cat((turned[:, heads:], apart[:, heads + kv_heads :]), dim=1)
        cache.index_copy_(1, slots, written.transpose(0, 1))
        keys, values = cache[:, : mask.shape[-1]].chunk(2, dim=0)
        group = heads // kv_heads
        query = turned[:, :heads].reshape(num_rows, kv_heads, group, self.dim).transpose(0, 1)
        query = query.reshape(kv_heads, num_rows * group, self.dim)
        if num_rows > 1:
            mask = mask.repeat_interleave(group, dim=2)
        if num_rows == 1:
            # Written like this, both products become loops that read each key and value once.
            scores = (query.float()[:, :, None] * keys.float()[:, None]).sum(-1)
            weights = (scores * self.scale + mask[0]).softmax(-1)
            out = (weights[:, :, :, None] * values.float()[:, None]).sum(2).to(qkv.dtype)
        else:
            out = F.scaled_dot_product_attention(
                query[None], keys[None], values[None], attn_mask=mask, scale=self.scale
            )
        out = out.view(kv_heads, num_rows, group, self.dim)
        return out.transpose(0, 1).reshape(num_rows, heads * self.dim)


def _rms_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the RMS norm of `x`, computed in float32, by one of the model's norm layers."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * normed.to(x.dtype)  # type: ignore[no-any-return]


def _stacked(parts: Sequence[Linear]) -> torch.nn.Linear:
    """Return one linear layer with the plain weights of `parts` stacked along the outputs."""
    plain = [part for part in parts if isinstance(part, torch.nn.Linear)]
    weight, bias = stack(plain)
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        made.bias = torch.nn.Parameter(bias.detach(), requires_grad=False)
    return made
