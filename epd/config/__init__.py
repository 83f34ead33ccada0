"""Configuration: its schema, and how a file and options become one."""

from epd.config.admission import AdmissionConfig, BatchConfig, ClassConfig, InteractiveConfig
from epd.config.failure import BreakerConfig, RetryConfig
from epd.config.load import build, load_coordinator, load_deployment
from epd.config.routing import LinkConfig, RoutingConfig
from epd.config.schema import (
    CoordinatorConfig,
    DeploymentConfig,
    ExistingServer,
    LeaseConfig,
    MediaConfig,
    PoolConfig,
    PoolsConfig,
    RequestConfig,
    WorkerConfig,
)

__all__ = [
    "AdmissionConfig",
    "BatchConfig",
    "BreakerConfig",
    "ClassConfig",
    "CoordinatorConfig",
    "DeploymentConfig",
    "ExistingServer",
    "InteractiveConfig",
    "LeaseConfig",
    "LinkConfig",
    "MediaConfig",
    "PoolConfig",
    "PoolsConfig",
    "RequestConfig",
    "RetryConfig",
    "RoutingConfig",
    "WorkerConfig",
    "build",
    "load_coordinator",
    "load_deployment",
]
