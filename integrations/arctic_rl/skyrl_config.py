"""SkyRL's config classes with our settings added; importing this costs SkyRL's own config import."""

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.metadata import version
from types import NoneType
from typing import Any, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from skyrl.train.config.config import EnvironmentConfig, SkyRLGymConfig, SkyRLTrainConfig, TrainerConfig

# Under the name that no folder called ``envs`` can shadow, and that scoring workers import.
from skyrl_arctic_rl.envs.bird.config import BirdEnvConfig, BirdSettingError
from skyrl_arctic_rl.envs.bird.multi_turn_config import BirdMultiTurnConfig
from skyrl_arctic_rl.envs.bird.sections import SECTIONS
from yaml import YAMLError

from .config import ArcticRLConfig, check_setting_names
from .culprits import culprits
from .errors import ConfigError
from .support.entries import shown
from .support.leaves import leaves, section_class, skyrl_leaves, value_of
from .value_types import matches

SKYRL_DATALOADER_WORKERS = 8
"""What SkyRL makes of an unset ``data.dataloader.num_workers``; each of them would import the whole stack."""

OVERRIDE_KEY = "trainer.override_entrypoint="
GYM_PREFIX = "environment.skyrl_gym"
_UNREADABLE = "the recipe cannot be read: "


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
        ConfigError: for an unknown or out-of-range name below ``trainer.arctic_rl``, an out-of-range value below
            ``environment.skyrl_gym.bird`` or ``bird_sql``, a single value in place of a section, and a ``+``.
        ConfigError: a line for each name that SkyRL does not know, with the nearest known one, or SkyRL's own message.
    """
    config_class = _class_with_ours(config_class)
    overrides = [argument for argument in arguments if not argument.startswith(OVERRIDE_KEY)]
    _check_plus(overrides, config_class)
    check_setting_names(overrides)
    try:
        cfg = config_class.from_cli_overrides(overrides) if build is None else build(config_class, overrides)
    except ConfigError:
        raise
    except BirdSettingError as error:
        raise ConfigError(f"{GYM_PREFIX}.{error}") from error
    except ValueError as error:
        raise ConfigError(_skyrls_message(str(error), overrides, config_class)) from error
    except (AssertionError, TypeError, AttributeError, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{_UNREADABLE}{_one_line(error)} ({type(error).__name__})") from error
    misplaced = list(_section_problems(cfg))
    if misplaced:
        raise ConfigError("\n".join(misplaced))
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
    """``parse_config`` without the arguments that it cannot take, and what stands against each of those.

    So that what else is wrong with a recipe can be said at once. A value of SkyRL's own settings that its classes
    refuse to be built with is in the config all the same, for whoever checks that further.

    Raises:
        ConfigError: see ``parse_config``, where no argument is to blame.
    """
    problems: list[str] = []
    refused: list[str] = []
    known = leaf_names(_class_with_ours(config_class)) | {OVERRIDE_KEY.rstrip("=")}

    def message(part: list[str]) -> str | None:
        try:
            parse_config(part, config_class, build)
        except ConfigError as error:
            return str(error)
        return None

    while True:
        try:
            cfg = parse_config(arguments, config_class, build)
        except ConfigError as error:
            said = str(error)
            blamed = _named(arguments, said, ours=error.__cause__ is None)
            if blamed:
                problems += said.splitlines()
            else:
                blamed = culprits(arguments, lambda part, said=said: message(part) == said)
                if not blamed:
                    raise
                # Not those that only decide in which way the others fail.
                blamed = culprits(blamed, lambda part: message(part) is not None) or blamed
                blamed = _first_named(blamed, said)
                problems.append(_blame(blamed, said, known))
                blamed = blamed[:1]
                refused += blamed if build is None else []
            arguments = [argument for argument in arguments if argument not in blamed]
        else:
            _put_back(cfg, refused)
            return cfg, problems


def _class_with_ours(config_class: type[SkyRLTrainConfig] | None) -> type[SkyRLTrainConfig]:
    return ArcticSkyRLTrainConfig if config_class is None else with_arctic_settings(config_class)


def _named(arguments: list[str], message: str, ours: bool) -> list[str]:
    """The arguments that the lines of a message begin with; none where a line begins with something else.

    SkyRL's own messages say little where they begin with a setting, so that only ``name: ...`` counts in those.
    """
    lines = message.splitlines()
    names = [re.split("[=: ]" if ours else ":", line, maxsplit=1)[0] for line in lines]
    keys = {argument: argument.split("=", 1)[0] for argument in arguments}
    found = []
    for name in names:
        exact = [argument for argument, key in keys.items() if key == name]
        told = exact or [argument for argument, key in keys.items() if key.startswith(f"{name}.")]
        if not told:
            return []
        found += told
    return found


def _first_named(blamed: list[str], message: str) -> list[str]:
    """The arguments with the one in front that the message names first, or else the last one."""
    named = [argument for argument in blamed if _name(argument) in message]
    first = min(named, key=lambda argument: message.index(_name(argument))) if named else blamed[-1]
    return [first, *(argument for argument in blamed if argument != first)]


def _blame(blamed: list[str], message: str, known: set[str]) -> str:
    """A line about the arguments, one or several together, that make ``parse_config`` fail with a message."""
    names = [_name(argument) for argument in blamed]
    if message.startswith(GYM_PREFIX):
        section = re.match(rf"{re.escape(GYM_PREFIX)}\.\w+", names[0])
        return re.sub(rf"^{re.escape(GYM_PREFIX)}\.\w+", section[0], message) if section else message
    unreadable = message.startswith(_UNREADABLE)
    if unreadable and len(blamed) == 1 and any(leaf.startswith(f"{names[0]}.") for leaf in known):
        return _not_a_section(names[0], blamed[0].partition("=")[2], optional=False)
    told = " together with ".join(argument.removesuffix("=") for argument in blamed)
    remedy = "leave it out" if len(blamed) == 1 else "leave one of them out"
    return f"{told}: {' '.join(message.split()).rstrip('.')}; {remedy}, or write another value"


def _put_back(cfg: SkyRLTrainConfig, arguments: list[str]) -> None:
    """Set the values of SkyRL's own settings that are of their type, past the checks of its classes."""
    for argument in arguments:
        leaf = skyrl_leaves().get(_name(argument))
        section, _, last = _name(argument).rpartition(".")
        if leaf is None or "${" in argument or not is_dataclass(value_of(cfg, section)):
            continue
        try:
            value = _below(OmegaConf.to_container(OmegaConf.from_cli([argument])), _name(argument))
        except YAMLError:
            continue
        if matches(value, leaf.hint):
            setattr(value_of(cfg, section), last, value)


def _below(values: Any, setting: str) -> Any:
    """What nested mappings hold below a dotted name."""
    for name in setting.split("."):
        values = values[name]
    return values


def _section_problems(section: Any, prefix: str = "") -> Iterator[str]:
    """A line for each value that stands where a section of settings belongs."""
    for item in fields(section):
        value, name = vars(section)[item.name], prefix + item.name
        optional = NoneType in get_args(item.type)
        if section_class(item.type) is None or (value is None and optional):
            continue
        if is_dataclass(value):
            yield from _section_problems(value, f"{name}.")
        else:
            yield _not_a_section(name, value, optional)


def _not_a_section(name: str, value: Any, optional: bool) -> str:
    or_null = " or null" if optional else ""
    return f"{name}={shown(value)} is not a section of settings{or_null}: write {name}.SETTING=VALUE, or leave it out"


def _check_plus(overrides: list[str], config_class: type) -> None:
    """Refuse Hydra's ``+``, which SkyRL's parser does not take."""
    added = [override for override in overrides if override.startswith("+")]
    known = leaf_names(config_class) if added else set()
    lines = []
    for override in added:
        name = _name(override)
        instead = _nearest_setting(name, known) if _unknown(name, known) else f"write {override.lstrip('+')}"
        lines.append(f"{override}: SkyRL's parser takes no '+': {instead}")
    if lines:
        raise ConfigError("\n".join(lines))


def _name(argument: str) -> str:
    return argument.split("=", 1)[0].lstrip("+")


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _skyrls_message(message: str, overrides: list[str], config_class: type) -> str:
    """SkyRL's message as one line; of unknown fields, a line each with what was meant, without the list of known ones.

    Fields in a mapping, ``section={field: value}``, keep SkyRL's message.
    """
    if not message.startswith("Invalid fields"):
        return _one_line(message)
    known = leaf_names(config_class)
    unknown = [name for name in map(_name, overrides) if _unknown(name, known)]
    if unknown:
        return "\n".join(f"{name}: {_nearest_setting(name, known)}" for name in dict.fromkeys(unknown))
    return _one_line(message).split(". Valid fields are", 1)[0].replace(" for Arctic", " for ")


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


def _unknown(name: str, known: set[str]) -> bool:
    return not any(name == leaf or name.startswith(f"{leaf}.") or leaf.startswith(f"{name}.") for leaf in known)


def leaf_names(config_class: type) -> set[str]:
    """Dotted names of all leaves of a config class."""
    return set(leaves(config_class))
