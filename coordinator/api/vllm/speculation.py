"""`speculative_config` in vLLM's names: read into the drafter's model and a `SpeculationConfig`.

Our names are taken as well. What is given under two names is refused, and so is what is not known.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.api.config import NGRAM, PairConfig, SpeculationConfig
from coordinator.api.models.heads import find_config
from coordinator.api.values import scalar
from proto.errors import ConfigurationError, did_you_mean, shown
from proto.heads import HeadKind
from proto.policies import POLICIES

NAME = "speculative_config"
DRAFT_MODEL = "draft_model"
METHODS = (DRAFT_MODEL, NGRAM, *HeadKind, *POLICIES)
# A setting of ours: as vLLM calls it, or as our policies do. The first name is shown.
NAMES = {
    "policy": ("policy",),
    "ngram_max": ("prompt_lookup_max", "ngram_max"),
    "ngram_min": ("prompt_lookup_min", "ngram_min"),
    "verify": ("rejection_sample_method", "verify"),
}
SETTINGS = {
    name: setting
    for setting in SpeculationConfig.model_fields
    for name in NAMES.get(setting, (setting,))
}
# Of the pair, and of no text.
OF_THE_PAIR = {
    "revision": "drafter_revision",
    "draft_tensor_parallel_size": "drafter_tensor_parallel_size",
}
KNOWN = ("method", "model", *SETTINGS, *OF_THE_PAIR)
RULES = {"standard": "token"}  # vLLM's name: ours


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a `speculative_config` says.

    method    as it was given; None: the model says what it is
    model     the draft model, the head, or NGRAM; None: it is not named here
    settings  of the policy
    of_pair   settings of the pair, by their names there
    """

    method: str | None
    model: str | None
    settings: SpeculationConfig
    of_pair: Mapping[str, Any]

    def check_kind(self, pair: PairConfig) -> None:
        """Raises ConfigurationError if the model is known to be something else than `method`."""
        if self.method not in (DRAFT_MODEL, *HeadKind):
            return
        if pair.drafter == NGRAM or find_config(pair.drafter, pair.drafter_revision) is None:
            return
        kind = pair.drafter_head
        if kind == (None if self.method == DRAFT_MODEL else self.method):
            return
        what = f"a head of the kind {kind}" if kind is not None else "no head"
        raise ConfigurationError(
            f'{NAME}["method"] is {self.method}, and the model {pair.drafter} is {what}'
        )


def read(config: Mapping[str, Any] | None) -> Speculation:
    """Raises ConfigurationError."""
    given = _known(config)
    method, model = given.get("method"), given.get("model")
    if method is not None and not (isinstance(method, str) and method in METHODS):
        raise ConfigurationError(
            f'{NAME}["method"] is one of {", ".join(METHODS)}, not {shown(method)}'
            f"{did_you_mean(method, METHODS) if isinstance(method, str) else ''}"
        )
    values = _values(given)
    if method in POLICIES:
        if "policy" in values:
            raise ConfigurationError(
                f'{NAME} names a policy twice: "method" is {method}, "policy" is '
                f"{shown(values['policy'])}"
            )
        values["policy"] = method
    elif method == NGRAM:
        if model is not None and not (isinstance(model, str) and model == NGRAM):
            raise ConfigurationError(
                f'the method ngram has no model, but {shown(model)} is given; "also_ngram" uses '
                "both"
            )
        model = NGRAM
    elif method in list(HeadKind) and model is None:
        raise ConfigurationError(
            f'the method {method} needs a "model": the folder or name of a head'
        )
    of_pair = {ours: given[name] for name, ours in OF_THE_PAIR.items() if name in given}
    return Speculation(method, model, _made(values), of_pair)


def _known(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What was given and is not None, which stands for what nobody has said."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigurationError(
            f"{NAME}: expected a dict of {', '.join(KNOWN)}, got {shown(config)}"
        )
    if unknown := [name for name in config if name not in KNOWN]:
        meant = did_you_mean(unknown[0], KNOWN) if isinstance(unknown[0], str) else ""
        raise ConfigurationError(
            f"{NAME} has no {shown(unknown[0])}; there are {', '.join(KNOWN)}{meant}"
        )
    return {name: scalar(value) for name, value in config.items() if value is not None}


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by our names."""
    values: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        if name not in given:
            continue
        if setting in values:
            raise ConfigurationError(
                f"{NAME} says {' and '.join(NAMES[setting])}, which are one setting; leave one out"
            )
        values[setting] = given[name]
    if isinstance(rule := values.get("verify"), str):
        values["verify"] = RULES.get(rule, rule)
    _fit(values)
    return values


def _fit(values: dict[str, Any]) -> None:
    """Of the two lengths of an n-gram, the one that nobody has said does not contradict."""
    fields = SpeculationConfig.model_fields
    longest, shortest = values.get("ngram_max"), values.get("ngram_min")
    if type(longest) is int and shortest is None:
        values["ngram_min"] = min(longest, fields["ngram_min"].default)
    if type(shortest) is int and longest is None:
        values["ngram_max"] = max(shortest, fields["ngram_max"].default)


def _made(values: Mapping[str, Any]) -> SpeculationConfig:
    """Raises ConfigurationError, which calls a setting as vLLM does."""
    try:
        return SpeculationConfig(**values)
    except ConfigurationError as error:
        setting, _, rest = str(error).partition(": ")
        name = NAMES.get(setting, (setting,))[0]
        raise ConfigurationError(f"{NAME}, {name}: {rest}") from error
