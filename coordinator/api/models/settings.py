"""Which models draft and verify, and where heads run; a part of `PairConfig`."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from coordinator.api.config_base import Frozen, named
from coordinator.api.models.heads import find_config, kind_of, layers_of
from proto.errors import ConfigurationError
from proto.head_kinds import HeadKind
from proto.installation import MODELS
from proto.system import is_folder, path_of

NGRAM = "ngram"  # in place of a draft model: the target drafts from what was written before
KINDS = "Medusa, EAGLE, EAGLE-3"


def _located(model: str) -> str:
    """A folder by its whole path: nodes run in the root of the repository, wherever we do."""
    is_name = model in ("", NGRAM) or not is_folder(model)
    return model if is_name else str(path_of(model).absolute())


Name = Annotated[str, Field(min_length=1)]
Model = Annotated[Name, AfterValidator(_located)]
Home = Literal["", "own", "target"]


class ModelsConfig(Frozen):
    """The target, and what drafts for it."""

    target: Annotated[
        Model,
        Field(
            description="The target: a folder, or a name on the hub. Weights plain or quantised "
            "(FP8, GPTQ, AWQ, NF4)."
        ),
    ] = str(MODELS / "target")
    drafter: Annotated[
        Model,
        Field(
            description=f"The drafter: as --target. Or a head of the target ({KINDS}), or ngram: "
            "no model; the target drafts what followed its last tokens before (prompt lookup)."
        ),
    ] = str(MODELS / "drafter")
    target_revision: Annotated[Name | None, Field(description="Branch, tag or commit.")] = None
    drafter_revision: Annotated[Name | None, Field(description="Branch, tag or commit.")] = None
    drafter_home: Annotated[
        Home,
        Field(
            description="Where a head as --drafter runs. own: a process, on --drafter-device; what "
            "it reads comes over the wire. target: in the target's process. Default: own for "
            "EAGLE, target for Medusa."
        ),
    ] = ""
    heads: Annotated[
        str,
        AfterValidator(_located),
        Field(
            description="Heads that draft too, in the target's process. A folder or a name; "
            f"{KINDS}."
        ),
    ] = ""
    heads_revision: Annotated[Name | None, Field(description="Branch, tag or commit.")] = None

    @model_validator(mode="after")
    def _revisions_have_a_meaning(self, info: ValidationInfo) -> Self:
        models = {
            "target_revision": self.target,
            "drafter_revision": self.drafter,
            "heads_revision": self.heads,
        }
        for name, model in models.items():
            is_copied = name == "drafter_revision" and model == NGRAM
            if getattr(self, name) is None or not (is_copied or not model or is_folder(model)):
                continue
            what = "n-gram drafts come from no model" if is_copied else f"{model} is a folder"
            what = what if model else "there are no heads"
            raise ConfigurationError(
                f"{named(name, info)} is for a model on the hub, but {what}; leave it out"
            )
        return self

    @property
    def is_embedded(self) -> bool:
        """Whether the target is the one that ships, for which there is a drafter."""
        return path_of(self.target).resolve() == MODELS / "target"

    # What a checkpoint is, is asked of its files only where it matters.

    @property
    def drafter_head(self) -> HeadKind | None:
        """Of which kind the drafter is, if it is a head and that can be said."""
        return None if self.drafter == NGRAM else kind_of(self.drafter, self.drafter_revision)

    @property
    def drafter_is_head(self) -> bool:
        """Whether it is one. Who says where it runs is taken at his word: its node looks again."""
        return self.drafter_home != "" or self.drafter_head is not None

    @property
    def has_draft_model(self) -> bool:
        """Whether drafts come from a process of their own: a draft model's, or a head's."""
        return self.drafter != NGRAM and not self._drafts_at_home

    @property
    def home_heads(self) -> tuple[str, str | None] | None:
        """The heads in the target's process: name and revision; None: there are none."""
        if self._drafts_at_home:
            return self.drafter, self.drafter_revision
        return (self.heads, self.heads_revision) if self.heads else None

    @property
    def _drafts_at_home(self) -> bool:
        """Whether the drafter is a head in the target's process."""
        if self.drafter_home:
            return self.drafter_home == "target"
        return self.drafter_head is HeadKind.MEDUSA

    @property
    def layers(self) -> tuple[int, ...]:
        """Of which layers of the target features will be asked for, as far as that is known."""
        drafter = (self.drafter, self.drafter_revision) if self.drafter_is_head else None
        found: list[int] = []
        for head in (drafter, self.home_heads):
            if head is not None:
                wanted = layers_of(*head, self.target, self.target_revision)
                found += [layer for layer in wanted if layer not in found]
        return tuple(found)

    def check_heads(self) -> None:
        """Raises ConfigurationError if heads cannot be used like this."""
        if self.drafter_home and (self.drafter == NGRAM or self._is_whole_model(self.drafter)):
            raise ConfigurationError(
                f"drafter_home says where a head ({KINDS}) runs, and the drafter, {self.drafter}, "
                "is none; leave it out"
            )
        if self.heads and self._drafts_at_home:
            raise ConfigurationError(
                f"the drafter, {self.drafter}, and the heads, {self.heads}, would both run in the "
                "target's process; give one of them"
            )
        if self.heads and self._is_whole_model(self.heads):
            raise ConfigurationError(
                f"heads: {self.heads} is none of {KINDS}; a draft model is for drafter"
            )

    def _is_whole_model(self, name: str) -> bool:
        """Whether it is known to be no head; of what cannot be looked at its node says more."""
        revision = self.drafter_revision if name == self.drafter else self.heads_revision
        return find_config(name, revision) is not None and kind_of(name, revision) is None
