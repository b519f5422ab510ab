"""A server on the embedded pair, in a thread of this process, and clients for it."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from coordinator.api.async_llm import AsyncLLM
from coordinator.api.config import SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.cli.serve import head_of, journal_of
from coordinator.http.serving import Named, Server, application, limits_of, listen, place_of
from coordinator.http.settings import ServeConfig

LIMIT_S = 60.0
AWAKE = SpeculationConfig(policy="pipelined", adaptive=False)  # the drafter never rests


@dataclass(slots=True)
class Served:
    """A server that runs: where, and what is behind it."""

    url: str
    llm: AsyncLLM
    server: Server
    headers: dict[str, str] = field(default_factory=dict)

    def client(self) -> httpx.Client:
        """A client whose waits have a limit."""
        return httpx.Client(base_url=self.url, timeout=LIMIT_S, headers=self.headers)

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Ask once."""
        with self.client() as client:
            return client.post(path, json=body)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        response = self.post("/v1/completions", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All chunks of a stream, which must end as streams do."""
        with (
            self.client() as client,
            client.stream("POST", path, json={**body, "stream": True}) as response,
        ):
            assert response.status_code == 200, response.read()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    @contextmanager
    def writing(self, prompt: Any, **body: Any) -> Iterator[Iterator[str]]:
        """The events of a stream, as they come, without the marks of server-sent events."""
        asked = {"prompt": prompt, "stream": True, "ignore_eos": True, **body}
        with (
            self.client() as client,
            client.stream("POST", "/v1/completions", json=asked) as response,
        ):
            assert response.status_code == 200, response.read()
            lines = response.iter_lines()
            yield (line.removeprefix("data: ") for line in lines if line)

    def wait_until_idle(self) -> None:
        """Until no text is left anywhere: queue, coordinator, nodes."""
        deadline = time.monotonic() + LIMIT_S
        while not self.is_idle():
            assert time.monotonic() < deadline, "texts are left over"
            time.sleep(0.02)

    def is_idle(self) -> bool:
        """Whether neither the queue nor the coordinator has a text."""
        admission = self.llm.admission
        texts = self.llm.pair.service.num_texts
        return not (admission.num_running or admission.num_waiting or texts or self.llm.request_ids)


def client_of(served: Served) -> openai.OpenAI:
    """OpenAI's own client, for a `with` statement."""
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=LIMIT_S)


@contextmanager
def serving(
    pair: Pair,
    *,
    keys: Sequence[str] = (),
    max_queue: int = 64,
    speculation: SpeculationConfig = SpeculationConfig(),  # noqa: B008
    **settings: Any,
) -> Iterator[Served]:
    """Serve a pair, which goes on afterwards; with `journal` in the settings answers are kept."""
    config = ServeConfig(port=0, max_queue=max_queue, **settings)
    llm = AsyncLLM.of(pair, speculation, max_queue)
    with listen(config) as bound, journal_of(config) as journal:
        if journal is not None:
            journal.open(head_of(pair))
        door, work = limits_of(config)
        named = Named("embedded", "1.2.3")
        app, begin = application(llm, named, config, keys, work, journal)
        server = Server(app, llm, config, door, work)

        async def serve() -> None:
            begin()
            await server.serve(sockets=[bound])

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        try:
            yield Served(place_of(bound), llm, server, headers)
        finally:
            server.should_exit = True
            thread.join(LIMIT_S)
            assert not thread.is_alive()
