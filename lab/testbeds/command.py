"""`python -m coordinator testbed`: a model that costs what a large one costs, made of a small one.

The small model is inflated (`inflate.py`): it generates the same text, in the shape of a large
model whose weights are not at hand. Its vocabulary stays small; if the shape is that of a named
model, layers are added that cost as much as the head for the vocabulary of that model.
"""

import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coordinator.cli.wrapping import continued
from coordinator.cli.writers import WIDTH
from lab.testbeds.shapes import LIKE, Like, Sizes
from proto.errors import ConfigurationError, OutputError
from proto.installation import MODELS, program

if TYPE_CHECKING:  # torch is imported only when the command runs
    from lab.testbeds.inflate import Shape

NUM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LAYERS_IN_MEMORY, NUM_COPIES = 4, 2  # layers of a shard; copies of it in memory while it is written
BESIDES_BYTES = 10**9  # memory of torch itself
LOADING_COPIES = 3  # copies of the weights on a CPU, measured: as read, packed, for the check
MEMORY = Path("/proc/meminfo")


def _size(what: str) -> Any:
    """Return a flag that sets this size of the target."""
    return typer.Option(min=1, max=1 << 17, help=f"{what} of the target. Default: --like's.")


HiddenSize = Annotated[int | None, _size("Width")]
NumLayers = Annotated[int | None, _size("Number of layers")]
IntermediateSize = Annotated[int | None, _size("Width of the feed-forward blocks")]
NumHeads = Annotated[int | None, _size("Number of attention heads")]
NumKvHeads = Annotated[int | None, _size("Number of key and value heads")]
HeadDim = Annotated[int | None, _size("Width of an attention head")]
Seed = Annotated[
    int,
    typer.Option(
        min=0,
        help="Seed of the added random weights. They make the model larger and have no effect on "
        "its texts.",
    ),
]


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that is to be made from another.

    num_in_place  layers that are added in place of the head of a larger vocabulary
    """

    source: Path
    folder: Path
    shape: "Shape"
    num_in_place: int
    vocab_size: int
    is_tied: bool
    dtype: str

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of the new model."""
        num_ends = 1 if self.is_tied else 2
        width = self.shape.hidden_size
        return (
            self.shape.num_layers * layer_parameters(self.shape)
            + num_ends * self.vocab_size * width
            + width
        )

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weights, on disk and in memory."""
        return self.num_parameters * NUM_BYTES[self.dtype]

    @property
    def making_bytes(self) -> int:
        """Return the bytes of memory that are needed at most to make the model."""
        shard = max(
            LAYERS_IN_MEMORY * layer_parameters(self.shape),
            2 * self.vocab_size * self.shape.hidden_size,
        )
        return NUM_COPIES * shard * NUM_BYTES[self.dtype] + BESIDES_BYTES

    @property
    def loading_bytes(self) -> int:
        """Return the bytes of memory that a node needs at most to load the model on a CPU."""
        return LOADING_COPIES * self.num_bytes

    @property
    def words(self) -> str:
        """Return a description of the new model in a few lines."""
        shape = self.shape
        layers = f"{shape.num_layers} layers"
        if self.num_in_place:
            layers += f" ({self.num_in_place} of them in place of a larger head)"
        return (
            f"{self.folder}: {_short(self.num_parameters)} parameters in {self.dtype}\n"
            f"  {layers},\n"
            f"  {shape.hidden_size} wide, {shape.num_heads} heads of {shape.head_dim}, "
            f"{shape.num_kv_heads} key and value heads\n"
            f"  {_gb(self.num_bytes)} on disk; takes up to {_gb(self.making_bytes)} of memory "
            f"to make,\n  and about {_gb(self.loading_bytes)} to load in a node on a CPU"
        )


def layer_parameters(shape: "Shape") -> int:
    """Return the number of parameters of one layer."""
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return shape.hidden_size * (attention + 3 * shape.intermediate_size + 2)


def testbed(
    *,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the models. It is new, or empty.")
    ],
    like: Annotated[
        Like | None,
        typer.Option(
            metavar="NAME",
            help=f"The target gets the shape of this model.\n{', '.join(LIKE)}.\n"
            "The flags for sizes change single numbers of it.",
        ),
    ] = None,
    drafter_like: Annotated[
        Like | None,
        typer.Option(
            metavar="NAME",
            help="Make a drafter with the shape of this model, too. Default: no drafter is made.",
        ),
    ] = None,
    target: Annotated[
        Path, typer.Option(metavar="DIR", help="The small model that becomes the target.")
    ] = MODELS / "target",
    drafter: Annotated[
        Path, typer.Option(metavar="DIR", help="The small model that becomes the drafter.")
    ] = MODELS / "drafter",
    hidden_size: HiddenSize = None,
    num_hidden_layers: NumLayers = None,
    intermediate_size: IntermediateSize = None,
    num_attention_heads: NumHeads = None,
    num_key_value_heads: NumKvHeads = None,
    head_dim: HeadDim = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            metavar="NAME",
            help="Number type of the weights: float32, bfloat16 or float16. In float32 the model "
            "writes exactly the small model's texts. Default: that of the small model's weights.",
        ),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Make a model that costs what a large one costs.

    It takes as long as a large one, and writes what a small one writes.
    """
    given = Sizes(
        hidden_size,
        num_hidden_layers,
        intermediate_size,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
    )
    if like is None and given == Sizes():
        raise ConfigurationError(f"give --like ({', '.join(LIKE)}) or sizes as --hidden-size")
    _check_folder(out)
    plans = [_plan(target, out / "target", like, given, dtype)]
    if drafter_like is not None:
        plans.append(_plan(drafter, out / "drafter", drafter_like, Sizes(), dtype))
    for plan in plans:
        typer.echo(plan.words)
    check_room(plans, out, typer.echo)
    for plan in plans:
        started = monotonic()
        make(plan, seed)
        typer.echo(f"{plan.folder} made in {monotonic() - started:.0f} s")
    folders = " ".join(f"--{plan.folder.name} {shlex.quote(str(plan.folder))}" for plan in plans)
    command = f'{program()} generate {folders} "class Codec(codecs.Codec):"'
    typer.echo("\n".join(continued(command, WIDTH)))


def _check_folder(out: Path) -> None:
    """Raise ConfigurationError if the folder exists and is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"--out: {out} exists and is not empty; name another folder")


def _plan(
    source: Path, folder: Path, like: Like | None, given: Sizes, dtype: str | None
) -> PlannedModel:
    """Return the plan of a model. Raises ConfigurationError if the source cannot grow to its shape.

    given  sizes that replace those of the shape `like`
    """
    from lab.testbeds.inflate import Shape, check_growth, read_config, shape_of, stored_dtype

    try:
        config = read_config(source)
        old, named = shape_of(config), LIKE[like] if like is not None else Sizes()
        shape = Shape(
            given.hidden_size or named.hidden_size or old.hidden_size,
            given.intermediate_size or named.intermediate_size or old.intermediate_size,
            given.num_hidden_layers or named.num_hidden_layers or old.num_layers,
            given.num_attention_heads or named.num_attention_heads or old.num_heads,
            given.num_key_value_heads or named.num_key_value_heads or old.num_kv_heads,
            given.head_dim or named.head_dim or old.head_dim,
        )
        num_in_place = 0
        if named.vocab_size is not None and given.num_hidden_layers is None:
            missing = max(0, named.vocab_size - config.vocab_size) * shape.hidden_size
            num_in_place = round(missing / layer_parameters(shape))
            shape = replace(shape, num_layers=shape.num_layers + num_in_place)
        check_growth(old, shape)
        dtype = dtype or stored_dtype(source)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    return PlannedModel(
        source,
        folder,
        shape,
        num_in_place,
        config.vocab_size,
        bool(config.tie_word_embeddings),
        dtype,
    )


def check_room(plans: list[PlannedModel], out: Path, warn: Callable[[str], object]) -> None:
    """Raise ConfigurationError if disk or memory is too small to make the models.

    warn  called with a line of text if memory is too small to load them
    """
    above = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    needed, free = sum(plan.num_bytes for plan in plans), shutil.disk_usage(above).free
    if needed > free:
        raise ConfigurationError(
            f"--out: {_gb(needed)} are needed and {_gb(free)} are free on the disk of {above}; "
            "name a folder on another one"
        )
    available = _available_bytes()
    if available is None:
        return
    making = max(plan.making_bytes for plan in plans)
    if making > available:
        raise ConfigurationError(
            f"to make it takes {_gb(making)} of memory, and {_gb(available)} are available; "
            "choose a smaller shape"
        )
    if sum(plan.loading_bytes for plan in plans) > available:
        warn(f"warning: {_gb(available)} of memory are available here; load it where there is more")


def _available_bytes() -> int | None:
    """Return the bytes of memory that are available; None if the system does not say."""
    if not MEMORY.exists():
        return None
    lines = (line.split() for line in MEMORY.read_text().splitlines())
    return next((int(line[1]) << 10 for line in lines if line[0] == "MemAvailable:"), None)


def make(plan: PlannedModel, seed: int) -> None:
    """Write one model; its folder is removed if that fails.

    Raises ConfigurationError, OutputError.
    """
    from safetensors import SafetensorError

    from lab.testbeds.inflate import inflate

    try:
        inflate(plan.source, plan.folder, plan.shape, seed=seed, dtype=plan.dtype)
    except BaseException as error:
        shutil.rmtree(plan.folder, ignore_errors=True)
        match error:
            case ValueError():
                raise ConfigurationError(str(error)) from error
            case OSError() | SafetensorError():
                line = " ".join(str(error).split())
                raise OutputError(
                    f"cannot write {plan.folder}: {line}; is the disk full?"
                ) from error
        raise


def _short(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
