"""All that serves one model."""

from __future__ import annotations

from scheduler_svc.core.admission import AdmissionControl
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.fleet import ModelPool
from scheduler_svc.core.planning import ContinuousPlanner, Explain
from scheduler_svc.core.static import StaticPlanner


class ModelScheduler:
    """Who may come in, who waits and runs where, and what each worker does next."""

    def __init__(
        self, config: CoreConfig, weights: dict[str, float], name: str, explain: Explain | None
    ) -> None:
        self.pool = ModelPool(config, weights, name)
        self.admission = AdmissionControl(config, self.pool)
        planner = ContinuousPlanner if config.static is None else StaticPlanner
        self.planner: ContinuousPlanner | StaticPlanner = planner(config, self.pool, explain)
