"""The target that teaches a head: its features and distributions, and the texts that it writes.

The engine loads it, so that it may be any model that the engine runs; here its own forward runs,
without the engine's cache. Knows no head's weights.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import LlamaConfig

from engine.checkpoint.model import LoadedModel, load_model
from engine.device import claim
from engine.errors import EngineError
from engine.heads.target import Target
from lab.training.features import layers_of, no_features
from lab.training.heads import Shared
from proto.errors import ModelError
from proto.head_kinds import HeadKind

Tokens = npt.NDArray[np.int64]
Noise = Callable[[int], Tensor]  # the place of a token -> what is added to its logits, [B, V]
ENDED = -1  # stands in a text for each token after its end
LAST_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
DEFAULT_THETA = 10_000.0
DEFAULT_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Teacher:
    """A target on its device, and what its heads take from it."""

    loaded: LoadedModel
    shared: Shared

    @property
    def device(self) -> torch.device:
        """Return the device on which target and head are."""
        return self.loaded.device

    @property
    def vocab_size(self) -> int:
        """Return V, the number of logits of a row."""
        return len(self.shared.output)

    def read(
        self, text: Tensor, layers: tuple[int, ...], *, with_logits: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the features [B, T, len(layers) * H] of these layers, and the logits [B, T, V].

        text         int64 [B, T]
        with_logits  False: the logits may be those of the last row alone, [B, 1, V]

        Raises ModelError: the model hands out no such hidden states.
        """
        out = self.loaded.model(
            input_ids=text,
            use_cache=False,
            output_hidden_states=True,
            return_dict=True,
            **({} if with_logits else self.last_logits),
        )
        states = getattr(out, "hidden_states", None)
        wanted = (*text.shape, self.loaded.hidden_size)
        if not isinstance(states, tuple) or len(states) != self.loaded.num_layers + 1:
            raise ModelError(no_features(self.loaded.name))
        parts = [states[layer] for layer in layers]
        if any(part.shape != wanted for part in parts):
            raise ModelError(no_features(self.loaded.name))
        return torch.cat(parts, dim=-1), out.logits

    @property
    def last_logits(self) -> dict[str, int]:
        """Return the argument that makes the model leave out all logits but a text's last ones."""
        parameters = inspect.signature(self.loaded.model.forward).parameters
        return {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    @torch.inference_mode()
    def write(self, prompts: Sequence[Tokens], length: int, noise: Noise) -> Tensor:
        """Return int64 [B, length]: the prompts continued; ENDED after an end of text.

        A prompt that is longer than the shortest is read token by token beside the others' texts,
        so that nothing is padded.

        prompts  [n] each, 0 < n < length
        noise    is added to the logits before the largest is chosen
        """
        text = torch.full((len(prompts), length), ENDED, device=self.device)
        given = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        for row, prompt in enumerate(prompts):
            text[row, : len(prompt)] = torch.from_numpy(prompt).to(self.device)
        ends = torch.tensor(self.loaded.eos_token_ids, dtype=torch.int64, device=self.device)
        start, cache = int(given.min()), None
        options = self.last_logits
        new, is_over = text[:, :start], torch.zeros_like(given, dtype=torch.bool)
        for place in range(start, length):
            out = self.loaded.model(input_ids=new, past_key_values=cache, use_cache=True, **options)
            cache = out.past_key_values
            chosen = (out.logits[:, -1].float() + noise(place)).argmax(dim=-1)
            own = place >= given
            new = torch.where(own, chosen, text[:, place])[:, None]
            text[:, place] = torch.where(own & is_over, ENDED, new[:, 0])
            is_over |= own & torch.isin(chosen, ends)
            if bool(is_over.all()):
                break
        return text

    def noise(self, temperatures: Sequence[float], seed: int) -> Noise:
        """Return the noise with which texts are sampled at these temperatures; 0 is greedy.

        It depends on the seed and the token's place alone, so that a head can choose with the same.
        """
        scales = torch.tensor(temperatures, device=self.device)[:, None]
        generator = torch.Generator(self.device)
        numbers = torch.empty(len(temperatures), self.vocab_size, device=self.device)

        def at(place: int) -> Tensor:
            generator.manual_seed((seed << 20) + place)
            return -scales * numbers.exponential_(generator=generator).log_()

        return at


def load_teacher(
    name: str, revision: str | None, kind: HeadKind, *, dtype: str, device: str
) -> Teacher:
    """Load and return a target that can teach a head of this kind.

    Raises:
        ModelError: with one line that says what is wrong and what to do.
    """
    try:
        claim(device)
        target = Target(name, revision)
        layers = layers_of(name, kind, target.num_layers)
        loaded = load_model(name, revision=revision, dtype=dtype, device=device)
        embedding, output = target.embedding(), _output(target, loaded, kind)
        norm = _last_norm(loaded)
    except EngineError as error:
        raise ModelError(str(error)) from error
    if embedding.shape[1] != target.hidden_size:
        raise ModelError(
            f"{name}: its embeddings are {embedding.shape[1]} wide and its hidden states "
            f"{target.hidden_size}: such heads are not covered"
        )
    embedding = embedding[: target.vocab_size].to(loaded.device, torch.float32)
    weight = output.weight.detach()[: target.vocab_size].to(loaded.device, torch.float32)
    bias = output.bias
    shared = Shared(
        name=name,
        config=head_config(loaded, target),
        layers=layers,
        embedding=embedding,
        output=embedding if torch.equal(embedding, weight) else weight,
        bias=None if bias is None else bias.detach().to(loaded.device, torch.float32),
        last_norm=norm,
    )
    teacher = Teacher(loaded, shared)
    with torch.inference_mode():
        teacher.read(torch.zeros(1, 4, dtype=torch.int64, device=loaded.device), layers)
    return teacher


def head_config(loaded: LoadedModel, target: Target) -> LlamaConfig:
    """Return the configuration of the head's llama layer: the target's where it is such a layer."""
    config: Any = loaded.model.config.get_text_config(decoder=True)
    width = target.hidden_size
    num_heads = _whole(config, "num_attention_heads", max(1, width // 64))
    dim = _whole(config, "head_dim", width // num_heads)
    if dim % 2:  # a rotary embedding turns pairs
        num_heads, dim = 1, width - width % 2
    num_kv_heads = _whole(config, "num_key_value_heads", num_heads)
    inner = _whole(config, "intermediate_size", 0)
    rope = getattr(config, "rope_parameters", None)
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    eos = loaded.eos_token_ids
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=width,
        # Of a mixture of experts it may be the size of one, or of them all.
        intermediate_size=inner if width <= inner <= 8 * width else -(-8 * width // 192) * 64,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads if num_heads % num_kv_heads == 0 else num_heads,
        head_dim=dim,
        rms_norm_eps=float(getattr(config, "rms_norm_eps", None) or DEFAULT_EPSILON),
        max_position_embeddings=loaded.max_model_len,
        rope_parameters={"rope_type": "default", "rope_theta": float(theta or DEFAULT_THETA)},
        bos_token_id=getattr(config, "bos_token_id", None),
        eos_token_id=eos[0] if len(eos) == 1 else list(eos) or None,
        pad_token_id=getattr(config, "pad_token_id", None),
        num_hidden_layers=1,
        tie_word_embeddings=False,
    )


def _output(target: Target, loaded: LoadedModel, kind: HeadKind) -> Any:
    """Return the target's output matrix.

    EAGLE and DFlash heads use it in the engine too, which reads it from the files. Others only
    begin with it, so it may have another name there. Raises ModelError.
    """
    try:
        return target.output()
    except EngineError:
        module = loaded.model.get_output_embeddings()
        if kind in (HeadKind.EAGLE, HeadKind.DFLASH) or not isinstance(module, torch.nn.Linear):
            raise
        return module


def _whole(config: Any, field: str, default: int) -> int:
    """Return a field that must be a whole number above 0; else `default`."""
    found = getattr(config, field, None)
    return found if type(found) is int and found > 0 else default


def _last_norm(loaded: LoadedModel) -> Tensor:
    """Return what the target's last norm multiplies by, [H] float32; ones if it has none.

    It is measured, because some models add 1 to the weight: a row of as many ones as minus ones has
    mean 0 and mean square 1, so that every kind of norm leaves it as it is.
    """
    base: Any = loaded.model.get_decoder()
    width = loaded.hidden_size
    found = next((getattr(base, name) for name in LAST_NORMS if hasattr(base, name)), None)
    signs = torch.ones(width, device=loaded.device, dtype=loaded.dtype)
    if found is None or width % 2:
        return signs.float()
    signs[1::2] = -1
    with torch.inference_mode():
        odd: Tensor = (found(signs[None]) - found(-signs[None]))[0] / 2  # without a bias
    return (odd * signs).float().clone()
