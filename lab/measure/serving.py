"""What many clients get of a running server, with speculation and without it.

    python -m coordinator serve --port 8000            # in another terminal
    python -m lab.measure.serving --url http://127.0.0.1:8000 --clients 1,4,16,64 --seconds 60

Each number of clients is measured in slices that alternate between speculation as the server has it
and plain decoding (`speculative.enabled` false), on the same server with the same lanes. A client
asks for one streamed completion after another. Tokens count in the slice in which they came.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from lab.experiments.surroundings import machine

PROMPTS = Path(__file__).resolve().parents[1] / "experiments" / "prompts.jsonl"
LIMIT_S = 120.0  # for any answer
NUM_SLICES = 6  # of each number of clients, half of them plain


@dataclass(slots=True)
class Slice:
    """The sums measured in one span of time: tokens, texts, errors, latencies."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_texts: int = 0
    num_errors: int = 0
    first_s: list[float] = field(default_factory=list)  # request to first token
    between_s: list[float] = field(default_factory=list)  # from chunk to chunk, by token

    def add(self, other: "Slice") -> None:
        """Add the sums of another slice to this one."""
        self.seconds += other.seconds
        self.num_tokens += other.num_tokens
        self.num_texts += other.num_texts
        self.num_errors += other.num_errors
        self.first_s += other.first_s
        self.between_s += other.between_s

    @property
    def rate(self) -> float:
        """Return the tokens per second of all clients together; 0: no time has passed."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


class Load:
    """Clients of one server.

    texts  finished texts by (number of the request, True if without drafts), so that those of both
           kinds can be compared
    """

    def __init__(
        self,
        url: str,
        prompts: Sequence[str],
        temperature: float,
        length: int,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url
        self._prompts = prompts
        self._temperature = temperature
        self._length = length
        self._transport = transport
        self.texts: dict[tuple[int, bool], str] = {}

    @property
    def num_different(self) -> tuple[int, int]:
        """Return how many texts were written both ways, and how many of these differ."""
        both = {number for number, is_plain in self.texts if (number, not is_plain) in self.texts}
        differ = sum(self.texts[number, True] != self.texts[number, False] for number in both)
        return len(both), differ

    async def slice(self, num_clients: int, seconds: float, *, is_plain: bool, first: int) -> Slice:
        """Let `num_clients` clients ask for `seconds` seconds; return the sums of their answers.

        first  the number of the first request
        """
        made = Slice()
        numbers = iter(range(first, first + 1_000_000))
        limits = httpx.Limits(max_connections=num_clients)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=LIMIT_S, limits=limits, transport=self._transport
        ) as client:
            begun = time.perf_counter()
            until = begun + seconds

            async def ask_on() -> None:
                while time.perf_counter() < until:
                    await self._ask(client, next(numbers), made, until, is_plain=is_plain)

            await asyncio.gather(*(ask_on() for _ in range(num_clients)))
            made.seconds = seconds
        return made

    async def _ask(
        self, client: httpx.AsyncClient, number: int, made: Slice, until: float, *, is_plain: bool
    ) -> None:
        body: dict[str, Any] = {
            "prompt": self._prompts[number % len(self._prompts)],
            "max_tokens": self._length,
            "temperature": self._temperature,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "speculative": {"enabled": not is_plain},
        }
        sent = last = time.perf_counter()
        text, num_before = "", 0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                made.num_errors += 1
                await response.aread()
                await asyncio.sleep(0.1)
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    made.num_errors += 1
                    return
                text += "".join(choice["text"] for choice in chunk["choices"])
                num = chunk["usage"]["completion_tokens"]
                if num == num_before:
                    continue
                if now <= until:
                    made.num_tokens += num - num_before
                    if num_before:
                        made.between_s += [(now - last) / (num - num_before)] * (num - num_before)
                    else:
                        made.first_s.append(now - sent)
                last, num_before = now, num
        made.num_texts += 1
        self.texts[number, is_plain] = text


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def measure(load: Load, num_clients: int, seconds: float) -> int:
    """Measure `num_clients` clients with and without drafts in turn; return the failed requests."""
    kinds = {False: Slice(), True: Slice()}
    ratios: list[float] = []
    rates = {False: 0.0, True: 0.0}
    for number in range(NUM_SLICES):
        is_plain = bool(number % 2)
        # Both of a pair ask for the same texts.
        first = 1_000_000 * num_clients + 10_000 * (number // 2)
        made = await load.slice(num_clients, seconds / NUM_SLICES, is_plain=is_plain, first=first)
        kinds[is_plain].add(made)
        rates[is_plain] = made.rate
        if is_plain and made.rate:
            ratios.append(rates[False] / made.rate)
    for is_plain, made in kinds.items():
        kind = "plain" if is_plain else "speculative"
        firsts = [1e3 * _percentile(made.first_s, share) for share in (0.5, 0.99)]
        between = [1e3 * _percentile(made.between_s, share) for share in (0.5, 0.99)]
        print(
            f"{num_clients:7d}  {kind:11s} {made.rate:9.1f} {firsts[0]:9.0f} {firsts[1]:8.0f} "
            f"{between[0]:8.1f} {between[1]:8.1f} {made.num_texts:6d} {made.num_errors:6d}",
            flush=True,
        )
    if ratios:
        spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
        print(
            f"         speculative / plain: {statistics.median(ratios):.2f} ({spread})", flush=True
        )
    return sum(made.num_errors for made in kinds.values())


def main() -> int:
    """Measure and print; return 1 if anything failed or texts differ, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", default="1,4,16,64", help="numbers of clients")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each number of clients")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--max-tokens", type=int, default=64, help="of each text")
    parser.add_argument(
        *("--prompt-file", "--prompts"),
        dest="prompts",
        type=Path,
        default=PROMPTS,
        help="JSON Lines with `prompt`",
    )
    given = parser.parse_args()
    lines = given.prompts.read_text("utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    random.Random(0).shuffle(prompts)
    load = Load(given.url, prompts, given.temperature, given.max_tokens)
    print(machine())
    print(
        "clients  kind          tokens/s  TTFT p50      p99  ITL p50      p99  texts errors  (ms)"
    )
    num_errors = 0
    try:
        for num_clients in map(int, given.clients.split(",")):
            num_errors += asyncio.run(measure(load, num_clients, given.seconds))
    except httpx.TransportError as error:
        print(f"error: no answer from {given.url} ({error}); start `serve` there", file=sys.stderr)
        return 1
    num_both, num_different = load.num_different
    print(f"{num_both} texts were written both ways; {num_different} differ")
    return int(num_different > 0 or num_errors > 0)


if __name__ == "__main__":
    sys.exit(main())
