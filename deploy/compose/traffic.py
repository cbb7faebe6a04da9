"""Ask a stack of Octavo over gRPC and HTTP until SIGTERM, then print what became of it as one line of JSON.

Runs in a container beside the stack (deploy/try_compose.py), with Octavo's SDK and the standard library. What
counts as failed: an error, a stream that ends early, a text that differs from the first one for its prompt.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

from octavo import Client

MAX_TOKENS: Final = 24
SEED: Final = 7
_PATIENCE_S: Final = 30.0
_TIMEOUT_S: Final = 120.0
_stop = threading.Event()


class Books:
    """What became of the requests, of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.longest_s = 0.0

    def run(self, kind: str, number: int, ask: Callable[[str], str]) -> None:
        """Ask again and again, each time for the text of one of a few prompts."""
        while not _stop.is_set():
            number += 1
            prompt = f"Tell me about the number {number % 7}."
            began = time.monotonic()
            try:
                text = ask(prompt)
            except Exception as error:  # noqa: BLE001 - counting failures is the purpose
                self._note(kind, prompt, None, repr(error))
            else:
                self._note(kind, prompt, text, "")
            with self._lock:
                self.longest_s = max(self.longest_s, time.monotonic() - began)

    def retried(self) -> None:
        """Count a gateway that could not be reached, before another one was asked."""
        with self._lock:
            self.counts["http_retries"] += 1

    def _note(self, kind: str, prompt: str, text: str | None, problem: str) -> None:
        with self._lock:
            self.counts[kind] += 1
            if text is not None and self._texts.setdefault(prompt, text) != text:
                problem = f"another text for {prompt!r}: {text!r} in place of {self._texts[prompt]!r}"
            if problem:
                self.counts["failed"] += 1
                self.problems.append(f"{kind}: {problem}")
                print(f"{time.strftime('%H:%M:%S')} failed: {kind}: {problem}", flush=True)


def ask_grpc(client: Client) -> Callable[[str], str]:
    """Return what asks through the SDK."""

    def ask(prompt: str) -> str:
        with client.stream(prompt, max_tokens=MAX_TOKENS, ignore_eos=True, seed=SEED) as stream:
            return "".join(delta.text for delta in stream)

    return ask


class Http:
    """A client of gateways that knows nothing of them but a name in DNS."""

    def __init__(self, url: str, books: Books) -> None:
        self._url = urlsplit(url)
        self._books = books
        key = os.environ.get("OCTAVO_API_KEY")
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        ca = os.environ.get("OCTAVO_TLS_CA")
        self._tls = ssl.create_default_context(cafile=ca) if self._url.scheme == "https" else None
        self._turn = 0

    def ask(self, prompt: str) -> str:
        """Return the text, streamed every other time."""
        self._turn += 1
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": SEED}
        body["stream"] = self._turn % 2 == 0
        response = self._answer(json.dumps(body).encode())
        content = response.read().decode()
        if response.status != http.client.OK:
            raise RuntimeError(f"{response.status} {content[:300]}")
        if not body["stream"]:
            return str(json.loads(content)["choices"][0]["text"])
        events = [line.removeprefix("data: ") for line in content.split("\n\n") if line]
        if events[-1] != "[DONE]":
            raise RuntimeError(f"the stream ended early: {events[-1][:300]}")
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])

    def _answer(self, body: bytes) -> http.client.HTTPResponse:
        """Return the answer of the first gateway that has one: any address of the name will do.

        A gateway that ends between connection and answer has not begun with the request.
        """
        host, port = self._url.hostname or "", self._url.port or 80
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            for address in self._addresses(host, port):
                connection: Any = http.client.HTTPConnection(address, port, timeout=_TIMEOUT_S)
                try:
                    connection.connect()
                    if self._tls is not None:
                        connection.sock = self._tls.wrap_socket(connection.sock, server_hostname=host)
                    connection.request("POST", "/v1/completions", body, self._headers)
                    answer: http.client.HTTPResponse = connection.getresponse()
                except (ConnectionError, http.client.RemoteDisconnected):
                    connection.close()
                    self._books.retried()
                else:
                    return answer
            time.sleep(0.1)
        raise ConnectionError(f"no gateway could be reached for {_PATIENCE_S:g} s")

    def _addresses(self, host: str, port: int) -> list[str]:
        try:
            found = sorted(
                {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
            )
        except OSError:
            return []
        start = self._turn % len(found)
        return found[start:] + found[:start]


def main() -> None:
    """Ask until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--threads", type=int, default=2, help="of each kind")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: _stop.set())
    books = Books()
    with Client(arguments.endpoint) as client:
        threads = []
        for number in range(arguments.threads):
            gateway = Http(arguments.gateway, books)
            threads.append(threading.Thread(target=books.run, args=("grpc", number, ask_grpc(client))))
            threads.append(threading.Thread(target=books.run, args=("http", number, gateway.ask)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    summary = {**books.counts, "longest_s": round(books.longest_s, 1), "problems": books.problems[:5]}
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
