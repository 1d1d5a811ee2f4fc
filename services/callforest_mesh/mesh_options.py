"""The options of each service, read from its section of the configuration.

A section has the keys of the service's own options. What follows from the mesh as a whole (paths in
the state directory, the tenant, the control token) is filled in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Final, Literal

from callforest_mesh.chassis.configuration import (
    CONTROL_TOKEN_VARIABLE,
    SERVICES,
    MeshConfiguration,
)
from callforest_mesh.chassis.configuration_section import (
    ConfigurationError,
    Value,
    read_section,
    unknown_key,
)

if TYPE_CHECKING:
    from callforest_mesh.admission.service import AdmissionOptions
    from callforest_mesh.finalizer.service import FinalizerOptions
    from callforest_mesh.gateway.options import GatewayOptions
    from callforest_mesh.ledger.service import LedgerOptions
    from callforest_mesh.staging.service import StagingOptions
    from callforest_mesh.trainer.options import TrainerOptions
    from callforest_mesh.worker.engine import Engine
    from callforest_mesh.worker.options import WorkerOptions

GATEWAY_PORT: Final = 7430
_TRAINS_KEYS: Final = ("selection_policy", "min_valid_fraction_per_group", "incomplete_capture")
_ENGINE_KEYS: Final = ("engine", "vllm", "vllm_limits", "scripted")


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine the worker hosts.

    Attributes:
        engine: "vllm", or "scripted" for tests and demonstrations.
        vllm: the options of vLLM; `model` is required with it.
        vllm_limits: its deadlines and repeats.
        scripted: the options of the script.
    """

    engine: Literal["vllm", "scripted"] = "vllm"
    vllm: Mapping[str, object] = field(default_factory=dict)
    vllm_limits: Mapping[str, object] = field(default_factory=dict)
    scripted: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _BatchSection:
    """What of the trainer's section others read."""

    batch: Mapping[str, Value] = field(default_factory=dict)


def check_all(configuration: MeshConfiguration) -> None:
    """Read the options of every service that runs.

    Raises:
        ConfigurationError: one is wrong; the message names the key.
    """
    for name in SERVICES:
        if name in configuration.services:
            _CHECKS[name](configuration)


def staging_options(configuration: MeshConfiguration) -> StagingOptions:
    """Read the options of Staging."""
    from callforest_mesh.staging.service import StagingOptions

    path = {"path": configuration.state_dir / "staging"}
    return read_section(StagingOptions, configuration.staging, where="staging", defaults=path)


def ledger_options(configuration: MeshConfiguration) -> LedgerOptions:
    """Read the options of the Ledger."""
    from callforest_mesh.ledger.service import LedgerOptions

    path = {"path": configuration.state_dir / "ledger"}
    return read_section(LedgerOptions, configuration.ledger, where="ledger", defaults=path)


def admission_options(configuration: MeshConfiguration) -> AdmissionOptions:
    """Read the options of Admission; the mode of attempts is the mesh's, not its own."""
    from callforest_mesh.admission.service import AdmissionOptions

    _refuse_elsewhere("admission", configuration.admission, forest="token_capture.forest_training")
    forest = {"forest": configuration.token_capture.forest_training}
    return read_section(
        AdmissionOptions, configuration.admission, where="admission", defaults=forest
    )


def finalizer_options(configuration: MeshConfiguration) -> FinalizerOptions:
    """Read the options of the Finalizer; what trains is said for the mesh as a whole.

    A custom selection policy is found here, so that a wrong one ends every process that would use
    it before it serves. What groups are padded to follows from how the trainer cuts batches.
    """
    from callforest_mesh.finalizer.policies import resolve_policy
    from callforest_mesh.finalizer.service import FinalizerOptions

    capture = configuration.token_capture
    for key in _TRAINS_KEYS:
        if key in configuration.finalizer:
            raise ConfigurationError(
                f"finalizer.{key}", f"is token_capture.{key}, which says what trains in one place"
            )
    try:
        resolve_policy(capture.selection_policy)
    except ValueError as error:
        raise ConfigurationError("token_capture.selection_policy", str(error)) from error
    defaults: dict[str, object] = {
        "path": configuration.state_dir / "finalizer",
        "cleanup_tenants": (configuration.tenant,),
        **{key: getattr(capture, key) for key in _TRAINS_KEYS},
        **_row_multiple(configuration),
    }
    return read_section(
        FinalizerOptions, configuration.finalizer, where="finalizer", defaults=defaults
    )


_OF_ANY_MESH: Final = frozenset({"min_step_batch_fraction"})
"""Options of the trainer's section that a training configuration brings, trainer or not."""


def _row_multiple(configuration: MeshConfiguration) -> dict[str, object]:
    """Give what every group's rows are padded to a multiple of, if the trainer decides it (FIN-6).

    The trainer's learner has one kind of pass: the old log-probabilities are those of the
    generation. So a log-probability microbatch is a training microbatch.

    Raises:
        ConfigurationError: the finalizer's section says something else.
    """
    section = configuration.trainer
    if "trainer" not in configuration.services and not section.keys() - _OF_ANY_MESH:
        return {}
    from callforest_core.forest.padding import row_multiple
    from callforest_mesh.trainer.batch import BatchMode, BatchOptions

    values = read_section(_BatchSection, {"batch": section.get("batch", {})}, where="trainer")
    batch = read_section(BatchOptions, values.batch, where="trainer.batch")
    multiple = row_multiple(
        batch.rank_count,
        train_microbatch=batch.train_microbatch_size,
        logprob_microbatch=batch.train_microbatch_size,
        packing=batch.mode is BatchMode.PACKED,
    )
    given = configuration.finalizer.get("row_multiple", multiple)
    if given != multiple or isinstance(given, bool):
        raise ConfigurationError(
            "finalizer.row_multiple",
            f"is {given!r}, but trainer.batch needs {multiple}: {batch.rank_count} ranks, "
            f"{batch.mode.value} batches of {batch.train_microbatch_size} rows. Leave it out: it "
            "is for a mesh whose trainer is not configured here",
        )
    return {"row_multiple": multiple}


def worker_options(configuration: MeshConfiguration) -> WorkerOptions:
    """Read the worker's own options, the engine's apart."""
    from callforest_mesh.worker.options import WorkerOptions

    known = [one.name for one in fields(WorkerOptions)]
    for key in configuration.worker:
        if key not in (*known, *_ENGINE_KEYS):
            raise unknown_key(key, (*known, *_ENGINE_KEYS), "worker")
    own = {key: one for key, one in configuration.worker.items() if key not in _ENGINE_KEYS}
    path = {"state_path": configuration.state_dir / "worker"}
    return read_section(WorkerOptions, own, where="worker", defaults=path)


def gateway_options(configuration: MeshConfiguration) -> GatewayOptions:
    """Read the options of the gateway; the control token comes from the environment alone."""
    from callforest_mesh.gateway.options import GatewayOptions

    if "control_token" in configuration.gateway:
        raise ConfigurationError(
            "gateway.control_token",
            f"belongs into the environment variable {CONTROL_TOKEN_VARIABLE}, nowhere else",
        )
    _refuse_elsewhere(
        "gateway", configuration.gateway, forest="token_capture.forest_training", tenant="tenant"
    )
    defaults = {
        "port": GATEWAY_PORT,
        "tenant": configuration.tenant,
        "grace_s": configuration.server.grace_s,
        "forest": configuration.token_capture.forest_training,
        "control_token": os.environ.get(CONTROL_TOKEN_VARIABLE, ""),
    }
    return read_section(GatewayOptions, configuration.gateway, where="gateway", defaults=defaults)


def _refuse_elsewhere(where: str, section: Mapping[str, Value], **places: str) -> None:
    """Refuse what one service alone cannot decide.

    Args:
        where: the section.
        section: its keys and values.
        places: of each such key, which one of the mesh says it.

    Raises:
        ConfigurationError: the section has one.
    """
    for key, place in places.items():
        if key in section:
            raise ConfigurationError(f"{where}.{key}", f"is {place}, which every service follows")


def trainer_options(configuration: MeshConfiguration) -> TrainerOptions:
    """Read the options of the Trainer; the model is the engine's unless another is named.

    How the mesh captures and pads is not the trainer's own: it is told, for its checkpoints.
    """
    from pathlib import Path

    from callforest_mesh.trainer.options import TrainerOptions

    _refuse_elsewhere(
        "trainer",
        configuration.trainer,
        forest="token_capture.forest_training",
        row_multiple="finalizer.row_multiple, or what trainer.batch needs",
    )
    defaults: dict[str, object] = {
        "path": configuration.state_dir / "trainer",
        "forest": configuration.token_capture.forest_training,
        **_row_multiple(configuration),
    }
    vllm = configuration.worker.get("vllm")
    model = vllm.get("model") if isinstance(vllm, dict) else None
    if isinstance(model, str):
        defaults["model_path"] = Path(model).absolute()
    return read_section(TrainerOptions, configuration.trainer, where="trainer", defaults=defaults)


def build_engine(configuration: MeshConfiguration) -> Engine:
    """Build the worker's engine, not started.

    Raises:
        ConfigurationError: an option of the engine is wrong.
    """
    section = {key: one for key, one in configuration.worker.items() if key in _ENGINE_KEYS}
    choice = read_section(EngineChoice, section, where="worker")
    if choice.engine == "scripted":
        from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedOptions

        scripted = read_section(
            ScriptedOptions, _section(section, "scripted"), where="worker.scripted"
        )
        return ScriptedEngine(scripted)
    from callforest_mesh.worker.vllm.engine import VllmEngine
    from callforest_mesh.worker.vllm.limits import VllmLimits
    from callforest_mesh.worker.vllm.options import VllmOptions

    options = read_section(VllmOptions, _section(section, "vllm"), where="worker.vllm")
    limits = read_section(VllmLimits, _section(section, "vllm_limits"), where="worker.vllm_limits")
    return VllmEngine(options, limits)


def _check_worker(configuration: MeshConfiguration) -> None:
    worker_options(configuration)
    build_engine(configuration)


def _section(values: Mapping[str, Value], key: str) -> Mapping[str, Value]:
    section = values.get(key, {})
    assert isinstance(section, dict), "read_section saw to it"
    return section


_CHECKS: Final[Mapping[str, Callable[[MeshConfiguration], object]]] = {
    "staging": staging_options,
    "ledger": ledger_options,
    "admission": admission_options,
    "worker": _check_worker,
    "finalizer": finalizer_options,
    "trainer": trainer_options,
    "gateway": gateway_options,
}
