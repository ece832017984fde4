"""params.yaml as one frozen, validated tree.
A number that changes a result is a default here or stands in that file, and nowhere else.
"""

from agentgym.config.algorithm import (
    ActorCriticConfig,
    DiscountedConfig,
    DynamicSamplingConfig,
    ExplorationConfig,
    PolicyGradientConfig,
    PreferenceConfig,
    algorithm_config,
    family_of,
    max_refills,
)
from agentgym.config.load import (
    Setting,
    config_digest,
    first_line,
    load_config,
    read_tree,
    settings,
)
from agentgym.config.operation import AlarmsConfig, GateConfig, KubeRayConfig, KubernetesConfig
from agentgym.config.optimization import LearnerConfig, LoraConfig, OptimizerConfig
from agentgym.config.params import RunConfig, is_elsewhere
from agentgym.config.section import ConfigError, Section, first_of
from agentgym.config.sections import (
    ChatConfig,
    EnvConfig,
    EvaluationConfig,
    HorizonConfig,
    ModelConfig,
    VllmConfig,
    asked_of,
    owned_env,
)

__all__ = [
    "ActorCriticConfig", "AlarmsConfig", "ChatConfig", "ConfigError",
    "DiscountedConfig", "DynamicSamplingConfig", "EnvConfig", "EvaluationConfig",
    "ExplorationConfig", "GateConfig", "HorizonConfig", "KubeRayConfig", "KubernetesConfig",
    "LearnerConfig", "LoraConfig", "ModelConfig", "OptimizerConfig", "PolicyGradientConfig",
    "PreferenceConfig", "RunConfig", "Section", "Setting", "VllmConfig", "algorithm_config",
    "asked_of", "config_digest", "family_of", "first_line", "first_of", "is_elsewhere",
    "load_config", "max_refills", "owned_env", "read_tree", "settings",
]  # fmt: skip
