from __future__ import annotations

import urllib.request

from octavo.protocol.steps import (
    Geometry,
    KeyEvents,
    PoolReport,
    Refused,
    RefuseReason,
    Report,
    StallReason,
    StepError,
    StepStatus,
    StepTiming,
    TierCopies,
)
from octavo.service.metrics_port import MetricsPort

from worker_svc.metrics import WorkerMetrics
from worker_svc.runner.sim import built_in_model


def test_metrics_of_two_steps_are_served_over_http() -> None:
    metrics = WorkerMetrics()
    geometry = Geometry(block_size=16, num_blocks=100, num_host_blocks=7, block_bytes=1000)
    metrics.describe(built_in_model(), geometry)
    pool = PoolReport(
        free=50,
        evictable=30,
        active=20,
        largest_free_run=40,
        unused_slots=80,
        hit_tokens=32,
        miss_tokens=64,
        copies=TierCopies(
            out_blocks=3, in_blocks=2, skipped_blocks=5, out_us_per_block=20.0, in_us_per_block=64.0
        ),
    )
    metrics.observe(
        Report(
            1,
            StepStatus.OK,
            pool,
            live_count=3,
            digest=0,
            stalled=((1, StallReason.NO_BLOCK),),
            refused=(Refused(2, RefuseReason.NO_BLOCKS),),
            key_events=KeyEvents(stored=(b"k" * 16,)),
            timing=StepTiming(execute_us=20_000, bubble_us=300, num_decodes=3, num_prefill_tokens=96),
        )
    )
    failed = StepError((), "OOM", "out of memory")
    metrics.observe(Report(2, StepStatus.FAILED, pool, live_count=2, digest=0, errors=(failed,)))
    server = MetricsPort(metrics.registry, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as page:
            lines = set(page.read().decode().splitlines())
    finally:
        server.close()
    assert lines >= {
        'octavo_worker_steps_total{status="ok"} 1.0',
        'octavo_worker_steps_total{status="failed"} 1.0',
        'octavo_worker_step_errors_total{kind="oom"} 1.0',
        'octavo_worker_tokens_total{kind="prefill"} 96.0',
        'octavo_worker_tokens_total{kind="decode"} 3.0',
        'octavo_worker_kv_blocks{state="evictable"} 30.0',
        'octavo_worker_kv_blocks_total{tier="device"} 100.0',
        'octavo_worker_kv_fragmentation_ratio{kind="internal"} 0.25',
        'octavo_worker_kv_fragmentation_ratio{kind="external"} 0.19999999999999996',
        'octavo_worker_prefix_cache_tokens_total{result="hit"} 32.0',
        'octavo_worker_prefix_cache_tokens_total{result="miss"} 64.0',
        'octavo_worker_kv_copied_bytes_total{direction="out"} 3000.0',
        'octavo_worker_kv_copied_bytes_total{direction="in"} 2000.0',
        'octavo_worker_kv_copy_seconds_per_block{direction="in"} 6.4e-05',
        "octavo_worker_kv_recompute_saved_tokens_total 32.0",
        "octavo_worker_kv_copies_skipped_blocks_total 5.0",
        'octavo_worker_kv_key_events_total{event="stored"} 1.0',
        'octavo_worker_refused_total{reason="no_blocks"} 1.0',
        'octavo_worker_stalled_total{reason="no_block"} 1.0',
        "octavo_worker_sequences 2.0",
        'octavo_worker_step_seconds_bucket{le="0.02"} 2.0',
        'octavo_worker_bubble_seconds_bucket{le="0.0005"} 2.0',
    }
