"""What the three processes export is what docs/metrics.md says, and gauges are true when nothing goes on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import grpc
from octavo.gateway.metrics import Metrics
from octavo.service.loop_lag import LoopLag
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from tests.e2e.scheduler_stack import Stack, one_worker, until
from worker_svc.metrics import WorkerMetrics

PAGE: Final = Path(__file__).parents[2] / "docs" / "metrics.md"
UNITS: Final = ("seconds", "bytes", "tokens", "blocks", "ratio")
OF_THE_LIBRARY: Final = ("process_", "python_", "octavo_gateway_process_", "go_")
"""Described where they come from."""

Row = tuple[str, str, str]
"""Name, type, labels."""


def exported(registry: CollectorRegistry) -> set[Row]:
    """Return the families of a registry, with their labels, as Prometheus names them."""
    found: set[Row] = set()
    for collector in registry._collector_to_names:
        for family in collector.collect():
            if family.name.startswith(OF_THE_LIBRARY):
                continue
            labels = getattr(collector, "_labelnames", None)
            if labels is None:
                labels = sorted({name for sample in family.samples for name in sample.labels} - {"le"})
            name = f"{family.name}_total" if family.type == "counter" else family.name
            name = f"{name}_info" if family.type == "info" else name
            kind = "gauge" if family.type == "info" else family.type
            found.add((name, kind, " ".join(sorted(labels))))
    return found


def documented() -> dict[str, set[Row]]:
    """Return the rows of the page's tables, by process."""
    rows: dict[str, set[Row]] = {"scheduler": set(), "worker": set(), "gateway": set()}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 7:
            name, process, kind, _, labels, meaning, remedy = cells
            assert meaning, name
            assert remedy, name
            for one in process.split(", "):
                rows[one].add((name.strip("`"), kind, " ".join(sorted(re.findall(r"`(\w+)`", labels)))))
    return rows


async def test_page_has_every_metric_that_is_exported_and_no_other(tmp_path: Path) -> None:
    async with one_worker(plan_log=tmp_path / "plan.log", overload_control=True, metrics_port=0) as (
        stack,
        worker,
    ):
        del worker
        await stack.generate(text="twelve bytes")
        scheduler = await asyncio.to_thread(exported, stack.process.metrics.registry)
    worker_metrics, gateway = WorkerMetrics(), Metrics()
    for registry in (worker_metrics.registry, gateway.registry):
        LoopLag(registry)

    page = documented()
    for name, found in (
        ("scheduler", scheduler),
        ("worker", exported(worker_metrics.registry)),
        ("gateway", exported(gateway.registry)),
    ):
        assert found - page[name] == set(), f"not on the page, of the {name}"
        assert page[name] - found == set(), f"on the page, and not exported by the {name}"


def gauges(registry: CollectorRegistry) -> dict[str, float]:
    """Return all gauges of Octavo's own, by name and labels."""
    families: Iterable[Metric] = registry.collect()
    return {
        f"{sample.name}{sample.labels}": sample.value
        for family in families
        if family.type == "gauge" and family.name.startswith(("octavo_", "vllm:"))
        for sample in family.samples
    }


async def test_after_a_mass_abort_and_an_idle_minute_every_gauge_is_as_before(tmp_path: Path) -> None:
    """Forty requests run or wait; all their clients leave at once, and a minute passes."""
    async with one_worker(
        {"max_num_seqs": 4}, plan_log=tmp_path / "plan.log", overload_control=True, metrics_port=0
    ) as (stack, worker):
        await stack.generate(text="warm up")
        await until(lambda: stack.process.driver.snapshot().workers[0].running == 0)
        registry = stack.process.metrics.registry
        before = await asyncio.to_thread(gauges, registry)

        worker.gate.close()
        asked = [asyncio.create_task(_ask(stack, index)) for index in range(40)]
        await until(lambda: stack.process.driver.snapshot().live_requests == 40)
        busy = await asyncio.to_thread(gauges, registry)
        assert busy["octavo_live_requests{}"] == 40
        assert busy["vllm:num_requests_waiting{'model_name': 'echo'}"] > 0
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        worker.gate.open()
        await until(lambda: stack.process.driver.snapshot().workers[0].running == 0)
        stack.let_time_pass(60.0)
        await until(lambda: all(one.level == 0 for one in stack.process.driver.snapshot().overload))
        after = await asyncio.to_thread(gauges, registry)

    moving = ("octavo_rss_bytes", "octavo_kv_blocks", "octavo_predicted_ttft")
    still = {name: value for name, value in before.items() if not name.startswith(moving)}
    assert {name: after[name] for name in still} == still
    for name in before.keys() | after.keys():
        if "'active'" in name or "'pinned'" in name:
            assert after[name] == 0


async def _ask(stack: Stack, index: int) -> None:
    try:
        await stack.generate(text=f"question {index}")
    except grpc.aio.AioRpcError:
        return
