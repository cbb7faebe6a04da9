"""All settings of all services: one name and one section each, the same in flags, environment and TOML."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import pytest
from octavo.cli.main import main
from octavo.cli.services import load_settings
from octavo.gateway.config import GatewaySettings
from octavo.service.settings import ServiceSettings, SettingsError
from pydantic.fields import FieldInfo
from structlog.testing import capture_logs

from scheduler_svc.config import SchedulerSettings
from worker_svc.config import WorkerSettings

SERVICES: Final[dict[str, type[ServiceSettings]]] = {
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
    "gateway": GatewaySettings,
}
PROMISED: Final = {
    "scheduler": "listen metrics_port workers scheduler_id policy batching static_batch_size "
    "static_timeout_s static_buckets static_hold_finished window max_num_seqs max_num_batched_tokens "
    "max_partial_prefills "
    "chunked_prefill prefix_caching watermark lookahead lookahead_age_s aging_standard_s aging_batch_s "
    "aging_stride starvation_age_s max_preemptions target_itl_s max_waiting_requests max_waiting_tokens "
    "overload_control level_backlog level_wait level_blocks level_misses level_exit_ratio level_rise_s "
    "level_dwell_s shed_prompt_tokens trim_prompt_tokens trim_max_tokens breaker_stall_s breaker_open_s "
    "breaker_max_open_s breaker_probes queue_timeout_interactive_s queue_timeout_standard_s "
    "queue_timeout_batch_s step_watchdog_s max_worker_deaths max_streams max_session_requests "
    "max_backlog_bytes key_file tokenizer_processes tokenizer_timeout_s cache_secret drain_grace_s "
    "enable_faults plan_log plan_log_max_mib plan_log_files price_per_gpu_hour log_format log_level "
    "config_file",
    "worker": "model revision runner device dtype kv_cache_dtype quantization enforce_eager "
    "tensor_parallel_size pipeline_parallel_size trust_remote_code num_threads vllm_args max_num_seqs "
    "max_num_batched_tokens max_model_len block_size num_blocks kv_cache_bytes gpu_memory_utilization "
    "num_host_blocks host_kv_bytes pin_budget_blocks kv_layout padded listen metrics_port worker_id "
    "drain_grace_s step_limit_s first_step_limit_s enable_faults poison_token check_integrity log_format "
    "log_level sim_profile sim_speed config_file",
    "gateway": "listen endpoint api_key_file reconnect_timeout_s connect_timeout_s max_body_bytes "
    "read_timeout_s write_timeout_s keep_alive_s drain_grace_s log_format log_level config_file",
}
"""Names that installations use; others may be added, but none of these may go."""

VALUES: Final = {
    "listen": "127.0.0.1:7",
    "policy": "edf",
    "workers": "h:1,dns:g:2",
    "endpoint": "h:1",
    "static_buckets": "64,256",
    "trim_prompt_tokens": "9,8",
    "trim_max_tokens": "9,8",
    "vllm_args": '{"seed": 1}',
    "pipeline_parallel_size": "1",  # no other is allowed
}
"""For settings whose type does not tell a value."""

RUNNERS: Final = {"vllm": "vllm", "sim": "sim"}
"""By section: settings of others are refused."""


EVERY: Final = [
    pytest.param(service, section, name, id=f"{service}-{name}")
    for service, kind in SERVICES.items()
    for section, fields in kind.sections().items()
    for name in fields.model_fields
    if name != "config_file"
]


def field_of(service: str, section: str, name: str) -> FieldInfo:
    return SERVICES[service].sections()[section].model_fields[name]


def another(name: str, field: FieldInfo) -> str:
    """A value that is allowed and not the default, as text."""
    if name in VALUES:
        return VALUES[name]
    if name.startswith("level_") and isinstance(field.default, tuple):
        return "0.1,0.2,none,none"
    if isinstance(field.default, bool):
        return "false" if field.default else "true"
    if get_origin(field.annotation) is Literal:
        return str(get_args(field.annotation)[-1])
    if isinstance(field.default, int):
        return str(field.default + 1)
    if isinstance(field.default, float):
        return str(field.default / 2)
    numeric = any(number in str(field.annotation) for number in ("int", "float"))
    return "1" if numeric else "text"


def flag(name: str, value: str) -> str:
    dashed = name.replace("_", "-")
    match value:
        case "true":
            return f"--{dashed}"
        case "false":
            return f"--no-{dashed}"
    return f"--{dashed}={value}" if name != "vllm_args" else "--vllm-arg=seed=1"


def as_toml(value: str) -> str:
    return value if value in ("true", "false") else f"'{value}'"


def value_of(loaded: ServiceSettings, wanted: str) -> Any:
    return next(value for name, value, _ in loaded.items() if name == wanted)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, ServiceSettings]:
    """Settings that services would have been started with; none is."""
    found: dict[str, ServiceSettings] = {}

    def run(given: ServiceSettings) -> int:
        found[given.service] = given
        return 0

    for module in ("scheduler_svc.main", "worker_svc.main", "octavo.gateway.main"):
        monkeypatch.setattr(import_module(module), "run", run)
    return found


@pytest.mark.parametrize(("service", "section", "name"), EVERY)
def test_setting_means_the_same_wherever_it_is_given(
    service: str,
    section: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: dict[str, ServiceSettings],
) -> None:
    kind, field = SERVICES[service], field_of(service, section, name)
    runner = {"runner": RUNNERS[section]} if service == "worker" and section in RUNNERS else {}
    value = another(name, field)
    flat, grouped = tmp_path / "flat.toml", tmp_path / "grouped.toml"
    flat.write_text(f"[{service}]\n{name} = {as_toml(value)}\n")
    grouped.write_text(f"[{service}.{section}]\n{name} = {as_toml(value)}\n")

    found = [value_of(kind.load({"config_file": str(file), **runner}), name) for file in (flat, grouped)]
    arguments = [flag(key, given) for key, given in {**runner, name: value}.items()]
    assert main([service, *arguments]) == 0
    found.append(value_of(started[service], name))
    monkeypatch.setenv(f"OCTAVO_{service.upper()}_{name.upper()}", value)
    found.append(value_of(kind.load(runner), name))

    assert all(other == found[0] for other in found)
    assert name == "pipeline_parallel_size" or found[0] != field.default


@pytest.mark.parametrize("service", SERVICES)
def test_help_has_each_setting_under_the_heading_of_its_section(
    service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([service, "--help"])

    shown = capsys.readouterr().out
    for section, kind in SERVICES[service].sections().items():
        _, _, rest = shown.partition(f"\n{section}:\n")
        part = rest.split(":\n\n", 1)[0].split("\n\n")
        assert part[0].strip() == kind.__doc__
        for name, field in kind.model_fields.items():
            assert field.description
            assert flag(name, "x").partition("=")[0] in part[1].replace(",", " ").split()


@pytest.mark.parametrize("service", SERVICES)
def test_no_name_is_lost_or_stands_twice(service: str) -> None:
    kind = SERVICES[service]
    names = [name for fields in kind.sections().values() for name in fields.model_fields]

    assert set(PROMISED[service].split()) <= set(names)
    assert len(names) == len(set(names))
    assert not set(names) & kind.sections().keys()
    assert load_settings(service) is kind


@pytest.mark.parametrize("service", SERVICES)
def test_docs_name_the_sections(service: str) -> None:
    page = (Path(__file__).parents[3] / "docs/cli.md").read_text()

    assert f"| {service} | {' '.join(f'`{name}`' for name in SERVICES[service].sections())} |" in page


def refusal(kind: type[ServiceSettings], flags: dict[str, object]) -> str:
    with pytest.raises(SettingsError) as caught:
        kind.load(flags)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[scheduler]\nwindwo = 3\n", ["scheduler.windwo: no such setting (nearest: window)"]),
        ("[scheduler.planning]\nwindwo = 3\n", ["scheduler.planning.windwo: no such setting (nearest:"]),
        (
            "[scheduler.queue]\nwindow = 3\n",
            ["queue.window: no such setting (window is of [scheduler.pl"],
        ),
        (
            "[scheduler]\nwindow = 3\n[scheduler.planning]\nwindow = 3\n",
            ["window is set twice, as scheduler.window and as scheduler.planning.window"],
        ),
        ("[scheduler.plannign]\nwindow = 3\n", ["scheduler.plannign: no such setting (nearest: planning)"]),
        ("[scheduler]\nplanning = 3\n", ["scheduler.planning must be a table"]),
        ("scheduler = 3\n", ["scheduler must be a table"]),
        ("[schedular]\nwindow = 3\n", ["[schedular]: no such service (nearest: scheduler)"]),
        ("[scheduler]\nwindwo = 3\npolcy = 'edf'\n", ["scheduler.windwo", "(nearest: policy)"]),
        ("[scheduler.planning]\nwindow = 0\nwindwo = 1\n", ["window: Input should be greater", "windwo"]),
    ],
)
def test_file_with_a_wrong_key_is_refused_naming_it(text: str, said: list[str], tmp_path: Path) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text(text)

    message = refusal(SchedulerSettings, {"config_file": str(file)})

    assert [part for part in said if part not in message] == []


def test_flat_keys_and_sections_go_together_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text(
        "[worker]\nmax_num_seqs = 4\n[worker.kv]\nblock_size = 8\n[worker.vllm.vllm_args]\nseed = 1\n"
    )

    found = WorkerSettings.load({"config_file": str(file), "runner": "vllm", "model": "m"})

    assert (found.batch.max_num_seqs, found.kv.block_size, found.vllm.vllm_args) == (4, 8, {"seed": 1})


def test_variable_with_a_wrong_name_is_refused_naming_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_SCHEDULER_POLCY", "edf")

    said = refusal(SchedulerSettings, {})

    assert said == "unknown in the environment: OCTAVO_SCHEDULER_POLCY (nearest: policy)"


# What kubelet sets for a Service with one named port, here of the gateway.
SERVICE: Final = {
    "SERVICE_HOST": "10.96.0.12",
    "SERVICE_PORT": "8000",
    "SERVICE_PORT_HTTP": "8000",
    "PORT": "tcp://10.96.0.12:8000",
    "PORT_8000_TCP": "tcp://10.96.0.12:8000",
    "PORT_8000_TCP_PROTO": "tcp",
    "PORT_8000_TCP_PORT": "8000",
    "PORT_8000_TCP_ADDR": "10.96.0.12",
}
OVER_UDP: Final = {
    "SERVICE_HOST": "fd00::12",
    "SERVICE_PORT_GRPC_WEB": "53",
    "PORT": "udp://[fd00::12]:53",
    "PORT_53_UDP": "udp://[fd00::12]:53",
    "PORT_53_UDP_ADDR": "fd00::12",
    "PORT_9_SCTP_PROTO": "sctp",
}


@pytest.mark.parametrize("variables", [SERVICE, OVER_UDP])
@pytest.mark.parametrize("of", ["", "0_", "METRICS_", "GPU_POOL_A_"])
@pytest.mark.parametrize("service", SERVICES)
def test_variables_of_kubernetes_services_do_not_keep_a_service_from_starting(
    service: str, of: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    default = SERVICES[service].load({})
    names = {f"OCTAVO_{service.upper()}_{of}{name}": value for name, value in variables.items()}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("octavo.service.logs.configure", lambda *_: None)

    found = SERVICES[service].load({})
    with capture_logs() as logs:
        found.start_logging()

    assert found == default
    assert [line["event"] for line in logs] == ["kubernetes_variables_ignored"]
    assert logs[0]["variables"] == sorted(names)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PROT", "1"),
        ("PORT", "8000"),
        ("PORT", "http://10.96.0.12:8000"),
        ("PORT", "tcp://"),
        ("PORT_8000", "tcp://10.96.0.12:8000"),
        ("PORT_HTTP_TCP", "tcp://10.96.0.12:8000"),
        ("PORT_8000_TPC", "tcp://10.96.0.12:8000"),
        ("PORT_8000_TCP_ADR", "10.96.0.12"),
        ("PORT_8000_TCP_ADDR", "somewhere"),
        ("PORT_8000_TCP_PROTO", "http"),
        ("SERVICE_HOTS", "10.96.0.12"),
        ("SERVICE_HOST", "gateway.example"),
        ("SERVICE_PORT", "http"),
        ("SERVICEPORT", "8000"),
        ("LISTEN_PORT", "8000"),
    ],
)
def test_variables_that_only_look_like_those_of_kubernetes_are_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"OCTAVO_GATEWAY_{name}", value)

    assert f"unknown in the environment: OCTAVO_GATEWAY_{name}" in refusal(GatewaySettings, {})


def test_metrics_port_is_a_setting_until_kubernetes_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_WORKER_METRICS_PORT", "9000")
    assert WorkerSettings.load({}).server.metrics_port == 9000
    monkeypatch.setenv("OCTAVO_WORKER_METRICS_PORT", "tcp://10.96.0.12:9465")
    assert WorkerSettings.load({}).server.metrics_port == 9465


def test_nothing_is_said_where_kubernetes_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.service.logs.configure", lambda *_: None)
    with capture_logs() as logs:
        GatewaySettings.load({}).start_logging()
    assert logs == []
