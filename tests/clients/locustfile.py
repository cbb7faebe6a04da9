"""Users of a gateway for locust: half of them read streams.

OCTAVO_MODEL=... locust -f locustfile.py --headless --host http://127.0.0.1:8000 -u 8 -r 8 -t 15s
"""

from __future__ import annotations

import os

from locust import HttpUser, between, task

MODEL = os.environ["OCTAVO_MODEL"]


class Talker(HttpUser):
    wait_time = between(0.0, 0.2)

    @task
    def complete(self) -> None:
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8}
        with self.client.post("/v1/completions", json=body, catch_response=True) as answer:
            if answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] > 8:
                answer.failure(answer.text)

    @task
    def stream(self) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "max_tokens": 8,
            "stream": True,
        }
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as answer:
            lines = [line for line in answer.iter_lines() if line]
            if answer.status_code != 200 or not lines or lines[-1] != b"data: [DONE]":
                answer.failure(f"{answer.status_code}: {lines[-1:]}")
