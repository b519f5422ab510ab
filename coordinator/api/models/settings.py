"""The settings of which models draft and verify, how many, and where heads run (`PairConfig`)."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)

from coordinator.api.config_base import Frozen, called, named
from coordinator.api.models import named as ours
from coordinator.api.models.folders import folder_of_file
from coordinator.api.models.found import found
from coordinator.api.models.heads import is_whole_model, kind_of, layers_of
from coordinator.api.models.named import NGRAM as NGRAM
from coordinator.api.models.tokenizers import differ
from proto.errors import ConfigurationError
from proto.head_kinds import HeadKind, is_mtp
from proto.installation import MODELS
from proto.messages import Role
from proto.node_config import MAX_NODES
from proto.system import is_folder, path_of

KINDS = "Medusa, EAGLE, EAGLE-3, DFlash"


def located(model: str) -> str:
    """Return a folder's absolute path, as nodes run in another one; other names are unchanged.

    Of a GGUF file it is the path of the folder that is made of it. Names of ours (`named.py`) stand
    for targets.
    """
    if model in ("", NGRAM) or is_mtp(model):
        return model
    model = ours.target_of(model)
    if model.endswith(".gguf") and not is_folder(model):
        return str(folder_of_file(model))
    return str(path_of(model).absolute()) if is_folder(model) else model


def _revision(values: Mapping[str, object]) -> str | None:
    """Return the target's revision among values that were not checked yet."""
    revision = values.get("target_revision")
    return revision if isinstance(revision, str) else None


Name = Annotated[str, Field(min_length=1)]
Model = Annotated[Name, AfterValidator(located)]
Home = Literal["", "own", "target"]


class ModelsConfig(Frozen):
    """Settings of the target model and of what drafts for it."""

    target: Annotated[
        Model,
        Field(
            description="The model whose text is written. A folder, a GGUF file, or a name on "
            "the Hugging Face hub. The weights may be quantised (FP8, GPTQ, AWQ, NF4, GGUF).\n"
            "Default: smollm2 where `make demo` has fetched it, else the toy."
        ),
    ] = ours.DEFAULT
    drafter: Annotated[
        Model,
        Field(
            description="The model that proposes tokens. A folder or a name on the hub, of a "
            f"small model or of a head of the target ({KINDS}). `ngram` needs no "
            "model: the target copies what followed its last tokens earlier in the "
            "text (prompt lookup). `mtp` is the layer for multi-token prediction in the "
            "target's own checkpoint, if it has one. `auto` is what comes with the target: "
            "that layer, else a head in a folder dflash, eagle3, eagle or medusa inside its folder "
            "or beside it, else ngram. Default: auto; for smollm2 ngram beside a head of ours, for "
            "the toy its drafter."
        ),
    ] = ours.DEFAULT
    target_revision: Annotated[
        Name | None, Field(description="Branch, tag or commit of --target on the hub.")
    ] = None
    drafter_revision: Annotated[
        Name | None, Field(description="Branch, tag or commit of --drafter on the hub.")
    ] = None
    require_same_tokenizer: Annotated[
        bool,
        Field(
            description="Refuse a drafter whose tokenizer is not the target's. Without it, what "
            "such a drafter says is translated into the target's tokens."
        ),
    ] = False
    drafter_home: Annotated[
        Home,
        Field(
            description="Where the drafter runs, a draft model or a head.\n"
            "own: in a process of its own, on --drafter-device.\n"
            "target: in the target's process and on its device, in turns with it.\n"
            "Default: target for Medusa and DFlash heads and mtp, else own."
        ),
    ] = ""
    heads: Annotated[
        str,
        AfterValidator(located),
        Field(
            description="A head that drafts in addition to the drafter. A folder or a name on the "
            f"hub ({KINDS}), or `mtp`. It runs in the target's process. Default: that of "
            "smollm2 for smollm2, else none."
        ),
    ] = ours.DEFAULT
    heads_revision: Annotated[
        Name | None, Field(description="Branch, tag or commit of --heads on the hub.")
    ] = None

    targets: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_NODES[Role.TARGET],
            description="How many targets write texts, each text at one of them. They divide the "
            "devices of --target-device evenly. If one is lost, its texts go on at the others.",
        ),
    ] = 1
    drafters: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_NODES[Role.DRAFTER],
            description="How many drafters there are. They divide the devices of --drafter-device "
            "evenly, and each drafts for every text.",
        ),
    ] = 1

    # True: nobody has named the target, and it is smollm2.
    _is_smollm2_by_default: bool = PrivateAttr(default=False)
    # The drafter that was found for the target; "": it was named.
    _found: str = PrivateAttr(default="")

    @property
    def has_several(self) -> bool:
        """True if there are several targets or several drafters."""
        return self.targets > 1 or self.drafters > 1

    @model_validator(mode="wrap")
    @classmethod
    def _name_defaults(cls, given: object, make: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(given, Mapping):
            return make(given)
        names = ("target", "drafter", "heads")
        values = {**dict.fromkeys(names, ours.DEFAULT), **given}
        target, drafter, heads = map(values.get, names)
        is_unnamed = isinstance(target, str) and target == ours.DEFAULT
        if is_unnamed:
            named = (drafter, heads)
            target = ours.default_target(tuple(one for one in named if isinstance(one, str)))
        own, found_name = heads, ""
        if isinstance(target, str) and isinstance(drafter, str):
            if isinstance(heads, str) and heads == ours.DEFAULT:
                home = values.get("drafter_home", "")
                is_free = isinstance(home, str) and not home
                heads = ours.heads_of(drafter, target) if is_free else ""
            drafter = ours.drafter_of(drafter, target)
            if drafter == ours.AUTO and own not in (ours.DEFAULT, ""):
                drafter = NGRAM  # beside the heads that were named
            elif drafter == ours.AUTO:
                drafter = found_name = found(target, located(target), _revision(values))
        made = make({**values, "target": target, "drafter": drafter, "heads": heads})
        is_by_default = is_unnamed and target == ours.SMOLLM2
        BaseModel.__setattr__(made, "_is_smollm2_by_default", is_by_default)
        BaseModel.__setattr__(made, "_found", found_name)
        return made

    @model_validator(mode="after")
    def _revisions_have_a_meaning(self, info: ValidationInfo) -> Self:
        models = {
            "target_revision": self.target,
            "drafter_revision": self.drafter,
            "heads_revision": self.heads,
        }
        for name, model in models.items():
            is_copied = name == "drafter_revision" and model == NGRAM
            is_own = is_copied or is_mtp(model) or not model or is_folder(model)
            if getattr(self, name) is None or not is_own:
                continue
            what = f"{model} is in the target's files" if is_mtp(model) else f"{model} is a folder"
            what = "n-gram drafts come from no model" if is_copied else what
            what = what if model else "there are no heads"
            raise ConfigurationError(
                f"{named(name, info)} is for a model on the hub, but {what}; leave it out"
            )
        return self

    @property
    def has_default_heads(self) -> bool:
        """True if the heads are those that draft for this target if none are named.

        Under classical rules, by which one source alone may draft, n-grams do then.
        """
        is_ours = self.heads != "" and self.heads == ours.heads_of(ours.DEFAULT, self.target)
        return is_ours and self.drafter == NGRAM

    @property
    def has_our_drafter(self) -> bool:
        """True if the target is one that comes with a drafter (`named.py`)."""
        if path_of(self.target).resolve() == MODELS / "target":
            return True
        return ours.is_there() and self.target == located(ours.SMOLLM2)

    @property
    def chosen(self) -> list[str]:
        """Return a line that says which model is used, if nobody has named it and it may differ."""
        if not self._is_smollm2_by_default:
            return []
        return [f"model: {ours.NAME} ({called('target')} {ours.TOY} is the toy pair)"]

    @property
    def found_drafter(self) -> list[str]:
        """Return a line that says what drafts, if it was found for the target (`found.py`)."""
        if not self._found or self._found != self.drafter:
            return []
        return [f"drafter: {self._drafter_in_words} ({called('drafter')} names another)"]

    @property
    def _drafter_in_words(self) -> str:
        if is_mtp(self.drafter):
            return f"{self.drafter}, the layer in the target's checkpoint"
        if self.drafter == NGRAM:
            return f"{NGRAM}, since no drafter came with the target"
        return f"{self.drafter}, found for the target"

    # A checkpoint's files are read only where its kind matters.

    @property
    def drafter_head(self) -> HeadKind | None:
        """Return the drafter's kind of head; None: it is no head, or its kind is not known."""
        return None if self.drafter == NGRAM else kind_of(self.drafter, self.drafter_revision)

    @property
    def drafter_is_head(self) -> bool:
        """True if the drafter is a head. Its node checks this again.

        Of files that are not there yet: True if `drafter_home` is given.
        """
        if self.drafter_head is not None:
            return True
        return self.drafter_home != "" and not self._is_whole_model(self.drafter)

    @property
    def has_draft_process(self) -> bool:
        """True if drafts come from a drafter process, with a draft model or a head."""
        return self.drafter != NGRAM and not self._drafts_at_home

    @property
    def drafts_in_other_words(self) -> bool:
        """True if the drafter is known to have another tokenizer than the target."""
        if not self.has_draft_process or self.drafter_is_head:
            return False
        return differ(self.target, self.drafter)

    @property
    def home_drafter(self) -> tuple[str, str | None] | None:
        """Return name and revision of the drafter in the target's process; None: there is none."""
        if self._drafts_at_home:
            return self.drafter, self.drafter_revision
        return (self.heads, self.heads_revision) if self.heads else None

    @property
    def _drafts_at_home(self) -> bool:
        """True if the drafter runs in the target's process."""
        if self.drafter_home:
            return self.drafter_home == "target"
        return self.drafter_head in (HeadKind.MEDUSA, HeadKind.MTP, HeadKind.DFLASH)

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the target's layers whose hidden states the heads will read, as far as known."""
        drafter = (self.drafter, self.drafter_revision) if self.drafter_is_head else None
        found: list[int] = []
        for head in (drafter, self.home_drafter):
            if head is not None and not self._is_whole_model(head[0]):
                wanted = layers_of(*head, self.target, self.target_revision)
                found += [layer for layer in wanted if layer not in found]
        return tuple(found)

    def check_heads(self) -> None:
        """Raise ConfigurationError if heads cannot be used with these settings."""
        if self.drafter_home and self.drafter == NGRAM:
            raise ConfigurationError(
                f"{called('drafter_home')} says where a draft model or a head ({KINDS}) runs, and "
                "n-gram drafts come from no model; leave it out"
            )
        if self.heads and self._drafts_at_home:
            raise ConfigurationError(
                f"the drafter, {self.drafter}, and the heads, {self.heads}, would both run in the "
                "target's process; give one of them"
            )
        if self.heads and self._is_whole_model(self.heads):
            raise ConfigurationError(
                f"{called('heads')}: {self.heads} is none of {KINDS}; a draft model is for "
                f"{called('drafter')}"
            )

    def _is_whole_model(self, name: str) -> bool:
        """True if a model is known not to be a head; False if its files cannot be read."""
        revision = self.drafter_revision if name == self.drafter else self.heads_revision
        return is_whole_model(name, revision)
