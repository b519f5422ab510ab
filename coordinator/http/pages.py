"""The page at `/`: its files, and the headers that keep a browser from loading anything else."""

from functools import cache
from pathlib import Path

from starlette.responses import Response

FOLDER = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The files by the paths at which they are served; they need no key, because they hold no secret.
FILES = {
    "/": "index.html",
    **{
        f"/page/{name}": name
        for name in (
            "style.css",
            "icon.svg",
            "main.js",
            "stream.js",
            "answer.js",
            "figures.js",
            "timeline.js",
            "nodes.js",
        )
    },
}
# Everything comes from this server, nothing is inline, and no other page may frame this one.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # so that a newer release is seen at once
}


@cache
def _content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def page_file(path: str) -> Response:
    """Return the answer to a request for one of FILES."""
    name = FILES[path]
    return Response(_content(name), media_type=KINDS[Path(name).suffix], headers=HEADERS)
