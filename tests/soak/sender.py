"""`python -m tests.soak.sender URL KEY`: sends eight prompts of 8 MB at once, and waits for all."""
# ruff: noqa: T201

import sys
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.soak.__main__ import big_prompt


def main() -> None:
    """Print the status of each answer."""
    url, key = sys.argv[1:]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def send(body: bytes) -> int:
        answer = httpx.post(f"{url}/v1/completions", content=body, headers=headers, timeout=300.0)
        return answer.status_code

    bodies = [big_prompt(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        print(f"answers to eight prompts of 8 MB: {list(pool.map(send, bodies))}")


if __name__ == "__main__":
    main()
