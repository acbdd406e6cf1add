"""SkyRL's config classes with our settings added; importing this costs SkyRL's own config import."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from skyrl.train.config.config import EnvironmentConfig, SkyRLGymConfig, SkyRLTrainConfig, TrainerConfig

# Under the name that no folder called ``envs`` can shadow, and that scoring workers import.
from skyrl_arctic_rl.envs.bird.config import BirdEnvConfig, BirdSettingError
from skyrl_arctic_rl.envs.bird.multi_turn_config import BirdMultiTurnConfig
from skyrl_arctic_rl.envs.bird.sections import SECTIONS
from yaml import YAMLError

from .config import PREFIX, ArcticRLConfig, check_setting_names
from .errors import ConfigError
from .support.leaves import leaves

SKYRL_DATALOADER_WORKERS = 8
"""What SkyRL makes of an unset ``data.dataloader.num_workers``; each of them would import the whole stack."""

OVERRIDE_KEY = "trainer.override_entrypoint="
GYM_PREFIX = "environment.skyrl_gym"


@dataclass
class ArcticTrainerConfig(TrainerConfig):
    """SkyRL's trainer settings and ours."""

    arctic_rl: ArcticRLConfig = field(default_factory=ArcticRLConfig)


@dataclass
class ArcticSkyRLGymConfig(SkyRLGymConfig):
    """SkyRL's settings of environments and those of ours, each under the id that a recipe selects it by.

    They are objects of the environments' own light modules: an environment carries its settings into the scoring
    workers, which must not import SkyRL for them.
    """

    bird: BirdEnvConfig = field(default_factory=BirdEnvConfig)
    bird_sql: BirdEnvConfig = field(default_factory=BirdEnvConfig)
    bird_multi_turn: BirdMultiTurnConfig = field(default_factory=BirdMultiTurnConfig)


@dataclass
class ArcticEnvironmentConfig(EnvironmentConfig):
    """SkyRL's environment section with our environments' settings."""

    skyrl_gym: ArcticSkyRLGymConfig = field(default_factory=ArcticSkyRLGymConfig)


@dataclass
class ArcticSkyRLTrainConfig(SkyRLTrainConfig):
    """SkyRL's whole config with ``trainer.arctic_rl`` and the settings of our environments."""

    trainer: ArcticTrainerConfig = field(default_factory=ArcticTrainerConfig)
    environment: ArcticEnvironmentConfig = field(default_factory=ArcticEnvironmentConfig)


def with_arctic_settings(config_class: type[SkyRLTrainConfig]) -> type[SkyRLTrainConfig]:
    """A recipe's config class with our settings added to its own trainer and environment sections.

    The recipe's defaults hold. A section of its own at ``environment.skyrl_gym.bird``, say, is kept.
    """
    # Not the sections of a whole config, whose __post_init__ fills some fields from others.
    default = {item.name: item.default_factory for item in fields(config_class)}
    trainer_class = type(default["trainer"]())
    environment_class, gym_class = type(default["environment"]()), type(default["environment"]().skyrl_gym)
    missing = [name for name in SECTIONS if name not in {item.name for item in fields(gym_class)}]

    trainer = _with_fields(trainer_class, {"arctic_rl": (ArcticRLConfig, ArcticRLConfig)})
    gym = _with_fields(gym_class, {name: (SECTIONS[name], SECTIONS[name]) for name in missing})
    environment = _with_fields(environment_class, {"skyrl_gym": (gym, gym)})

    def make_environment() -> EnvironmentConfig:
        section = default["environment"]()
        return _moved(section, environment, skyrl_gym=_moved(section.skyrl_gym, gym))

    sections = {
        "trainer": (trainer, lambda: _moved(default["trainer"](), trainer)),
        "environment": (environment, make_environment),
    }
    return _with_fields(config_class, sections)


def _with_fields(base: type, added: dict[str, tuple[type, Callable[[], Any]]]) -> type:
    """A subclass of a dataclass with fields of the given names, each of a type and with a default factory."""
    namespace: dict[str, Any] = {name: field(default_factory=factory) for name, (_, factory) in added.items()}
    namespace["__annotations__"] = {name: kind for name, (kind, _) in added.items()}
    return dataclass(type(f"Arctic{base.__name__}", (base,), namespace))


def _moved(section: Any, kind: type, **replaced: Any) -> Any:
    """The values of a dataclass object in an object of ``kind``, a subclass of its class."""
    return kind(**{item.name: vars(section)[item.name] for item in fields(section) if item.init} | replaced)


def has_arctic_settings(config_class: type[SkyRLTrainConfig]) -> bool:
    """Whether a config class holds our settings, as those of ``with_arctic_settings`` do."""
    trainer = next(item for item in fields(config_class) if item.name == "trainer")
    return "arctic_rl" in {item.name for item in fields(type(trainer.default_factory()))}


def parse_config(
    arguments: list[str],
    config_class: type[SkyRLTrainConfig] | None = None,
    build: Callable[[type[SkyRLTrainConfig], list[str]], SkyRLTrainConfig] | None = None,
) -> SkyRLTrainConfig:
    """Build the config from a recipe's overrides, the entrypoint override left out.

    Args:
        arguments: ``key=value`` overrides as on the command line.
        config_class: a recipe's ``SkyRLTrainConfig`` subclass; None = SkyRL's own.
        build: makes an object of the class with our settings from the overrides; None = its ``from_cli_overrides``.

    Raises:
        ConfigError: for an unknown or out-of-range name below ``trainer.arctic_rl``, and an out-of-range value below
            ``environment.skyrl_gym.bird`` or ``bird_sql``.
        ConfigError: SkyRL's own message for one of its settings, with the nearest known name added.
    """
    config_class = ArcticSkyRLTrainConfig if config_class is None else with_arctic_settings(config_class)
    overrides = [argument for argument in arguments if not argument.startswith(OVERRIDE_KEY)]
    check_setting_names(overrides)
    try:
        cfg = config_class.from_cli_overrides(overrides) if build is None else build(config_class, overrides)
    except ConfigError:
        raise
    except BirdSettingError as error:
        raise ConfigError(f"{GYM_PREFIX}.{error}") from error
    except ValueError as error:
        raise ConfigError(
            f"{_without_list(str(error))}{_nearest_hint(str(error), overrides, config_class)}"
        ) from error
    except (AssertionError, TypeError, AttributeError, OmegaConfBaseException, YAMLError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"the recipe cannot be read: {message} ({type(error).__name__})") from error
    dataloader = cfg.data.dataloader
    chosen = any(override.lstrip("+").startswith("data.dataloader.num_workers=") for override in overrides)
    if not chosen and not dataloader.persistent_workers and dataloader.num_workers == SKYRL_DATALOADER_WORKERS:
        dataloader.num_workers = 0
    return cfg


def parse_what_is_known(
    arguments: list[str],
    config_class: type[SkyRLTrainConfig] | None = None,
    build: Callable[[type[SkyRLTrainConfig], list[str]], SkyRLTrainConfig] | None = None,
) -> tuple[SkyRLTrainConfig, list[str]]:
    """``parse_config`` without settings of ours that are refused and names that are unknown, and what stands against
    those.

    So that what else is wrong with a recipe can be said at once.

    Raises:
        ConfigError: see ``parse_config``, where it is not about names.
    """
    problems: list[str] = []
    full_class = ArcticSkyRLTrainConfig if config_class is None else with_arctic_settings(config_class)
    known = leaf_names(full_class) | {OVERRIDE_KEY.rstrip("=")}
    while True:
        try:
            return parse_config(arguments, config_class, build), problems
        except ConfigError as error:
            rest = _without_culprits(arguments, str(error), known)
            if len(rest) == len(arguments):
                raise
            problems += str(error).splitlines()
            arguments = rest


def _without_culprits(arguments: list[str], message: str, known: set[str]) -> list[str]:
    """The arguments without those that a message of ``parse_config`` can be about; never without ``dry_run``."""
    kept = f"{PREFIX}.dry_run"
    if message.startswith(f"{PREFIX}."):
        return [
            argument
            for argument in arguments
            if not _name(argument).startswith(f"{PREFIX}.") or _name(argument) == kept
        ]
    if message.startswith(GYM_PREFIX):
        return [argument for argument in arguments if not _name(argument).startswith(GYM_PREFIX)]
    return [argument for argument in arguments if not _first_unknown(_name(argument), known)]


def _name(argument: str) -> str:
    return argument.split("=", 1)[0].lstrip("+")


def _without_list(message: str) -> str:
    """SkyRL's message as one line; about unknown fields, without the long list of known ones."""
    message = " ".join(message.split())
    if not message.startswith("Invalid fields"):
        return message
    return message.split(" Valid fields are", 1)[0].replace(" for Arctic", " for ")


def _nearest_hint(message: str, overrides: list[str], config_class: type) -> str:
    if not message.startswith("Invalid fields"):
        return ""
    known = leaf_names(config_class)
    unknown = [name for name in map(_name, overrides) if _first_unknown(name, known)]
    return "".join(f"\n{name}: {_nearest_setting(name, known)}" for name in unknown)


def _nearest_setting(name: str, known: set[str]) -> str:
    """The setting that was meant: one of the same section with a name like it, or one of such a name anywhere."""
    section, _, last = name.rpartition(".")
    siblings = [leaf for leaf in known if leaf.rpartition(".")[0] == section]
    for leaves_, cutoff in ((siblings, 0.6), (known, 0.8)):
        close = difflib.get_close_matches(last, {leaf.rpartition(".")[2] for leaf in leaves_}, n=1, cutoff=cutoff)
        if close:
            meant = [leaf for leaf in leaves_ if leaf.rpartition(".")[2] == close[0]]
            return f"did you mean {max(meant, key=lambda leaf: _likeness(leaf, name))!r}?"
    return f"SkyRL {version('skyrl')} has no such setting"


def _likeness(leaf: str, name: str) -> tuple[float, str]:
    return difflib.SequenceMatcher(None, leaf, name).ratio(), leaf


def _first_unknown(name: str, known: set[str]) -> bool:
    return not any(name == leaf or name.startswith(f"{leaf}.") or leaf.startswith(f"{name}.") for leaf in known)


def leaf_names(config_class: type) -> set[str]:
    """Dotted names of all leaves of a config class."""
    return set(leaves(config_class))
