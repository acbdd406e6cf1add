"""SkyRL's config classes with ``trainer.arctic_rl`` added; importing this costs SkyRL's own config import."""

from dataclasses import dataclass, field

from skyrl.train.config.config import SkyRLTrainConfig, TrainerConfig

from .config import ArcticRLConfig, check_setting_names, nearest
from .errors import ConfigError

OVERRIDE_KEY = "trainer.override_entrypoint="


@dataclass
class ArcticTrainerConfig(TrainerConfig):
    """SkyRL's trainer settings and ours."""

    arctic_rl: ArcticRLConfig = field(default_factory=ArcticRLConfig)


@dataclass
class ArcticSkyRLTrainConfig(SkyRLTrainConfig):
    """SkyRL's whole config with ``trainer.arctic_rl``."""

    trainer: ArcticTrainerConfig = field(default_factory=ArcticTrainerConfig)


def with_arctic_settings(config_class: type[SkyRLTrainConfig]) -> type[SkyRLTrainConfig]:
    """A recipe's config class with ``trainer.arctic_rl`` added to its own trainer settings."""
    trainer_class = type(config_class().trainer)
    namespace = {"__annotations__": {"arctic_rl": ArcticRLConfig}, "arctic_rl": field(default_factory=ArcticRLConfig)}
    trainer = dataclass(type(f"Arctic{trainer_class.__name__}", (trainer_class,), namespace))
    namespace = {"__annotations__": {"trainer": trainer}, "trainer": field(default_factory=trainer)}
    return dataclass(type(f"Arctic{config_class.__name__}", (config_class,), namespace))


def parse_config(arguments: list[str], config_class: type[SkyRLTrainConfig] | None = None) -> SkyRLTrainConfig:
    """Build the config from a recipe's overrides, the entrypoint override left out.

    Args:
        arguments: ``key=value`` overrides as on the command line.
        config_class: a recipe's ``SkyRLTrainConfig`` subclass; None = SkyRL's own.

    Raises:
        ConfigError: for an unknown or out-of-range name below ``trainer.arctic_rl``.
        ValueError: SkyRL's own message for one of its settings, with the nearest known name added.
    """
    config_class = ArcticSkyRLTrainConfig if config_class is None else with_arctic_settings(config_class)
    overrides = [argument for argument in arguments if not argument.startswith(OVERRIDE_KEY)]
    check_setting_names(overrides)
    try:
        cfg = config_class.from_cli_overrides(overrides)
    except ConfigError:
        raise
    except ValueError as error:
        raise ValueError(f"{error}{_nearest_hint(str(error), overrides, config_class)}") from error
    if not any(override.startswith("data.dataloader.num_workers=") for override in overrides):
        cfg.data.dataloader.num_workers = 0
    return cfg


def _nearest_hint(message: str, overrides: list[str], config_class: type) -> str:
    if not message.startswith("Invalid fields"):
        return ""
    known = leaf_names(config_class)
    unknown = [name for name in (o.split("=", 1)[0] for o in overrides) if _first_unknown(name, known)]
    return "".join(f"\n{name}: {nearest(name, known)}" for name in unknown)


def _first_unknown(name: str, known: set[str]) -> bool:
    return not any(name == leaf or name.startswith(f"{leaf}.") or leaf.startswith(f"{name}.") for leaf in known)


def leaf_names(config_class: type) -> set[str]:
    """Dotted names of all leaves of a config class, taken from its defaults."""

    def walk(node: object, prefix: str) -> set[str]:
        names: set[str] = set()
        for key, value in vars(node).items():
            path = f"{prefix}{key}"
            names |= walk(value, f"{path}.") if hasattr(value, "__dataclass_fields__") else {path}
        return names

    return walk(config_class(), "")
