"""Find the folder that holds a model's files, on this machine or on the Hugging Face hub.

The only place where the engine may use the network. Knows file names, not architectures. The hub's
library is loaded only for a name on it.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engine.checkpoint.gguf_folder import folder_of, is_gguf_file
from engine.errors import GET_AGAIN, ModelError
from proto.errors import shown
from proto.system import cannot_read

_HUB_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
_LONG = 400  # characters of a path
SMALL = ("*.json", "*.txt", "*.model", "*.jinja")  # fetched for every model, beside its weights
WANTED = (*SMALL, "*.safetensors")
WANTED_OF_HEADS = (*WANTED, "*.bin", "*.pt")
NOT_WANTED = ("original/*", "consolidated*", "*/*")
TIMEOUT_S = 5

# Function (name, revision, file patterns) -> the folder into which the files were downloaded.
Fetch = Callable[[str, str | None, Sequence[str]], Path]


def fetch(name: str, revision: str | None, wanted: Sequence[str]) -> Path:
    """Download a model's files that match the patterns `wanted` from the hub; return their folder.

    Raises:
        ModelError: the model cannot be downloaded, and there is no copy of it here.
    """
    from huggingface_hub import snapshot_download

    with hub_errors(name, revision):
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(wanted),
                ignore_patterns=list(NOT_WANTED),
                etag_timeout=TIMEOUT_S,
            )
        )


def name_and_size(name: str, revision: str | None) -> str:
    """Return where a model lies and how large its files are, for what is kept of it.

    Raises what `find_checkpoint` raises.
    """
    folder = find_checkpoint(name, revision)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return f"{folder}, {size} bytes"


def find_checkpoint(name: str, revision: str | None) -> Path:
    """Return the folder of the model called `name`, downloading it if it is a name on the hub.

    Raises:
        ModelError: there is no such folder, it lacks config.json or safetensors, it holds an
            adapter, or the hub cannot be reached and has left no copy here.
    """
    folder = find_folder(name, revision)
    refuse_no_safetensors(name, folder)
    return folder


def refuse_no_safetensors(name: str, folder: Path) -> None:
    """Raise ModelError if a model's folder has no weights in safetensors or GGUF."""
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.gguf")):
        raise ModelError(
            f"{name}: no *.safetensors in {folder}; only safetensors and GGUF are read: "
            "convert it (save_pretrained)"
        )


def find_folder(
    name: str, revision: str | None, wanted: Sequence[str] = WANTED, fetch: Fetch = fetch
) -> Path:
    """Return the folder called `name`, downloading it if `name` is a model on the hub.

    Of a GGUF file it is a folder that is made of it (`gguf_folder.py`).

    wanted  patterns of the files to download
    fetch   function that downloads them

    Raises:
        ModelError: there is no such folder, it lacks config.json, it holds an adapter, or the hub
            cannot be reached and has left no copy here.
    """
    path = Path(os.path.expanduser(name))  # unlike Path's own, it leaves `~nobody` as it is
    if _is_folder(name, path):
        if revision is not None:
            raise ModelError(
                f"{name} is a folder, which has no revision {revision!r}; leave it out"
            )
        folder = path
    elif is_gguf_file(path):
        folder = folder_of(path)
    elif _looks_like_path(name):
        said = name if name.isprintable() and len(name) <= _LONG else shown(name)
        raise ModelError(f"{said}: no such folder; give a model's folder or its name on the hub")
    else:
        folder = fetch(name, revision, wanted)
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{folder / 'adapter_config.json'}: the folder holds an adapter; merge it into its "
            "base model (merge_and_unload, save_pretrained)"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name}: no config.json in {folder}; is it the folder of a model?")
    return folder


def _is_folder(name: str, path: Path) -> bool:
    """True if `path` is a folder. Raises ModelError if this may not be looked at."""
    try:
        return path.is_dir()
    except PermissionError as error:
        raise ModelError(f"{name}: cannot be looked at: {cannot_read(error, GET_AGAIN)}") from error
    except (OSError, ValueError):  # for example, the name is too long
        return False


def _looks_like_path(name: str) -> bool:
    """True if `name` is meant as a path, or cannot be a model's name on the hub."""
    if _HUB_NAME.fullmatch(name) is None:
        return True
    starts_like_one = name.startswith((".", "~", os.sep)) or name.endswith(os.sep)
    return starts_like_one or Path(name).exists()


@contextlib.contextmanager
def hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """While inside, turn errors of the hub's library into a ModelError of one line."""
    import httpx2
    from huggingface_hub import errors as hub

    try:
        yield
    except hub.GatedRepoError as error:
        raise ModelError(f"{name}: accept its terms on the hub, then set HF_TOKEN") from error
    except hub.RevisionNotFoundError as error:
        raise ModelError(f"{name}: the hub has no revision {revision!r} of it") from error
    except hub.RepositoryNotFoundError as error:
        raise ModelError(f"{name}: no such folder here and no such model on the hub") from error
    except (hub.LocalEntryNotFoundError, httpx2.TransportError) as error:
        raise ModelError(
            f"{name}: no such folder here, and the hub cannot be reached; give a local folder"
        ) from error
    except (hub.HfHubHTTPError, OSError, ValueError) as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{name}: cannot be fetched from the hub: {first[0][:160]}") from error
