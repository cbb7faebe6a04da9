"""What a service's metrics say of its own log."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.service import logs


class LogCollector(Collector):
    """Counts the lines that this process could not write."""

    def collect(self) -> Iterable[Metric]:
        """Yield `octavo_log_lines_dropped_total`."""
        yield CounterMetricFamily(
            "octavo_log_lines_dropped", "Lines of the log that could not be written.", logs.dropped()
        )
