"""The way of a request to the core: what is refused, and what is prepared for the core."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
from octavo.keys import KeyFile
from octavo.protocol.keys import chain
from octavo.service.memory import MemoryCeiling
from octavo.v1 import generation_pb2 as pb

from scheduler_svc.admission.access import Access
from scheduler_svc.admission.admission import Admission, InputProcessor, _resumed_keys
from scheduler_svc.admission.load import LoadGate
from scheduler_svc.config import SchedulerSettings
from scheduler_svc.driver import CoreDriver
from scheduler_svc.errors import ServiceError
from scheduler_svc.fleet.models import ModelRegistry
from scheduler_svc.observe.metrics import SchedulerMetrics
from scheduler_svc.requests.accounts import Accounts
from scheduler_svc.requests.messages import ResumedChoice
from scheduler_svc.requests.outbox import ClientStream, GenerateOutbox
from scheduler_svc.text.tokenization import KeySpec
from scheduler_svc.text.tokenizer_pool import TokenizerPool
from tests.unit.scheduler.core.desk import BLOCK, ROOT, Desk, worker

KEYS = KeySpec(ROOT, BLOCK)


def admitted_keys(prompt: list[int], **fields: Any) -> list[tuple[bytes, ...]]:
    """Return the keys with which the choices of a request come to a worker."""
    desk = Desk(worker(num_blocks=256, max_num_batched_tokens=512), window=1)
    desk.submit(prompt, max_tokens=200, n=4, **fields)
    found: list[tuple[bytes, ...]] = []
    while len(found) < 4:
        found += [admit.keys for plan in desk.plans["w0"] for admit in plan.admit]
        desk.answer()
    return found


@pytest.mark.parametrize("prompt_tokens", [5, 16, 40])
async def test_keys_of_resumed_choices_are_those_that_the_core_would_compute(prompt_tokens: int) -> None:
    prompt = list(range(prompt_tokens))
    resumed = {0: tuple(range(100)), 2: (7,), 3: tuple(range(50, 59))}
    choices = {choice: ResumedChoice(token_ids, 0) for choice, token_ids in resumed.items()}
    prepared = await _resumed_keys(choices, prompt, tuple(chain(ROOT, prompt, BLOCK)), KEYS)

    plain = admitted_keys(prompt, resumed=resumed)
    assert admitted_keys(prompt, resumed=resumed, resumed_keys=prepared) == plain
    lengths = sorted(prompt_tokens + len(resumed.get(choice, ())) for choice in range(4))
    assert sorted(map(len, plain)) == [length // BLOCK for length in lengths]


async def test_request_whose_key_is_not_known_is_told_so_and_counted_once() -> None:
    metrics, driver = SchedulerMetrics(), cast("CoreDriver", None)
    access, accounts = Access(metrics), Accounts(metrics, time.monotonic)
    access.key_file = KeyFile.parse("")
    models = ModelRegistry(cast("TokenizerPool", None))
    gate = LoadGate(models, driver, MemoryCeiling(None), SchedulerSettings.load({}).queue)
    admission = Admission(access, gate, cast("InputProcessor", None), driver, accounts)
    stream = ClientStream(GenerateOutbox(1 << 20), "generate", None, "octavo_unknown")

    incoming = admission.receive(pb.GenerateRequest(text="x"), stream)
    assert admission.refuse_at_once(incoming) is None
    with pytest.raises(ServiceError) as caught:
        await admission.start(incoming, admission.open(stream))

    assert caught.value.reason == "BAD_API_KEY"
    assert accounts.outcomes == {"BAD_API_KEY": 1}
    assert metrics.registry.get_sample_value("octavo_access_refusals_total", {"reason": "BAD_API_KEY"}) == 1
