"""Orders within a priority class. A policy is a file here and its line in `POLICIES`."""

from scheduler_svc.core.policies.base import Charges, Policy
from scheduler_svc.core.policies.edf import Edf
from scheduler_svc.core.policies.fair import Fair, VirtualTokenCounters
from scheduler_svc.core.policies.fcfs import Fcfs
from scheduler_svc.core.policies.srf import ShortestRemainingFirst

POLICIES: dict[str, type[Policy]] = {
    "fcfs": Fcfs,
    "edf": Edf,
    "fair": Fair,
    "srf": ShortestRemainingFirst,
}


def make_charges(policy: str, weights: dict[str, float]) -> Charges:
    """Return the counters that a policy reads."""
    return VirtualTokenCounters(weights) if POLICIES[policy].charges_tenants else Charges()
