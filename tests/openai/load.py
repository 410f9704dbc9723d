"""A closed-loop load: many clients at once, mixed lengths, some that leave, some that send nonsense.

    python load.py http://127.0.0.1:8000 --clients 64 --seconds 600 [--pid PID] [--burst 10000]

Prints a JSON report: requests by outcome, time to the first token and between tokens (p50, p99), and what is
left when the load is over: requests under way, cache blocks in use, resident memory before and after. Exits
with 1 where a good request failed, or something was left.
"""

import argparse
import asyncio
import json
import random
import sys
import time

import httpx

MALFORMED = [b'{"prompt": ', b"\xff\xfe\x00", b"[]", b'{"max_tokens": -1}', b'{"temperature": "hot"}']


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else None


def anonymous_kib(pid):
    if pid is None:
        return None
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


class Load:
    def __init__(self, arguments):
        self.arguments = arguments
        self.outcomes = {"finished": 0, "left": 0, "malformed": 0, "told_to_wait": 0, "failed": 0}
        self.first, self.between, self.failures = [], [], []

    def fail(self, what):
        self.outcomes["failed"] += 1
        if len(self.failures) < 10:
            self.failures.append(what)

    async def client(self, session, seed, deadline):
        numbers = random.Random(seed)
        while time.monotonic() < deadline:
            try:
                await self.request(session, numbers)
            except httpx.HTTPError as error:
                self.fail(repr(error))

    async def request(self, session, numbers):
        kind = numbers.random()
        if kind < 0.05:
            reply = await session.post("/v1/completions", content=numbers.choice(MALFORMED))
            if reply.status_code == 400:
                self.outcomes["malformed"] += 1
            else:
                self.fail(f"malformed: {reply.status_code}")
            return
        leaves = kind < 0.15
        words = numbers.choice([2, 10, 50, self.arguments.longest])
        body = {
            "prompt": " ".join(numbers.choice(["sea", "sky", "tree", "stone", "bird"]) for _ in range(words)),
            "max_tokens": numbers.choice([1, 8, 32, 64]),
            "temperature": numbers.choice([0, 1]),
            "stream": True,
        }
        started, last, pieces = time.monotonic(), None, 0
        async with session.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code == 429:
                self.outcomes["told_to_wait"] += 1
                await asyncio.sleep(min(2, int(reply.headers["retry-after"])))
                return
            if reply.status_code != 200:
                self.fail(f"{reply.status_code}: {(await reply.aread())[:200]!r}")
                return
            line = ""
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now = time.monotonic()
                if "error" in line[:16]:
                    self.fail(line)
                    return
                if last is None:
                    self.first.append(now - started)
                elif line != "data: [DONE]":
                    self.between.append(now - last)
                last = now
                pieces += 1
                if leaves and pieces >= numbers.randrange(1, 6):
                    self.outcomes["left"] += 1
                    return
                if line == "data: [DONE]":
                    self.outcomes["finished"] += 1
                    return
        self.fail("the stream broke off")

    async def burst(self, count):
        """All requests at once: each is answered, or told to wait."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        statuses = {}
        url = self.arguments.url
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as session:

            async def one():
                try:
                    body = {"prompt": "sea", "max_tokens": 2}
                    status = (await session.post("/v1/completions", json=body)).status_code
                except httpx.HTTPError as error:
                    status = type(error).__name__
                statuses[status] = statuses.get(status, 0) + 1

            await asyncio.gather(*(one() for _ in range(count)))
        return {str(status): number for status, number in statuses.items()}

    async def metric(self, session, name):
        text = (await session.get("/metrics")).text
        return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(name + " "))

    async def run(self):
        arguments = self.arguments
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=arguments.url, limits=limits, timeout=300) as session:
            # The first requests grow buffers to their final size; what they took is not a leak.
            warm_up = time.monotonic() + min(10, arguments.seconds / 5)
            await asyncio.gather(*(self.client(session, -1 - seed, warm_up) for seed in range(arguments.clients)))
            before = anonymous_kib(arguments.pid)
            for values in (self.first, self.between):
                values.clear()
            deadline = time.monotonic() + arguments.seconds
            await asyncio.gather(*(self.client(session, seed, deadline) for seed in range(arguments.clients)))
            burst = await self.burst(arguments.burst) if arguments.burst else None
            await asyncio.sleep(2)
            report = {
                "clients": arguments.clients,
                "seconds": arguments.seconds,
                "outcomes": self.outcomes,
                "failures": self.failures,
                "first_token_seconds": {"p50": percentile(self.first, 0.5), "p99": percentile(self.first, 0.99)},
                "between_tokens_seconds": {"p50": percentile(self.between, 0.5), "p99": percentile(self.between, 0.99)},
                "burst": burst,
                "running_after": await self.metric(session, "vt:num_requests_running"),
                "waiting_after": await self.metric(session, "vt:num_requests_waiting"),
                "cache_used_after": await self.metric(session, "vt:kv_cache_usage_perc"),
                "anonymous_kib": {"before": before, "after": anonymous_kib(arguments.pid)},
            }
        print(json.dumps(report, indent=2))
        left = report["running_after"] + report["waiting_after"] + report["cache_used_after"]
        odd = {"200", "429"} < set(burst or {}) | {"200", "429"}
        return 1 if self.outcomes["failed"] or left or odd else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--longest", type=int, default=150, help="words of the longest prompts")
    parser.add_argument("--pid", type=int, help="the server's process, to watch its memory")
    parser.add_argument("--burst", type=int, default=0, help="requests to send at once at the end")
    sys.exit(asyncio.run(Load(parser.parse_args()).run()))


if __name__ == "__main__":
    main()
