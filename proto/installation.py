"""Checks that this Python can run Slipstream, before anything else is loaded.

Also loaded by Pythons that are much too old for the rest: it uses no newer syntax or library.
"""

import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

# The folder that holds this package and its neighbours: the checkout, or, where a wheel was
# installed, a folder of the package `slipstream` (docs/adr/0001). Nodes are started there.
ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "models"  # the embedded pair and its heads
IS_CHECKOUT = ROOT.name != "_root"
OLDEST, WANTED = (3, 11), "3.11 or later"
SYSTEM = "linux"  # as in sys.platform
VERSION = (sys.version_info[0], sys.version_info[1])
SHOWN = 3  # most missing packages that are named
# Imported so early that the importing program could not report yet that they are missing.
_SHARED = ("msgpack", "zmq", "typer")
COORDINATOR = (*_SHARED, "pydantic", "rich", "jinja2", "tokenizers", "huggingface_hub")
NODE = (*_SHARED, "numpy", "safetensors", "gguf", "torch", "transformers")
ALL = (*COORDINATOR, *(name for name in NODE if name not in COORDINATOR))
EXIT_UNUSABLE = 2
COMMAND = "slipstream"  # as the program is called where it is installed
# What `python -m` runs the command line as, the usual one first.
MODULES = ("coordinator", COMMAND, "lab.experiments")
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")  # options of Python
# Slipstream is on no package index: somebody else could offer a package under its name there.
PLACEHOLDER, MEANT = "PATH-OR-WHEEL", "a checkout of Slipstream, or its wheel"


def refusal(
    program: str,
    needed: "tuple[str, ...]",
    version: "tuple[int, int]" = VERSION,
    platform: str = sys.platform,
) -> str:
    """Return one line why this Python cannot run the program and what to do; "" if it can.

    program   as it is typed behind `python -m`; "": it is not a program of ours
    needed    names of the packages that must be installed
    platform  as in `sys.platform`
    """
    if platform != SYSTEM:
        return f"Slipstream runs on Linux only, and this system is {platform}"
    is_old = version < OLDEST
    missing = [] if is_old else [name for name in needed if find_spec(name) is None]
    if not is_old and not missing:
        return ""
    number = ".".join(map(str, version))
    what = f"is version {number}, and {WANTED} is needed"
    if missing:
        more = len(missing) - SHOWN
        what = f"lacks {', '.join(missing[:SHOWN])}" + (f" and {more} more" if more > 0 else "")
    if not IS_CHECKOUT:
        return f"this Python ({sys.executable}) {what}; {how_to_install()}"
    own = ROOT / ".venv" / "bin" / "python"
    place = own.relative_to(ROOT) if Path.cwd() == ROOT else own
    # If this is already the Python in .venv, the setup was cut short and must run again.
    is_set_up = own.exists() and Path(sys.prefix) != own.parents[1]
    where = "" if Path.cwd() == ROOT else f" in {ROOT}"
    setup = "" if is_set_up else f"run `make setup`{where}, then "
    command = f"{place} -m {program}" if program else str(place)
    return f"this Python ({sys.executable}) {what}; {setup}use {command}"


def program() -> str:
    """Return what to type to start the command line, as the user has called this process.

    That is `slipstream`, or `python -m coordinator` with the user's own word for Python. A process
    that is no program of ours gets the usual name.
    """
    python, module, script = _called()
    if script:
        return COMMAND if shutil.which(COMMAND) == script else _as_typed(script, COMMAND)
    if not module and not IS_CHECKOUT:
        return COMMAND
    return f"{_as_typed(python, 'python')} -m {module if module in MODULES else MODULES[0]}"


def node_program(role: str) -> str:
    """Return what to type to start a node of this role by hand, as this process was called."""
    own = program()
    if " -m " not in own:
        return f"{own}-{role}"
    return f"{own.split(' -m ')[0]} -m {role}_node" if IS_CHECKOUT else f"{COMMAND}-{role}"


def _called() -> "tuple[str, str, str]":
    """Return Python as it was typed, the module behind -m, and our own script; "" if not known.

    `slipstream-target` and `slipstream-drafter` count as `slipstream`, which lies beside them.
    """
    python, *words = list(getattr(sys, "orig_argv", [])) or ["python"]
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "-m":
            module = words[0] if words else ""
            is_ours = module in (*MODULES, "target_node", "drafter_node")
            return (python, module, "") if is_ours else ("python", "", "")
        if option in _WITH_VALUE and words:
            words.pop(0)
    script = Path(words[0]) if words else Path()
    if script.name.partition("-")[0] != COMMAND:
        return "python", "", ""
    return "python", "", str(script.with_name(COMMAND))


def _as_typed(path: str, elsewhere: str) -> str:
    """Return a path as short as it can be typed here; `elsewhere` if it lies in another folder."""
    if not path.startswith("/"):
        return path
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return elsewhere


def missing(package: str, extra: str) -> str:
    """Return words for a package that is not installed, which only some commands need.

    extra  of Slipstream, that brings it
    """
    return f"the package `{package}`, which comes with the extra `{extra}`; {how_to_install(extra)}"


def how_to_install(extra: str = "") -> str:
    """Return what to type so that Slipstream is there with all that it needs.

    extra  of Slipstream, that is needed too
    """
    if IS_CHECKOUT:
        own = ROOT / ".venv"
        is_there = Path(sys.prefix) == own or not (own / "bin" / "python").exists()
        where = "" if Path.cwd() == ROOT else f" in {ROOT}"
        return f"run `make setup`{where}" + ("" if is_there else f", then use {own}/bin/python")
    source = _installed_from()
    wanted = f"{source or PLACEHOLDER}[{extra}]" if extra else source or PLACEHOLDER
    hint = "" if source else f" ({PLACEHOLDER}: {MEANT})"
    # Always in quotes, because shells read the brackets; a path may have a quote in it.
    quoted = f"'{wanted}'" if "'" not in wanted else shlex.quote(wanted)
    return f"run `{sys.executable} -m pip install {quoted}`{hint}"


def _installed_from() -> str:
    """Return the path of the wheel or folder that Slipstream was installed from; "": unknown."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        told = json.loads(distribution("slipstream").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError, OSError):
        return ""
    url = urlsplit(str(told.get("url", "")))
    path = unquote(url.path)
    return path if url.scheme == "file" and Path(path).exists() else ""


def another_package(name: str) -> str:
    """Return where a loaded module of this name comes from if it is not ours; "" if it is."""
    loaded = sys.modules.get(name)
    folders = [Path(folder).resolve() for folder in getattr(loaded, "__path__", ())]
    if loaded is None or ROOT / name in folders:
        return ""
    return f"from {folders[0] if folders else getattr(loaded, '__file__', 'somewhere')}"


def may_run(program: str, needed: "tuple[str, ...]") -> bool:
    """True if this Python can run the program; if not, the reason is printed to stderr."""
    line = refusal(program, needed)
    if line:
        sys.stderr.write(f"error: {line}\n")
    return not line


def check_programs(needed: "tuple[str, ...]" = ALL) -> None:
    """End the process with an error line if it is a `python -m` program that cannot run here.

    Called by packages that hold programs, before anything else of them is imported. While Python
    looks for the module behind -m, sys.argv[0] is "-m" in place of the program's name.
    """
    words = getattr(sys, "orig_argv", [])
    if sys.argv[:1] == ["-m"] and "-m" in words:
        program = words[words.index("-m") + 1]
        if not may_run(program, needed):
            sys.exit(EXIT_UNUSABLE)
