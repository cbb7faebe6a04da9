"""Settings of the scheduler, in sections: flags, then environment, then a TOML file, then defaults."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from octavo.protocol.steps import Priority
from octavo.service.address import split_address, split_scheme
from octavo.service.settings import (
    COMMAS,
    NONE,
    Amount,
    Count,
    Grace,
    Name,
    Port,
    ProcessSection,
    Seconds,
    Section,
    ServerSection,
    ServiceSettings,
)
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, field_validator, model_validator

from scheduler_svc.core.config import CoreConfig, StaticConfig
from scheduler_svc.core.overload import OverloadConfig
from scheduler_svc.core.policies import POLICIES


def _parts(value: object) -> object:
    parts = value.split(",") if isinstance(value, str) else value
    return [None if part == "none" else part for part in parts] if isinstance(parts, list | tuple) else parts


def _ascending(value: tuple[float | None, ...]) -> tuple[float | None, ...]:
    given = [threshold for threshold in value if threshold is not None]
    if given != sorted(given) or any(threshold <= 0 for threshold in given):
        raise ValueError("must be positive and ascending")
    return value


Share = Annotated[float, Field(ge=0, lt=1)]
OptionalGrace = Annotated[Grace | None, NONE]
Thresholds = Annotated[
    tuple[float | None, float | None, float | None, float | None],
    BeforeValidator(_parts),
    AfterValidator(_ascending),
]
Range = Annotated[tuple[Count, Count], COMMAS]


class SchedulerProcessSection(ProcessSection):
    """How the process behaves."""

    drain_grace_s: Grace = Field(30.0, description="seconds that running requests get after SIGTERM")
    drain_hand_over_s: Grace = Field(
        2.0, description="seconds that they get where another scheduler stands by, which then takes them over"
    )
    enable_faults: bool = Field(False, description="allow fault injection")


class SchedulerServerSection(ServerSection):
    """Where clients find it, and how much they may hold open."""

    listen: str = Field(
        "127.0.0.1:50051", description="address of the gRPC port, as host:port; port 0 is any free one"
    )
    metrics_port: Annotated[Port | None, NONE] = Field(
        9464, description="Prometheus metrics on the same host; 0 is any free one, `none` is off"
    )
    max_streams: Count = Field(8192, description="calls of clients that are open at the same time, at most")
    max_session_requests: Count = Field(4096, description="live requests of one Session stream, at most")
    max_backlog_bytes: Count = Field(
        1 << 20, description="output that waits for one slow client; beyond it the stream is cut"
    )
    max_rss_bytes: Count | None = Field(
        None,
        description="resident memory at which new requests are refused "
        "(default: 80 % of what the machine, or the container, has)",
    )


class AccessSection(Section):
    """Who may use it."""

    key_file: Path | None = Field(
        None,
        description="TOML file of API keys and tenants, followed while it changes; "
        "without one everybody is the anonymous tenant",
    )
    jwt_issuer: Name | None = Field(
        None, description="issuer of tokens (JWT) that are taken for keys of tenants of the key file"
    )
    jwt_audience: Name | None = Field(None, description="whom such tokens must be made for")
    jwt_jwks: str | None = Field(
        None, description="public keys of the issuer: a JWKS file, followed, or an https URL, fetched"
    )
    jwt_tenant_claim: Name = Field("tenant", description="claim of a token that names its tenant")
    cache_secret: SecretStr = Field(
        SecretStr(""),
        description="keeps tenants from guessing each other's cache keys; must outlive restarts",
    )


class FleetSection(Section):
    """Whom to serve with, and when one of them is lost."""

    workers: Annotated[tuple[Name, ...], COMMAS] = Field(
        ("127.0.0.1:50061",),
        description="workers, as host:port separated by commas; dns:host:port is every address of the name; "
        "grpcs:// before it is TLS, whatever tls_ca says, and grpc:// is plaintext",
    )
    worker_secret_file: Path | None = Field(
        None, description="file whose first line is presented to workers; followed while it changes"
    )
    scheduler_id: Name | None = Field(
        None, description="name of this scheduler; by default drawn at each start"
    )
    worker_drain_grace_s: Grace = Field(
        5.0, description="seconds after which what a draining worker runs moves to others with room"
    )
    rank: Amount = Field(
        0, description="of two schedulers with the same workers, workers prefer the one of the lower rank"
    )
    advertise: Name | None = Field(
        None,
        description="address at which clients reach this scheduler, for the hints of another one; by default "
        "that of `listen`, unless it stands for all addresses",
    )
    no_worker_timeout_s: Annotated[Seconds | None, NONE] = Field(
        10.0,
        description="a request whose model has had no worker for so many seconds ends with NO_WORKER; "
        "or `none`",
    )
    step_watchdog_s: Seconds = Field(30.0, description="a worker that owes a report for longer is lost")
    max_worker_deaths: Count = Field(
        2,
        description="a request is quarantined after so many workers died that computed nothing else, or more",
    )

    @model_validator(mode="after")
    def _addresses(self) -> Self:
        if not self.workers:
            raise ValueError("workers must name at least one worker")
        for worker in self.workers:
            split_address(split_scheme(worker)[1].removeprefix("dns:"), "workers")
        return self


class QueueSection(Section):
    """How many requests may wait, for how long, and who is next."""

    policy: str = Field("fcfs", description=f"order of the queue within a class: {', '.join(POLICIES)}")
    max_waiting_requests: Count = Field(500, description="requests that may wait; more are refused")
    max_waiting_tokens: Annotated[Count | None, NONE] = Field(
        1 << 20, description="prompt tokens that may wait, or `none`; what waits already does not leave"
    )
    queue_timeout_interactive_s: OptionalGrace = Field(
        1.5, description="longest wait of the interactive class, unless a request says otherwise; or `none`"
    )
    queue_timeout_standard_s: OptionalGrace = Field(30.0, description="the same for the standard class")
    queue_timeout_batch_s: OptionalGrace = Field(None, description="the same for the batch class")
    lookahead: Amount = Field(
        8, description="waiting requests that are passed over, at most, when they do not fit, to start others"
    )
    lookahead_age_s: Grace = Field(
        2.0, description="once the first in the queue has waited this long for blocks, nobody passes it"
    )
    aging_standard_s: Grace = Field(
        10.0, description="wait after which the standard class takes turns although higher classes wait"
    )
    aging_batch_s: Grace = Field(60.0, description="the same for the batch class")
    aging_stride: Annotated[int, Field(ge=2)] = Field(
        4, description="one start in this many is a turn of a class that has waited so long"
    )
    starvation_age_s: Seconds = Field(
        30.0,
        description="with edf, a deadline that is later after the arrival, or none, counts as this",
    )

    @property
    def timeout_s(self) -> dict[Priority, float | None]:
        """Longest wait of each class."""
        return {
            Priority.INTERACTIVE: self.queue_timeout_interactive_s,
            Priority.STANDARD: self.queue_timeout_standard_s,
            Priority.BATCH: self.queue_timeout_batch_s,
        }

    @property
    def aging_s(self) -> dict[Priority, float]:
        """Wait after which a class takes turns."""
        given = {Priority.STANDARD: self.aging_standard_s, Priority.BATCH: self.aging_batch_s}
        return CoreConfig().aging_s | given

    @field_validator("policy")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in POLICIES:
            raise ValueError(f"must be one of {', '.join(POLICIES)}")
        return value


class PlanningSection(Section):
    """What goes into a step."""

    window: Count = Field(2, description="plans outstanding per worker, at most")
    max_num_seqs: Count | None = Field(
        None, description="sequences that run on a worker, at most; may only lower its own limit"
    )
    max_num_batched_tokens: Count | None = Field(
        None, description="tokens computed in one step, at most; may only lower the worker's own limit"
    )
    max_partial_prefills: Count = Field(
        4, description="prompts that are computed in chunks at the same time, at most"
    )
    chunked_prefill: bool = Field(True, description="spread long prompts over several steps")
    prefix_caching: bool = Field(True, description="share the KV blocks of common prefixes")
    watermark: Share = Field(0.01, description="share of a pool that admissions leave free for growth")
    max_preemptions: Amount = Field(
        3, description="a request preempted this often is not preempted again for a higher class"
    )
    target_itl_s: Seconds | None = Field(
        None, description="cap prefill so that a step takes about this long; by default no cap"
    )


class StaticSection(Section):
    """Static batching instead of continuous batching, for experiments."""

    batching: Literal["continuous", "static"] = Field(
        "continuous", description="static: one batch in, one batch out, the control arm of experiments"
    )
    static_batch_size: Count = Field(8, description="requests in a static batch")
    static_timeout_s: Seconds = Field(0.5, description="longest wait for a static batch to fill")
    static_buckets: Annotated[tuple[int, ...], COMMAS] = Field(
        (), description="upper prompt lengths of the static arm's buckets, separated by commas"
    )
    static_hold_finished: bool = Field(
        True, description="rows of a static batch that have finished are computed until the batch ends"
    )

    def core_config(self) -> StaticConfig | None:
        """Return the settings of the static arm of the core, or None when batching is continuous."""
        if self.batching == "continuous":
            return None
        return StaticConfig(
            batch_size=self.static_batch_size,
            timeout_s=self.static_timeout_s,
            bucket_bounds=self.static_buckets,
            hold_finished=self.static_hold_finished,
        )


class OverloadSection(Section):
    """What is given up under load, and when."""

    overload_control: bool = Field(
        True,
        description="under load, degrade by levels (1 trims what may be trimmed, 2 refuses the batch class, "
        "3 all but the interactive one, 4 everything), and refuse at once what cannot meet its deadline",
    )
    level_backlog: Thresholds = Field(
        (0.5, 0.7, 0.85, 0.95),
        description="backlog over the queue's bounds that leads to levels 1 to 4, separated by commas; "
        "`none` where it leads to no level",
    )
    level_wait: Thresholds = Field(
        (0.5, 0.75, 0.9, None), description="the same for the predicted wait over the class's queue timeout"
    )
    level_blocks: Thresholds = Field(
        (0.97, None, None, None),
        description="the same for the share of KV blocks that running sequences hold, while others wait",
    )
    level_misses: Thresholds = Field(
        (0.1, 0.25, 0.5, 0.8),
        description="the same for the share of accepted requests that miss a deadline before a first token",
    )
    level_exit_ratio: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.7, description="a level is left when every input is below this share of its threshold"
    )
    level_rise_s: Grace = Field(0.2, description="least time in a level before the next higher one")
    level_dwell_s: Seconds = Field(1.5, description="least time in a level before the next lower one")
    shed_prompt_tokens: Count = Field(
        1024, description="from level 2 on, longer prompts of requests that may be shed are refused"
    )
    trim_prompt_tokens: Range = Field(
        (2048, 256),
        description="from level 1 on, prompts that may be trimmed are cut to so many tokens: "
        "at the least and at the full backlog",
    )
    trim_max_tokens: Range = Field((512, 64), description="the same for max_tokens of these requests")


class BreakerSection(Section):
    """When workers are taken to be stuck."""

    breaker_stall_s: Seconds = Field(
        10.0, description="with work and no report for this long, the breaker opens"
    )
    breaker_open_s: Seconds = Field(
        1.0, description="the breaker stays open for this long before it lets probes in; doubled each time"
    )
    breaker_max_open_s: Seconds = Field(30.0, description="longest time that it stays open at once")
    breaker_probes: Count = Field(
        3, description="requests that a half-open breaker lets in; when all had a first token it closes"
    )

    @model_validator(mode="after")
    def _opens_longer(self) -> Self:
        if self.breaker_max_open_s < self.breaker_open_s:
            raise ValueError(
                f"breaker_max_open_s ({self.breaker_max_open_s:g}) < breaker_open_s ({self.breaker_open_s:g})"
            )
        return self


class TextSection(Section):
    """How prompts are turned into tokens."""

    tokenizer_processes: Count = Field(2, description="child processes that tokenize")
    tokenizer_timeout_s: Seconds = Field(10.0, description="longest time for one prompt")


class ObservabilitySection(Section):
    """What is recorded, and what it is said to cost."""

    plan_log: Path | None = Field(
        None, description="record events and plans in this file, for `octavo replay`; it holds token ids"
    )
    plan_log_max_mib: Count = Field(256, description="size at which the plan log goes on in a new file")
    plan_log_files: Count = Field(4, description="files of the plan log that are kept")
    price_per_gpu_hour: Annotated[float, Field(ge=0)] | None = Field(
        None, description="in any currency; makes the status show the cost of 1000 tokens"
    )


class SchedulerSettings(ServiceSettings):
    """Everything that can be set of a scheduler."""

    service: ClassVar[str] = "scheduler"

    server: SchedulerServerSection
    access: AccessSection
    fleet: FleetSection
    queue: QueueSection
    planning: PlanningSection
    static: StaticSection
    overload: OverloadSection
    breaker: BreakerSection
    text: TextSection
    observability: ObservabilitySection
    process: SchedulerProcessSection

    def core_config(self) -> CoreConfig:
        """Return the settings of the core, most of which have the same names there."""
        of_core = {field.name for field in fields(CoreConfig)}
        return CoreConfig(
            **{name: value for name, value, _ in self.items() if name in of_core},
            static=self.static.core_config(),
            overload=self._overload() if self.overload.overload_control else None,
            aging_s=self.queue.aging_s,
        )

    def _overload(self) -> OverloadConfig:
        levels, breaker = self.overload, self.breaker
        return OverloadConfig(
            backlog=levels.level_backlog,
            wait=levels.level_wait,
            blocks=levels.level_blocks,
            misses=levels.level_misses,
            exit_ratio=levels.level_exit_ratio,
            rise_s=levels.level_rise_s,
            dwell_s=levels.level_dwell_s,
            queue_timeout_s=self.queue.timeout_s,
            shed_prompt_tokens=levels.shed_prompt_tokens,
            trim_prompt_tokens=levels.trim_prompt_tokens,
            trim_max_tokens=levels.trim_max_tokens,
            stall_s=breaker.breaker_stall_s,
            open_s=breaker.breaker_open_s,
            max_open_s=breaker.breaker_max_open_s,
            num_probes=breaker.breaker_probes,
        )
