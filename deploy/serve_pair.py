"""A replica of Ray Serve: holds one server of Slipstream, in a process of its own; no ray here.

The server is `slipstream serve`: a target, a drafter and a coordinator, whose texts survive the
death of either model. It listens at loopback alone, and wants an API key: that of a client, or this
replica's own. What comes in goes to it as it is (`ask`). When the server ends, the replica ends, so
that Ray Serve starts another one; when the replica ends, however it does, the server ends.

The code of this file is sent to the host and runs before the project can be imported there.
"""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

from deploy.supervisor import forget_thread_limit, root_on

URL = re.compile(r" is served at (http://\S+)/v1")
LOAD_LIMIT_S = 3600.0  # a server says itself what it waits for; nothing loads for longer
HEALTH_LIMIT_S = 1.0
AWAY = 0  # in place of a status
LIVES_ON_S = 5.0  # how much longer than its own limit a server may take to end
# The kernel ends the server when the thread that started it ends, and with it its process.
STUB = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "sys.exit() if os.getppid() != int(sys.argv[1]) else None\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


class PairReplica:
    """One server, for as long as this object lives.

    version  of Slipstream, which has to be the one of this host
    words    flags of `serve`
    keys     API keys of clients; empty: none is wanted of them
    drain_s  how long texts may go on after the server was told to end

    Raises RuntimeError: the server cannot be started; it says why.
    """

    def __init__(
        self, version: str, words: Sequence[str], keys: Sequence[str], drain_s: float
    ) -> None:
        root_on(socket.gethostname(), version)
        import httpx

        forget_thread_limit()
        self._key = secrets.token_hex(16)
        self._drain_s = drain_s
        self._url = ""
        self._last_line = ""
        self._is_ending = False
        self._process: subprocess.Popen[str] | None = None
        self._is_known = threading.Event()  # the server answers, or has ended
        # This thread lives as long as the server: its end would be the server's.
        given = tuple(words), (self._key, *keys)
        holding = threading.Thread(target=self._hold, args=given, name="server")
        holding.daemon = True
        holding.start()
        if not self._is_known.wait(LOAD_LIMIT_S) or not self._url:
            self._end(0.0)
            raise RuntimeError(self._last_line or "the server does not start, and says nothing")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(
            base_url=self._url,
            headers={"authorization": f"Bearer {self._key}"},  # a client's own goes before it
            timeout=httpx.Timeout(None, connect=5.0),
            limits=limits,
            trust_env=False,
        )

    def _hold(self, words: tuple[str, ...], keys: tuple[str, ...]) -> None:
        try:
            self._process = process = _started(words, keys)
        except OSError as error:
            self._last_line = f"the server cannot be started: {error.strerror or error}"
            self._is_known.set()
            return
        assert process.stdout is not None
        for line in process.stdout:
            _say(line)
            self._last_line = line.strip() or self._last_line
            if (found := URL.search(line)) and not self._url:
                self._url = found[1]
                self._is_known.set()
        process.wait()
        self._is_known.set()
        if self._url and not self._is_ending:
            _say(f"the server has ended with status {process.returncode}\n")
            os._exit(1)  # Ray Serve sees it at once, and starts another replica

    async def check_health(self) -> None:
        """Raise RuntimeError if the server does not answer; Ray Serve asks about once a second."""
        import httpx

        try:
            await self._client.get("/health", timeout=HEALTH_LIMIT_S)
        except httpx.HTTPError as error:
            raise RuntimeError(f"the server does not answer ({type(error).__name__})") from None

    async def is_well(self) -> bool:
        """Return True if the server takes requests now."""
        import httpx

        try:
            answer = await self._client.get("/health", timeout=HEALTH_LIMIT_S)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    async def ask(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> AsyncIterator[Any]:
        """Pass a request to the server; yield (status, headers) first, then the answer's bytes.

        Status AWAY: the server is not there, so it has not got the request. Raises RuntimeError
        where the connection breaks.
        """
        import httpx

        try:
            async with self._client.stream(
                method, target, headers=list(headers), content=body
            ) as answer:
                yield answer.status_code, list(answer.headers.multi_items())
                async for part in answer.aiter_raw():
                    yield part
        except httpx.ConnectError:
            yield AWAY, []
        except httpx.HTTPError as error:
            # In words: nobody has to be able to import httpx to read it.
            raise RuntimeError(f"the server broke off ({type(error).__name__})") from None

    def _end(self, limit_s: float) -> None:
        self._is_ending = True
        if (process := self._process) is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(limit_s + LIVES_ON_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __del__(self) -> None:
        """End the server: its texts have `drain_s`. Ray Serve calls this at the replica's end."""
        self._end(self._drain_s)


def _started(words: tuple[str, ...], keys: tuple[str, ...]) -> "subprocess.Popen[str]":
    """Start a server, which this thread's end will end. Raises OSError."""
    # A file without a name: nobody else can read the keys, and nothing of it stays behind.
    file = os.memfd_create("api-keys")
    try:
        os.fchmod(file, 0o600)
        os.write(file, "\n".join(keys).encode())
        own = ("--host", "127.0.0.1", "--port", "0", "--forwarded-allow-ips", "127.0.0.1")
        serve = ("-m", "slipstream", "serve", *own, "--api-key-file", f"/dev/fd/{file}", *words)
        return subprocess.Popen(
            [sys.executable, "-c", STUB, str(os.getpid()), *serve],
            env={name: one for name, one in os.environ.items() if name != "SLIPSTREAM_API_KEY"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(file,),
            text=True,
            errors="replace",
        )
    finally:
        os.close(file)


def _say(line: str) -> None:
    """Write a line into the replica's log, which Ray keeps."""
    sys.stdout.write(line)
    sys.stdout.flush()
