"""The control loop as a view: what was, and what is new, over real ports."""

from __future__ import annotations

import octavo
import pytest

from tests.e2e.scheduler_stack import one_worker, scheduler, start_worker, until


@pytest.fixture(autouse=True)
def _no_samples_but_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.observe.recent.HISTORY_INTERVAL_S", 3600.0)


async def test_cost_counts_every_device_of_the_workers_that_are_attached() -> None:
    workers = [await start_worker("one"), await start_worker("four", num_devices=4)]
    try:
        async with scheduler(*(worker.address for worker in workers), price_per_gpu_hour=3.6) as stack:
            await stack.wait_ready(2)
            metrics = stack.process.metrics.registry
            await stack.generate(text="twelve bytes")
            status = await stack.status()
            assert {worker.worker_id: worker.devices for worker in status.workers} == {"one": 1, "four": 4}
            # One GPU for an hour costs 3.6, so a second of five of them costs 0.005.
            rates = status.rates
            assert rates.cost_per_1k_tokens == pytest.approx(5 / rates.output_tokens_per_s)
            assert metrics.get_sample_value("octavo_devices") == 5
            assert metrics.get_sample_value("octavo_price_per_gpu_hour") == 3.6

            await workers[1].stop()
            await until(lambda: stack.process.fleet.num_ready == 1)
            status = await stack.status()
            assert {worker.worker_id: worker.devices for worker in status.workers} == {"one": 1, "four": 0}
            assert metrics.get_sample_value("octavo_devices") == 1
    finally:
        for worker in workers:
            await worker.stop()


async def test_history_holds_latency_throughput_cost_and_refusals_and_grows_while_watched() -> None:
    async with one_worker(price_per_gpu_hour=3.6) as (stack, worker):
        history = stack.process._status.history
        async with octavo.AsyncClient(f"127.0.0.1:{stack.port}") as client:
            history.sample()
            for _ in range(5):
                await client.generate("twelve bytes")
            worker.gate.close()
            with pytest.raises(octavo.DeadlineExceededError):
                await client.generate("too late", deadline=0.001)
            worker.gate.open()
            history.sample()
            assert (await client.status()).history == ()
            status = await client.status(history=True)
            idle, busy = status.history
            assert idle.uptime_s < busy.uptime_s <= status.uptime_s
            assert idle.rates.requests_per_s == 0.0
            assert idle.rates.cost_per_1k_tokens is None
            rates = busy.rates
            assert rates.requests_per_s == pytest.approx(0.6)
            assert rates.refused_per_s == pytest.approx(0.1)
            assert rates.output_tokens_per_s == pytest.approx(6.5)
            # One GPU for an hour costs 3.6, so a second costs 0.001.
            assert rates.cost_per_1k_tokens == pytest.approx(1 / 6.5, rel=0.01)
            assert 0 < rates.itl_p50_s <= rates.itl_p99_s
            assert 0 < rates.ttft_p50_s <= rates.ttft_p99_s
            assert [point.level for point in status.history] == [0, 0]

            watched = client.watch_status(0.1, history=True)
            seen = list((await anext(watched)).history)
            assert [point.uptime_s for point in seen[:2]] == [idle.uptime_s, busy.uptime_s]
            history.sample()
            while len(seen) < 3:
                seen += (await anext(watched)).history
            assert len({point.uptime_s for point in seen}) == len(seen)
            await watched.aclose()


async def test_history_is_bounded() -> None:
    async with one_worker() as (stack, _):
        history = stack.process._status.history
        for _ in range(1000):
            history.sample()
        assert len(list(history.since(0.0))) == 300
