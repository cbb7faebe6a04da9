"""The gateway on the vllm runner against `vllm serve`: the same model, in float32, the same questions."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from octavo.client import Client
from octavo.stack import Stack, StackConfig

from octavo_lab.scorecard import Measured, at_most, entry, vllm_server
from octavo_lab.scorecard.gateway_clients import OUTPUT
from octavo_lab.scorecard.gateway_parity import Ask, answer, asks, differences
from octavo_lab.scorecard.measures import vllm_serve

_EAGER: Final = ("--enforce-eager",)


@entry(
    "gateway.vllm_mismatches",
    "of 50 greedy requests, those whose text, end, usage or log probabilities differ from `vllm serve`",
    "count",
    at_most(0),
    long=True,
)
async def vllm_mismatches() -> Measured:
    """One server after the other, one request after the other: each has the machine to itself."""
    wanted = asks()
    ours = await asyncio.to_thread(_ours, wanted)
    theirs = await _theirs(wanted)
    found: dict[str, list[str]] = {}
    for number, (ask, mine, yours) in enumerate(zip(wanted, ours, theirs, strict=True)):
        differing = list(differences(mine, yours))
        if differing:
            found[f"{number} {ask.path} {json.dumps(ask.body, ensure_ascii=False)}"] = differing
    OUTPUT.mkdir(parents=True, exist_ok=True)
    kept = [
        {"path": ask.path, "body": ask.body, "octavo": mine, "vllm serve": yours}
        for ask, mine, yours in zip(wanted, ours, theirs, strict=True)
    ]
    (OUTPUT / "vllm-answers.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False))
    answered = sum("choices" in one for one in theirs)
    return Measured(len(found), {"requests": len(wanted), "answered by vllm serve": answered, **found})


def _ours(wanted: list[Ask]) -> list[dict[str, Any]]:
    config = StackConfig(
        worker_args=(
            *("--runner", "vllm", "--dtype", "float32", *_EAGER),
            *("--max-num-seqs", str(vllm_serve.MAX_NUM_SEQS), "--num-blocks", str(vllm_serve.NUM_BLOCKS)),
            *("--max-num-batched-tokens", str(vllm_serve.MAX_NUM_BATCHED_TOKENS)),
            *("--max-model-len", str(vllm_serve.MAX_MODEL_LEN)),
        ),
        gateway_port=0,
    )
    with Stack(config) as stack:
        stack.wait_ready(vllm_server.READY_S)
        with Client(stack.endpoint) as client:
            model = client.models()[0].id
        if stack.gateway is None:
            raise RuntimeError("the stack has no gateway")
        base = f"http://{stack.gateway.address}"
        return [answer(base, model, ask) for ask in wanted]


async def _theirs(wanted: list[Ask]) -> list[dict[str, Any]]:
    limits = (
        *("--max-model-len", str(vllm_serve.MAX_MODEL_LEN), "--max-num-seqs", str(vllm_serve.MAX_NUM_SEQS)),
        *("--max-num-batched-tokens", str(vllm_serve.MAX_NUM_BATCHED_TOKENS)),
        *("--block-size", str(vllm_serve.BLOCK_SIZE)),
        *("--num-gpu-blocks-override", str(vllm_serve.NUM_BLOCKS + 1)),
    )
    async with vllm_server.vllm_serve(*limits, *_EAGER, dtype="float32") as server:
        return await asyncio.to_thread(
            lambda: [answer(server.base_url, vllm_server.MODEL, ask) for ask in wanted]
        )
