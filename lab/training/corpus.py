"""The text that the embedded pair learns from: which files there are, and which are held out.

It has three parts, which simple rules tell apart: the standard library's training files, its
held-out files, and the sources of installed packages under permissive licences. It knows neither
tokens nor models.
"""

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path, PurePath

HELD_OUT_PERCENT = 5
# Their licences are checked again whenever they are read, since an update may change a licence.
PACKAGES = (
    *("anyio", "attrs", "charset-normalizer", "click", "execnet", "filelock", "fsspec", "h11"),
    *("httpcore2", "httpx2", "huggingface_hub", "iniconfig", "Jinja2", "jsonschema"),
    *("markdown-it-py", "MarkupSafe", "mpmath", "msgpack", "mypy", "networkx", "packaging", "pip"),
    *("pluggy", "pydantic", "pytest", "pytest-xdist", "PyYAML", "pyzmq", "referencing", "requests"),
    *("rich", "safetensors", "setuptools", "sortedcontainers", "sympy", "tokenizers", "truststore"),
    *("typer", "typing-inspection", "typing_extensions", "urllib3"),
)
PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|ISC|PSF)\b")
PACKAGE_BYTES_MAX = 1_500_000  # of each package, so that no single style dominates the corpus
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
VENDORED_FOLDERS = {"_vendor", "_vendored", "vendor", "extern", "externals", "typeshed"}
GENERATED = re.compile(r"do not (edit|modify)|auto(matically)?[- ]?generated", re.IGNORECASE)
DATA_SHARE_MAX = 0.3  # a file with a larger share of its lines in literals counts as a table
COPIED_SHARE_MAX = 0.2  # a file that shares more of its long lines with held-out files is left out
COPIED_LINE_LEN = 24  # lines of at least so many characters are compared with held-out files


def is_held_out(relative_path: str) -> bool:
    """True if this file of the standard library is held out of training, by a hash of its path."""
    return int(hash_of(relative_path)[:8], 16) % 100 < HELD_OUT_PERCENT


def library_texts(*, held_out: bool) -> list[str]:
    """Return the texts of the standard library's files, without its tests, ordered by path.

    held_out  True: the held-out files; False: the training files
    """
    root, texts = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        skipped = SKIPPED_FOLDERS.intersection(relative.parts)
        # The build settings of one installation are not source, and hold that machine's paths.
        generated = relative.name.startswith("_sysconfigdata") or "config-" in relative.parts[0]
        if not skipped and not generated and is_held_out(relative.as_posix()) == held_out:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return list(filter(None, texts))


def package_texts() -> list[str]:
    """Return the texts of the files of PACKAGES that are worth learning from.

    Left out are tests, vendored code, generated files, tables, and everything that copies a
    held-out file (`setuptools` holds a `distutils`, for example).
    """
    held_out = set().union(*map(telling_lines, library_texts(held_out=True)))
    texts: dict[str, None] = {}  # an ordered set, since packages copy files from one another
    for name in PACKAGES:
        num_bytes = 0
        for text in written_by_hand(distribution(name)):
            lines = telling_lines(text)
            if len(lines & held_out) > COPIED_SHARE_MAX * len(lines) or text in texts:
                continue
            num_bytes += len(text)
            if num_bytes > PACKAGE_BYTES_MAX:
                break
            texts[text] = None
    return list(texts)


def licence_of(package: Distribution) -> str:
    """Return the licence that a package states for itself.

    Raises: ValueError: it is not one of the permissive ones, or there is none.
    """
    headers = package.metadata
    classifiers = (c.removeprefix("License :: ") for c in headers.get_all("Classifier") or ())
    named = [c.rpartition(" :: ")[2] for c in classifiers if c.startswith("OSI Approved")]
    licence: str = headers["License-Expression"] or headers["License"] or " AND ".join(named)
    if not all(PERMISSIVE.search(part) for part in re.split(" AND | OR ", licence)):
        raise ValueError(f"{package.name} is not under a permissive licence: take it off PACKAGES")
    return licence


def written_by_hand(package: Distribution) -> Iterator[str]:
    """Yield the texts of a package's own modules, in the order of a hash of their paths.

    That order has no meaning, so PACKAGE_BYTES_MAX cuts off arbitrary files. Raises ValueError if
    the package is under no permissive licence.
    """
    licence_of(package)
    paths = sorted(map(PurePath, package.files or ()), key=lambda p: hash_of(p.as_posix()))
    for path in paths:
        skipped = (SKIPPED_FOLDERS | VENDORED_FOLDERS).intersection(path.parts)
        if path.suffix != ".py" or skipped or path.name.startswith(("test_", "conftest")):
            continue
        text = Path(str(package.locate_file(path))).read_text(encoding="utf-8", errors="replace")
        if text and not GENERATED.search(text[:1000]) and not is_table(text):
            yield text


def hash_of(text: str) -> str:
    """Return the SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def is_table(source: str) -> bool:
    """True if a file consists mostly of literals, or is no valid Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return True
    literals = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Constant)
    num_lines = sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, literals)
    )
    return num_lines > DATA_SHARE_MAX * (source.count("\n") + 1)


def telling_lines(text: str) -> set[str]:
    """Return the lines of a text that are long enough to show where they were copied from."""
    return {line for raw in text.splitlines() if len(line := raw.strip()) >= COPIED_LINE_LEN}
