"""Multi-token prediction (MTP): a decoder layer that a model's own checkpoint has for drafting.

    x = eh_proj [norm e, norm f]       e: the token's embedding
    f' = norm layer(x)                 f: the target's last hidden state at the token before, or f'
                                       of the row before, if no feature is given
    logits: the target's output matrix times f'

From DeepSeek-V3 (arXiv 2412.19437); GLM-4.5, Qwen3-Next and others have the same form. The layer is
of the target's own kind (multi-head latent attention, a mixture of experts ...), so it is
transformers' module; where some of the target's layers keep a running state, it is one with full
attention. Of several such layers the first one drafts the first token, and each next one reads f'
of the layer before it at the token before; behind the last one, that one is run again and again.
Embeddings and output matrix are the target's. Owns the layers, and how they are read from the
target's files. Knows no slot: keys and values go into a cache that is passed in.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from transformers import modeling_layers
from transformers.core_model_loading import WeightRenaming, convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.generic import ContextManagers

from engine.checkpoint.checked import Checked
from engine.checkpoint.files import one_line
from engine.checkpoint.parts import Lazy, plain_parts
from engine.errors import ModelError, kind_of
from engine.forward.cache_tensors import slot_bytes
from engine.heads.target import Target
from engine.heads.waves import MOST_LAYERS
from engine.quantised.gguf_checkpoint import GgufCheckpoint
from engine.quantised.packed_checkpoint import PackedCheckpoint
from proto.head_kinds import is_mtp_apart, no_mtp, num_mtp_layers, refuse_mtp

_SLIDING = "sliding_attention"
_NUMBERED = re.compile(r"^layers\.\d+\.")
# What transformers raises if a checkpoint's tensors are not those of its configuration.
_MISFITS = (
    *(ValueError, RuntimeError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(OSError, SafetensorError),
)
# The tensors of a layout that has `mtp.` before all. Of several layers only the first one is read.
_ALONE = r"^mtp\.(?!layers\.[1-9])"
# Its names of what transformers calls otherwise.
_NAMES_ALONE = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "mtp_block": "layers.0",
    "post_norm": "norm",
}
# Names that transformers does not know: Hunyuan's and MiMo's of the last norm, and MiMo's of the
# norm before its MLP.
_MORE_NAMES = (
    WeightRenaming(source_patterns=".final_layernorm.", target_patterns=".post_norm."),
    WeightRenaming(
        source_patterns=".pre_mlp_layernorm.", target_patterns=".post_attention_layernorm."
    ),
)
# The tensors of a layout that has `model.mtp.` before all, and numbers its layers from 0.
_APART = r"^model\.mtp\.layers\.(\d+)\."
_KINDS = {"mimo_v2_flash": "sliding_attention"}  # of attention, where config.json does not say
_DENSE = ("exaone_moe", "mimo_v2_flash")  # types whose layers for drafting have no experts


class MtpModel(modeling_layers.MtpModel):  # type: ignore[no-untyped-call]
    """transformers' model of such layers, which reads one more layout.

    transformers knows its layouts by the name of the class, if that is its own.
    """

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: the layouts of transformers' class are those of this one."""
        return False

    def get_weight_conversions(self, main_model: Any) -> list[Any]:
        """Return what becomes of the names and tensors in the files."""
        return [*_MORE_NAMES, *super().get_weight_conversions(main_model)]

    @classmethod
    def of(cls, main_model: Any, tensors: Mapping[str, Lazy], dtype: torch.dtype) -> Any:
        """Return the layers, whose tensors are read when used, in this number type.

        main_model  the target, on `meta`; its configuration says how many layers there are
        tensors     by their names in a plain checkpoint
        """
        number = main_model.config.get_text_config(decoder=True).num_mtp_layers
        with ContextManagers(cls.get_init_context(dtype, False, False, None)):
            made = cls(main_model, number)
        mapping = made.get_weight_conversions(main_model)
        how = LoadStateDictConfig(weight_mapping=mapping, dtype=dtype)
        told, _ = convert_and_load_state_dict_in_model(made, dict(tensors), how)
        made._adjust_missing_and_unexpected_keys(told)
        if told.missing_keys:
            raise _Misfit(missing=min(told.missing_keys))
        if told.mismatched_keys:
            raise _Misfit(missing="")
        return made


class _Misfit(Exception):
    """A checkpoint's tensors are not those of its configuration.

    missing  name of a tensor that is not there; "": one has another shape
    """

    def __init__(self, *, missing: str) -> None:
        super().__init__(missing)
        self.missing = missing


@dataclass(frozen=True, slots=True)
class MtpSizes:
    """The sizes of a head of this kind, under the names of `EagleConfig`.

    width       hidden size of the head: that of its target
    draft_vocab number of tokens that it can draft: all of the target's
    slot_bytes  bytes of one token's keys and values in all layers
    group       number of query heads for each key head
    """

    width: int
    draft_vocab: int
    slot_bytes: int
    group: int


class MtpLayer:
    """A layer, as a function of rows, positions, what they see, and a cache of keys and values.

    window  number of last positions that a row sees; None: all
    """

    def __init__(self, module: Any, rotary: Any, config: Any, number: int) -> None:
        """Take transformers' module, its rotary embedding (None: it has none) and configuration.

        number  which of the layers it is, and of the cache's
        """
        self._module, self._rotary = module, rotary
        self._is_state_first = bool(getattr(config, "mtp_hidden_states_first", False))
        kind = (getattr(config, "layer_types", None) or ("full_attention",) * (number + 1))[number]
        self.window: int | None = config.sliding_window if kind == _SLIDING else None
        takes_kind = rotary is not None and "layer_type" in signature(rotary.forward).parameters
        self._of_rotary = {"layer_type": kind} if takes_kind else {}

    def enter(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the layer's inputs [n, width] for embeddings and states before them."""
        pair = self._module.enorm(embedded), self._module.hnorm(states)
        joined = torch.cat(pair[::-1] if self._is_state_first else pair, dim=-1)
        entering: torch.Tensor = self._module.eh_proj(joined)
        return entering

    def run(self, rows: torch.Tensor, positions: torch.Tensor, mask: Any, cache: Any) -> Any:
        """Return the states [n, width] after rows of one text, whose keys go into `cache`.

        rows       [n, width], of `enter`
        positions  [n] int64
        mask       [1, 1, n, slots], added to the scores; None: transformers' own
        """
        rows, positions = rows[None], positions[None]
        turned = None
        if self._rotary is not None:
            turned = self._rotary(rows, position_ids=positions, **self._of_rotary)
        out = self._module.mtp_block(
            rows,
            attention_mask=mask,
            position_embeddings=turned,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        out = out[0] if isinstance(out, tuple) else out
        norm = self._module.post_norm
        return (out if norm is None else norm(out))[0]

    def try_rows(self, num_rows: int, cache: Any) -> None:
        """Run so many rows of zeros with transformers' cache: it then tells the shapes of keys."""
        weight = self._module.eh_proj.weight
        rows = weight.new_zeros(num_rows, weight.shape[0])
        self.run(rows, torch.arange(num_rows, device=weight.device), None, cache)

    @property
    def num_parameters(self) -> int:
        """Return the number of its weights."""
        return sum(one.numel() for one in self._module.parameters())


class MtpLayers:
    """All layers of a head, the first one first; called as a model that tells shapes of keys."""

    def __init__(self, layers: Iterable[MtpLayer]) -> None:
        self._layers = tuple(layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, number: int) -> MtpLayer:
        return self._layers[number]

    def __call__(self, ids: torch.Tensor, *, past_key_values: Any, use_cache: bool) -> None:
        """Run rows [1, n] of zeros through each layer with transformers' cache."""
        del use_cache
        for layer in self._layers:
            layer.try_rows(ids.shape[1], past_key_values)

    @property
    def num_parameters(self) -> int:
        """Return the number of their weights."""
        return sum(layer.num_parameters for layer in self._layers)


@dataclass(frozen=True, slots=True)
class MtpHead:
    """A target's layers for drafting, with what they share with the target, on its device.

    embeddings  [at least vocab_size, width]
    output      the target's output matrix
    """

    config: MtpSizes
    vocab_size: int
    embeddings: torch.Tensor
    layers: MtpLayers
    output: torch.nn.Linear

    targets: None = None  # it drafts all tokens
    is_ascending: bool = True

    def enter(self, number: int, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return a layer's inputs [n, width] for token ids [n] and states [n, width]."""
        return self.layers[number].enter(F.embedding(ids, self.embeddings), states)

    def states(self, features: torch.Tensor) -> torch.Tensor:
        """Return the states that rows start from: the features [n, width] themselves."""
        return features

    def last_norm(self, states: torch.Tensor) -> torch.Tensor:
        """Return what the output matrix reads: the states, whose norm is part of the layer."""
        return states

    def own_logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab_size] float32 of states [n, width]."""
        logits: torch.Tensor = self.output(normed)
        return logits.float()[:, : self.config.draft_vocab]


def read_mtp_head(target: Target, dtype: torch.dtype, device: torch.device) -> MtpHead:
    """Return the head that a target's own checkpoint holds.

    Raises:
        ModelError: it holds none, or one that cannot be read or run.
    """
    checked = target.checked
    refuse_mtp(target.name, checked.text_config.to_dict(), is_wrapped=checked.names is not None)
    if isinstance(checked.packed, GgufCheckpoint):
        raise ModelError(no_mtp(target.name))
    # On the device `meta`: nothing of the target itself is read.
    empty = copy.copy(checked.empty)
    files, config = _tensors(checked), checked.text_config.to_dict()
    # Which tensors are those of the layers: transformers knows the numbers of published models.
    known = empty._keys_to_ignore_on_load_unexpected or ()
    is_alone = any("mtp" in one for one in known) and not is_mtp_apart(config)
    own, num_layers = _ALONE, 1
    if is_mtp_apart(config):
        own = _APART
        num_layers = len({found[1] for name in files if (found := re.search(own, name))})
    elif not is_alone:
        num_layers = num_mtp_layers(config)
        numbers = "|".join(str(target.num_layers + number) for number in range(num_layers))
        own = rf"model\.layers\.({numbers})\."
    if not 0 < num_layers <= MOST_LAYERS:
        raise ModelError(
            f"{target.name}: it has {num_layers} layers for multi-token prediction, and 1 to "
            f"{MOST_LAYERS} are covered; name another drafter"
        )
    empty.config = _with_layers(checked, num_layers, dtype)
    tensors = {name: one for name, one in files.items() if re.search(own, name)}
    try:
        made = MtpModel.of(empty, tensors, dtype)
        decoder = empty.get_decoder()
        rotary = getattr(decoder, "rotary_emb", None)
        if rotary is not None:
            rotary = type(rotary)(config=made.config).to(device)
        layers = MtpLayers(
            MtpLayer(one.to(device).eval(), rotary, made.config, number)
            for number, one in enumerate(made.layers)
        )
        num_bytes = slot_bytes(layers, device)
    except ModelError:
        raise  # of a packed tensor
    except (_Misfit, *_MISFITS) as error:
        wrong = _misfit(error, is_alone=is_alone)
        raise kind_of(error)(
            f"{target.name}: its layer for multi-token prediction {wrong}"
        ) from error
    return MtpHead(
        config=MtpSizes(target.hidden_size, target.vocab_size, num_bytes, _group(checked)),
        vocab_size=target.vocab_size,
        embeddings=target.embedding().to(device, dtype),
        layers=layers,
        output=target.output().to(device, dtype),
    )


def _with_layers(checked: Checked, num_layers: int, dtype: torch.dtype) -> Any:
    """Return the target's configuration for so many such layers; it names the target's folder."""
    config = copy.deepcopy(checked.plain)
    part = config.get_text_config(decoder=True)
    part.num_mtp_layers = num_layers
    # Its kind: full attention, and a mixture of experts, unless the configuration says otherwise.
    kind = str(part.model_type)
    usually = _KINDS.get(kind, "full_attention"), "dense" if kind in _DENSE else "sparse"
    for kinds, usual in zip(("layer_types", "mlp_layer_types"), usually, strict=True):
        if getattr(part, kinds, None) is not None:
            stated = getattr(part, f"mtp_{kinds}", None) or [usual] * num_layers
            setattr(part, f"mtp_{kinds}", stated[:num_layers])
    config.name_or_path, config.dtype = str(checked.folder), dtype
    return config


def _group(checked: Checked) -> int:
    """Return the number of query heads for each key head."""
    config = checked.text_config
    num_heads = getattr(config, "num_attention_heads", 1)
    return int(num_heads // (getattr(config, "num_key_value_heads", None) or num_heads))


def _tensors(checked: Checked) -> Mapping[str, Lazy]:
    """Return all tensors of a target's files, dequantised where they are packed, read when used."""
    if checked.packed is None:
        return plain_parts(checked.folder, {})
    assert isinstance(checked.packed, PackedCheckpoint)
    # Of a model of several modalities `packed` has the language model alone.
    return PackedCheckpoint(checked.folder, checked.packed.form).tensors(checked.empty)


def _misfit(error: Exception, *, is_alone: bool) -> str:
    """Return what is wrong with a layer that transformers does not load or run.

    is_alone  True if its tensors have `mtp.` before all
    """
    if isinstance(error, _Misfit) and error.missing:
        name = _NUMBERED.sub("", error.missing)
        first, _, rest = name.partition(".")
        name = f"mtp.{_NAMES_ALONE.get(first, first)}.{rest}" if is_alone else name
        return f"lacks {name}; get it again"
    if isinstance(error, _Misfit):
        return "has tensors of other shapes than config.json states; get it again"
    return f"cannot be used: {one_line(error)}"
