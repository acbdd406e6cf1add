"""Entry modules of recipes: what is found, replaced, composed and refused (importing SkyRL's config takes a while)."""

import asyncio
import contextlib
import copy
import importlib
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pyarrow
import pyarrow.parquet
import pytest
import ray
from recipes import byte_tokenizer, read_lines, settings, write_inputs
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.train import utils as skyrl_utils
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints import main_base
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim
from skyrl.train.trainer import RayPPOTrainer
from skyrl_gym.envs import registration

from integrations.arctic_rl import entry_main, entrypoint, launch
from integrations.arctic_rl.backends import RemoteBackendRegistry
from integrations.arctic_rl.entry_main import leaves, only, replaced_attribute, replaced_function
from integrations.arctic_rl.entry_module import choose_entry, load_module, require_main, search_path
from integrations.arctic_rl.errors import ArcticError, ConfigError, UnsupportedError
from integrations.arctic_rl.experiment import ArcticExpMixin
from integrations.arctic_rl.launched_experiment import composed_experiments
from integrations.arctic_rl.registered_names import stand_ins, unregistered
from integrations.arctic_rl.runtime_env import runtime_env_vars
from integrations.arctic_rl.scoring import EnvPool, ScoringConfig
from integrations.arctic_rl.served_model import ServedModel
from integrations.arctic_rl.skyrl_config import has_arctic_settings, parse_config
from tests.arctic_rl.in_process_backend import InProcessBackend

MODULES = Path(__file__).parents[1] / "end_to_end" / "modules"

ENTRY = """
import sys
import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp, validate_cfg
from skyrl.train.utils import initialize_ray

SEEN = []

@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg, *more):
    SEEN.append((cfg, more))
"""
MAIN = """
def main():
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))
"""


class RandomTokens(InProcessBackend):
    """Samples tokens without a model; remembers every backend built."""

    built: ClassVar[list] = []

    @classmethod
    def from_config(cls, config, handle=None):
        cls.built.append(cls())
        return cls.built[-1]

    async def generate(self, requests):
        self._record("generate", requests)
        rng = random.Random(len(self.calls))
        rows = [[rng.randrange(100) for _ in range(rng.randint(1, 16))] for _ in requests]
        return [{"token_ids": row, "logprobs": [0.0] * len(row), "stop_reason": "stop"} for row in rows]


@RemoteBackendRegistry.register("random_tokens")
def random_tokens():
    return RandomTokens


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Writes a module of a fresh name into a folder on the path, and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(text, folder=tmp_path):
        name = f"entry_{os.getpid()}_{random.randrange(10**9)}"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(text)
        names.append(name)
        importlib.invalidate_caches()
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    """An experiment asks Ray, which is not there, for its GPUs."""
    monkeypatch.setattr(ray, "cluster_resources", dict)


@pytest.fixture
def in_process(monkeypatch):
    """The task runs in this process and Ray does not start; returns what was asked of both."""
    asked = SimpleNamespace(ray_starts=[], options=[], problems=[])

    def initialize_ray(cfg, run_id, extra_env_vars):
        asked.ray_starts.append((cfg, extra_env_vars))
        return {"ARCTIC_X": "1"}

    def start_task(options, name, file, entry_name, payload, run_id, env_vars):
        asked.options.append(options)
        args, kwargs = ray.cloudpickle.loads(payload)
        return SimpleNamespace(value=vars(sys.modules[name])[entry_name]._function(*args, **kwargs))

    real_get = ray.get
    monkeypatch.setattr(ray, "get", lambda ref: ref.value if isinstance(ref, SimpleNamespace) else real_get(ref))
    monkeypatch.setattr(entry_main, "initialize_ray", initialize_ray)
    monkeypatch.setattr(entry_main, "check_placement", lambda cfg: None)
    monkeypatch.setattr(entry_main, "start_task", start_task)
    monkeypatch.setattr(entrypoint, "release_semaphores", lambda: None)
    return asked


@pytest.fixture
def accepted(monkeypatch):
    """Every config is accepted; returns those that were checked."""
    checked = []
    monkeypatch.setattr(entry_main, "check_config", lambda cfg, unknown, own_data: checked.append(cfg))
    return checked


def run(name, *arguments, entry=None):
    launch.launch(name, list(arguments), entry)
    return sys.modules[name]


class TestFinding:
    def test_by_name_and_by_path(self, write_module, tmp_path, monkeypatch):
        name = write_module(ENTRY + MAIN)
        module = load_module(name)
        assert choose_entry(module) == "skyrl_entrypoint"
        elsewhere = write_module(ENTRY + MAIN, tmp_path / "elsewhere")
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(ConfigError, match=f"no module '{elsewhere}'.*path"):
            load_module(elsewhere)
        assert load_module(f"{tmp_path}/elsewhere/{elsewhere}.py").__name__ == elsewhere
        assert sys.path[0] == str(tmp_path / "elsewhere"), "as python FILE has it"

    def test_from_the_working_folder(self, write_module, tmp_path, monkeypatch):
        name = write_module(ENTRY + MAIN, tmp_path / "here")
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.chdir(tmp_path / "here")
        assert load_module(name).__file__ == str(tmp_path / "here" / f"{name}.py")

    def test_what_cannot_be_imported_is_one_message(self, write_module, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "path", list(sys.path))
        name = write_module("from skyrl.train.entrypoints.main_base import create_engines")
        with pytest.raises(ConfigError, match="cannot import name 'create_engines'"):
            load_module(name)
        for text, said in {
            "def main(:\n": r"SyntaxError: .*\(entry_\w+\.py, line 1\)",
            "\nx = undefined\n": r"NameError: name 'undefined' is not defined \(.*entry_\w+\.py, line 2\)",
            "raise ValueError('no such GPU')": r"ValueError: no such GPU \(.*entry_\w+\.py, line 1\)",
        }.items():
            name = write_module(text)
            with pytest.raises(ConfigError, match=rf"^{name} cannot be imported: {said}$"):
                load_module(name)
        name = write_module("from .env import X", tmp_path / "package")
        with pytest.raises(ConfigError, match=r"relative import.*dotted name"):
            load_module(str(tmp_path / "package" / f"{name}.py"))
        with pytest.raises(ConfigError, match=r"nothing\.py is not a Python file"):
            load_module("folder/nothing.py")
        (tmp_path / "json.py").write_text(ENTRY)
        with pytest.raises(ConfigError, match=r"'json' gave .*__init__\.py instead of .*json\.py: rename"):
            load_module(str(tmp_path / "json.py"))
        (tmp_path / "folder_only").mkdir()
        with pytest.raises(ConfigError, match="folder_only is a folder"):
            load_module("folder_only")

    def test_which_function_trains(self, write_module):
        none = load_module(write_module("def main(): pass"))
        with pytest.raises(UnsupportedError, match=r"no Ray remote function(.|\n)*@ray\.remote"):
            choose_entry(none)
        two = load_module(write_module(ENTRY + "@ray.remote\ndef prepare(): pass\n"))
        with pytest.raises(UnsupportedError, match=r"several .*skyrl_entrypoint, prepare.*--entry NAME"):
            choose_entry(two)
        assert choose_entry(two, "prepare") == "prepare"
        with pytest.raises(ConfigError, match=r"--entry prepar: .*did you mean 'prepare'"):
            choose_entry(two, "prepar")
        other = load_module(write_module(ENTRY))
        imported = f"from {other.__name__} import skyrl_entrypoint\n"
        assert choose_entry(load_module(write_module(imported))) == "skyrl_entrypoint"
        own = "import ray\n@ray.remote\ndef mine(cfg): pass\n"
        assert choose_entry(load_module(write_module(imported + own))) == "mine"

    def test_main_is_asked_for(self, write_module):
        with pytest.raises(UnsupportedError, match=r"no function main\(\)"):
            require_main(load_module(write_module(ENTRY)))

    def test_other_processes_import_what_this_one_does(self, write_module, tmp_path, monkeypatch):
        (tmp_path / "helpers").mkdir()
        (tmp_path / "helpers" / "helper_of_mine.py").write_text("")
        name = write_module(f"import sys\nsys.path.insert(0, {str(tmp_path / 'helpers')!r})\nimport helper_of_mine\n")
        monkeypatch.setattr(sys, "path", list(sys.path))
        path = search_path(load_module(name))
        folders = path.split(os.pathsep)
        assert folders[0] == str(tmp_path / "helpers") and str(tmp_path) in folders
        assert len(set(folders)) == len(folders)
        assert not any(folder.endswith("site-packages") for folder in folders)
        code = f"import {name}, helper_of_mine"
        subprocess.run([sys.executable, "-c", code], cwd="/", env={**os.environ, "PYTHONPATH": path}, check=True)

    def test_a_folder_that_ray_would_rename_is_refused(self, cfg):
        with pytest.raises(UnsupportedError, match="PYTHONPATH"):
            runtime_env_vars(cfg, "x", {"PYTHONPATH": "/recipes/$HOME"})
        assert runtime_env_vars(cfg, "x", {"PYTHONPATH": "/recipes"})["PYTHONPATH"] == "/recipes"

    def test_a_module_of_a_package(self, tmp_path, monkeypatch):
        (tmp_path / "recipes_of_mine" / "deep").mkdir(parents=True)
        (tmp_path / "recipes_of_mine" / "deep" / "entry.py").write_text(ENTRY + MAIN)
        monkeypatch.syspath_prepend(tmp_path)
        module = load_module("recipes_of_mine.deep.entry")
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
        assert search_path(module).split(os.pathsep)[-1] == str(tmp_path)


class TestMain:
    def test_its_own_config_arguments_and_changes_reach_the_function(self, write_module, in_process, accepted):
        name = write_module(
            ENTRY
            + """
from dataclasses import dataclass
from skyrl.train.config import AlgorithmConfig, make_config

@dataclass
class MyAlgorithm(AlgorithmConfig):
    knob: int = 3

Config = make_config(algorithm_cls=MyAlgorithm)

def main():
    cfg = Config.from_cli_overrides([a for a in sys.argv[1:] if not a.startswith("--")])
    cfg.trainer.project_name = "changed"
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.options(num_cpus=3, resources={"head": 1}).remote(cfg, "more"))
    SEEN.append("after the run")
"""
        )
        module = run(name, "trainer.algorithm.knob=7", "--mine", "trainer.arctic_rl.zero_stage=3")
        (cfg, more), after = module.SEEN
        assert (cfg.trainer.algorithm.knob, cfg.trainer.arctic_rl.zero_stage) == (7, 3)
        assert cfg.environment.skyrl_gym.bird.timeout_s == 30.0
        assert (cfg.trainer.project_name, more, after) == ("changed", ("more",), "after the run")
        assert accepted == [cfg], "once"
        ((started_with, env_vars),) = in_process.ray_starts
        assert started_with == cfg and str(Path(module.__file__).parent) in env_vars["PYTHONPATH"]
        assert in_process.options == [{"num_cpus": 3, "resources": {"head": 1}, "max_retries": 0}]

    @pytest.mark.parametrize(
        "check",
        [
            "validate_cfg(cfg)",
            "from skyrl.train.utils import validate_cfg as other; other(cfg)",
            "import skyrl.train.utils.utils as module; module.validate_cfg(cfg)",
            "pass",
        ],
    )
    def test_everything_is_said_at_once_before_ray_starts(self, write_module, in_process, check):
        name = write_module(ENTRY + MAIN.replace("validate_cfg(cfg)", check))
        bad = [
            "trainer.logger=console",
            "trainer.policy.model.path=/nowhere",
            "data.train_data=['/nowhere/x.parquet']",
            "trainer.epochs=0",
            "trainer.policy_mini_batch_size=7",
        ]
        with pytest.raises(ConfigError) as caught:
            run(name, *bad)
        for part in ("model.path=/nowhere", "/nowhere/x.parquet", "trainer.epochs=0", "SkyRL's own check"):
            assert part in str(caught.value)
        assert in_process.ray_starts == []

    def test_callbacks_of_an_asynchronous_recipe_are_said_too(self, in_process, monkeypatch):
        monkeypatch.syspath_prepend(MODULES)
        with pytest.raises(ConfigError) as caught:
            run("penalty", "trainer.fully_async.enabled=true", "trainer.logger=console", "trainer.epochs=0")
        for part in ("asynchronous loop calls no callbacks, and penalty.py adds some", "trainer.epochs=0"):
            assert part in str(caught.value)
        assert in_process.ray_starts == []

    def test_its_own_checks_run_too(self, in_process, accepted, monkeypatch):
        monkeypatch.syspath_prepend(MODULES)
        with pytest.raises(ValueError, match="free_tokens"):
            run("penalty", "trainer.algorithm.free_tokens=9", "generator.sampling_params.max_generate_length=8")
        assert len(accepted) == 1 and in_process.ray_starts == []

    def test_unknown_settings_name_the_nearest(self, write_module, in_process):
        name = write_module(ENTRY + MAIN)
        with pytest.raises(ConfigError) as caught:
            run(name, "trainer.arctic_rl.zero_stge=2", "trainer.algorithm.eps_clip_lo=2", "trainer.epochs=0")
        for part in ("'zero_stage'", "'trainer.algorithm.eps_clip_low'", "trainer.epochs=0"):
            assert part in str(caught.value)
        assert in_process.ray_starts == []

    def test_a_config_class_with_a_parser_of_its_own_is_asked_once(self, write_module, in_process, accepted):
        text = """
from dataclasses import dataclass
from omegaconf import OmegaConf

@dataclass
class Config(SkyRLTrainConfig):
    @classmethod
    def from_cli_overrides(cls, args):
        SEEN.append("asked")
        return super().from_cli_overrides([*args, "trainer.project_name=own"])

def main():
    cfg = Config.from_cli_overrides(sys.argv[1:])
    other = Config.from_dict_config(OmegaConf.create({"trainer": {"arctic_rl": {"zero_stage": 0}}}))
    SEEN.append(other.trainer.arctic_rl.zero_stage)
    skyrl_entrypoint.remote(cfg)
"""
        asked, zero_stage, (cfg, _) = run(write_module(ENTRY + text), "trainer.arctic_rl.zero_stage=3").SEEN
        assert (asked, zero_stage, cfg.trainer.project_name, cfg.trainer.arctic_rl.zero_stage) == (
            "asked",
            0,
            "own",
            3,
        )

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ("SkyRLTrainConfig.from_cli_overrides([])", r"ended without calling skyrl_entrypoint\.remote\(cfg\)"),
            ("skyrl_entrypoint.remote('text')", "hands 0 configs"),
            ("skyrl_entrypoint.remote(SkyRLTrainConfig())", "without from_cli_overrides or from_dict_config"),
            ("validate_cfg(SkyRLTrainConfig())", "without from_cli_overrides or from_dict_config"),
            (
                "cfg = SkyRLTrainConfig.from_cli_overrides([]); [skyrl_entrypoint.remote(cfg) for _ in range(2)]",
                "calls skyrl_entrypoint twice",
            ),
        ],
    )
    def test_another_shape_is_refused_with_what_to_write(self, write_module, in_process, accepted, body, message):
        with pytest.raises(UnsupportedError, match=message):
            run(write_module(ENTRY + f"def main():\n    {body}\n"))

    @pytest.mark.parametrize("call", ["other.remote(cfg)", "other.options(num_cpus=2).remote(key=cfg)"])
    def test_another_function_that_is_given_the_config_is_refused(self, write_module, in_process, accepted, call):
        """It would train on SkyRL's own workers."""
        name = write_module(
            ENTRY
            + "@ray.remote\ndef other(key): pass\n"
            + f"def main():\n    cfg = SkyRLTrainConfig.from_cli_overrides([])\n    {call}\n"
        )
        with pytest.raises(UnsupportedError, match=r"hands its config to other, and skyrl_entrypoint .*--entry other"):
            run(name, entry="skyrl_entrypoint")
        assert in_process.options == [] and not ray.is_initialized()

    def test_other_functions_run_as_they_are(self, write_module, in_process, accepted, monkeypatch):
        given = []
        kind = ray.remote_function.RemoteFunction
        monkeypatch.setattr(
            kind, "_remote", lambda self, args=None, kwargs=None, **options: given.append((args, options))
        )
        name = write_module(
            ENTRY
            + "@ray.remote\ndef other(key): pass\n"
            + MAIN.replace(
                "    validate", "    other.remote('data'); other.options(num_cpus=2).remote('more')\n    validate"
            )
        )
        module = run(name, entry="skyrl_entrypoint")
        assert [args for args, _ in given] == [("data",), ("more",)] and given[1][1]["num_cpus"] == 2
        assert len(module.SEEN) == 1
        assert "options" not in vars(module.other)

    def test_skyrl_is_as_it_was_afterwards(self, write_module, in_process, accepted):
        before = (skyrl_utils.validate_cfg, main_base.validate_cfg, skyrl_utils.initialize_ray, list(sys.argv))
        name = write_module(ENTRY + MAIN)
        module = run(name)
        after = (skyrl_utils.validate_cfg, main_base.validate_cfg, skyrl_utils.initialize_ray, list(sys.argv))
        assert after == before and module.validate_cfg is before[0]
        assert module.skyrl_entrypoint.remote.__wrapped__ is module.skyrl_entrypoint._function, "Ray's own"
        assert "options" not in vars(module.skyrl_entrypoint)
        assert not has_arctic_settings(type(SkyRLTrainConfig.from_cli_overrides([])))

    def test_the_task_inherits_the_environment_where_ray_ran_already(
        self, write_module, in_process, accepted, monkeypatch
    ):
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(entry_main, "stand_ins", contextlib.nullcontext)
        monkeypatch.setattr(entry_main, "unregistered", lambda cfg: [])
        monkeypatch.setattr(entry_main, "await_task", lambda task: None)
        run(write_module(ENTRY + MAIN))
        assert in_process.options[0]["runtime_env"] == {"env_vars": {"ARCTIC_X": "1"}}

    def test_a_failed_run_fails_the_command_even_where_main_only_logs_it(
        self, write_module, in_process, accepted, monkeypatch
    ):
        def fail(task):
            raise ArcticError("the run failed")

        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(entry_main, "stand_ins", contextlib.nullcontext)
        monkeypatch.setattr(entry_main, "unregistered", lambda cfg: [])
        monkeypatch.setattr(entry_main, "await_task", fail)
        name = write_module(
            ENTRY + MAIN.replace("ray.get(skyrl_entrypoint.remote(cfg))", "skyrl_entrypoint.remote(cfg)")
        )
        with pytest.raises(ArcticError, match="the run failed"):
            run(name)

    def test_an_interrupt_cancels_the_task(self, write_module, in_process, accepted, monkeypatch):
        cancelled = []
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(entry_main, "stand_ins", contextlib.nullcontext)
        monkeypatch.setattr(entry_main, "unregistered", lambda cfg: [])
        monkeypatch.setattr(entry_main, "cancel_task", cancelled.append)
        name = write_module(ENTRY + MAIN + "    raise KeyboardInterrupt\n")
        with pytest.raises(ArcticError, match="interrupted"):
            run(name)
        assert len(cancelled) == 1 and len(sys.modules[name].SEEN) == 1

    def test_skyrls_own_entry_module(self, in_process, accepted, monkeypatch):
        built = []
        monkeypatch.setattr(main_base.skyrl_entrypoint, "_function", built.append)
        launch.launch("skyrl.train.entrypoints.main_base", ["trainer.arctic_rl.zero_stage=0"])
        assert built[0].trainer.arctic_rl.zero_stage == 0

    def test_names_that_the_task_will_register_wait_for_it(self):
        cfg = parse_config(["trainer.algorithm.policy_loss_type=mine", "environment.env_class=mine"])
        cfg.trainer.algorithm.advantage_estimator = "rloo"

        def names():
            algorithm = cfg.trainer.algorithm
            return algorithm.policy_loss_type, algorithm.advantage_estimator, cfg.environment.env_class

        assert unregistered(cfg) == ["trainer.algorithm.policy_loss_type=mine", "environment.env_class=mine"]
        with stand_ins(cfg):
            assert unregistered(cfg) == []
            assert names() == ("regular", "rloo", "gsm8k")
        assert names() == ("mine", "rloo", "mine")


def test_the_command_line(monkeypatch):
    calls = []
    monkeypatch.setattr(launch, "launch", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(sys, "argv", ["launch.py", "--entry", "train", "a.b", "x.y=1", "--entry", "theirs", "-v"])
    launch.main()
    assert calls == [("a.b", ["x.y=1", "--entry", "theirs", "-v"], "train")]


def test_a_refusal_ends_the_process_with_one_message(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch.py", "no_such_module_of_mine"])
    with pytest.raises(SystemExit) as caught:
        launch.main()
    assert str(caught.value).startswith("error: there is no module 'no_such_module_of_mine'")


def test_replacements_reach_every_holder_and_are_taken_back(monkeypatch):
    def first():
        return 1

    holder = SimpleNamespace(inherited=1)
    monkeypatch.setattr(skyrl_utils, "some_function", first, raising=False)
    monkeypatch.setattr(main_base, "same_function", first, raising=False)
    with replaced_function(first, lambda: 2), replaced_attribute(holder, "added", 3):
        assert (skyrl_utils.some_function(), main_base.same_function(), holder.added) == (2, 2, 3)
    assert skyrl_utils.some_function is first and main_base.same_function is first
    assert not hasattr(holder, "added")


def test_a_model_that_the_backend_serves():
    model = ServedModel("policy_model")
    with pytest.raises(UnsupportedError, match=r"policy_model for async_run_ray_method.*dispatch"):
        model.async_run_ray_method("pass_through", "empty_cache")
    assert isinstance(copy.deepcopy(model), ServedModel)


def test_leaves_of_nested_mappings():
    values = {"a": {"b": 1, "c": {}}, "d": [1], "e": {"f": 2}}
    assert leaves(values) == ["a.b", "a.c", "d", "e.f"]
    assert only(values, {"a.c=", "d="}) == {"a": {"c": {}}, "d": [1]}


class Recorded(BasePPOExp):
    """An experiment that starts nothing of SkyRL's."""

    def __init__(self, cfg, label="none", *, suffix=""):
        self.cfg = cfg
        self.label = label + suffix
        self.ran = []

    def run(self):
        self.ran.append(type(self).__name__)


class RecordedChild(Recorded):
    def __init__(self, cfg):
        super().__init__(cfg, "child", suffix="!")


@pytest.fixture
def cfg():
    return parse_config(["trainer.logger=console", "trainer.arctic_rl.backend=random_tokens"])


class TestComposing:
    def test_every_class_wherever_it_is_defined(self, cfg):
        class Local(Recorded):
            pass

        RandomTokens.built.clear()
        for cls, arguments, label in [
            (Recorded, (cfg,), "none"),
            (Recorded, (cfg, "given"), "given"),
            (RecordedChild, (cfg,), "child!"),
            (Local, (cfg,), "none"),
        ]:
            with composed_experiments("the_entry", "id", {}) as built:
                experiment = cls(*arguments)
                experiment.run()
            assert built == [experiment] and isinstance(experiment, cls) and isinstance(experiment, ArcticExpMixin)
            assert (experiment.label, experiment.ran) == (label, [type(experiment).__name__])
            assert RandomTokens.built[-1].names() == ["destroy"], "closed once, also where run() is the recipe's own"
        assert len(RandomTokens.built) == 4
        plain = Recorded(cfg, label="plain")
        assert type(plain) is Recorded and plain.label == "plain", "afterwards nothing is composed any more"
        assert BasePPOExp._setup_trainer.__module__ == main_base.__name__

    def test_keyword_config(self, cfg):
        with composed_experiments("the_entry", "id", {}):
            assert Recorded(cfg=cfg, suffix="x").label == "nonex"

    def test_one_experiment_a_run(self, cfg):
        with composed_experiments("the_entry", "id", {}):
            Recorded(cfg)
            with pytest.raises(UnsupportedError, match="second experiment, RecordedChild"):
                RecordedChild(cfg)

    @pytest.mark.parametrize("name", ["get_inference_client", "_get_new_inference_client"])
    def test_engines_of_its_own_are_refused_before_they_start(self, cfg, name):
        own = type("OwnEngines", (Recorded,), {name: lambda self: None})
        child = type("Child", (own,), {})
        RandomTokens.built.clear()
        with (
            composed_experiments("the_entry", "id", {}),
            pytest.raises(UnsupportedError, match=f"OwnEngines.{name} .*leave it out"),
        ):
            child(cfg)
        assert RandomTokens.built == []

    def test_evaluation_alone_is_refused_before_anything_starts(self, cfg):
        from skyrl.train.entrypoints.main_generate import EvalOnlyEntrypoint

        child = type("MyEvaluation", (EvalOnlyEntrypoint,), {})
        RandomTokens.built.clear()
        with (
            composed_experiments("the_entry", "id", {}),
            pytest.raises(UnsupportedError, match=r"MyEvaluation evaluates without a trainer.*eval_before_train=true"),
        ):
            child(cfg)
        assert RandomTokens.built == []

    def test_trainers_that_cannot_be_served(self, cfg):
        builds = type("OwnWorkers", (RayPPOTrainer,), {"build_models": lambda self, *workers: None})
        with composed_experiments("the_entry", "id", {}):
            with pytest.raises(UnsupportedError, match="builds a RayPPOTrainer by itself: return it from get_trainer"):
                RayPPOTrainer(cfg)
            Recorded(cfg)
            with pytest.raises(UnsupportedError, match="FullyAsyncTrainerSim only simulates training"):
                FullyAsyncTrainerSim(cfg)
            with pytest.raises(UnsupportedError, match=r"OwnWorkers\.build_models starts training workers"):
                builds(cfg)
            own = type("OwnReference", (RayPPOTrainer,), {"update_ref_with_policy": lambda self: None})
            with pytest.raises(TypeError, match="tracker"):
                own(cfg)
            cfg.trainer.update_ref_every_epoch = True
            with pytest.raises(UnsupportedError, match=r"OwnReference\.update_ref_with_policy would not be called"):
                own(cfg)
        with pytest.raises(TypeError, match="tracker"):
            RayPPOTrainer(cfg)

    def test_what_the_function_changes_is_checked_again(self, cfg):
        cfg.trainer.epochs = 0
        cfg.trainer.algorithm.policy_loss_type = "nobody"
        cfg.trainer.algorithm.advantage_estimator = "nothing"
        with composed_experiments("the_entry", "id", {}), pytest.raises(ConfigError) as caught:
            Recorded(cfg)
        lines = str(caught.value).splitlines()[1:]
        for name in ("trainer.epochs", "policy_loss_type", "advantage_estimator"):
            assert any(name in line for line in lines), lines
        with composed_experiments("the_entry", "id", {}), pytest.raises(UnsupportedError, match="a config of its own"):
            Recorded(SkyRLTrainConfig())

    def test_a_loss_that_the_function_registered_is_known(self, cfg):
        def loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
            return (log_probs * advantages).sum(), {}

        PolicyLossRegistry.register("registered_here", loss)
        try:
            cfg.trainer.algorithm.policy_loss_type = "registered_here"
            with composed_experiments("the_entry", "id", {}):
                assert Recorded(cfg).label == "none"
        finally:
            PolicyLossRegistry.unregister("registered_here")


class TestEnvironments:
    def generator(self, cfg):
        with composed_experiments("the_entry", "id", {}):
            return Recorded(cfg).get_generator(cfg, byte_tokenizer(), SimpleNamespace())

    def test_a_gym_generator_asks_for_a_registered_environment(self, cfg):
        cfg.environment.env_class = "registered_in_time"
        registration.register(id="registered_in_time", entry_point="somewhere:Env")
        try:
            config = self.generator(cfg).scoring_config
        finally:
            registration.deregister("registered_in_time")
        assert config.main_modules == ("__main__", "the_entry")
        with pytest.raises(ConfigError, match=r"environment\.env_class=registered_in_time"):
            self.generator(cfg)

    def test_the_entry_modules_own_run_in_a_thread(self, write_module):
        """A scoring process would have to import the trainer for them; named in env_modules, it does."""
        text = "import os\nclass Env:\n    def where(self):\n        return os.getpid()\n"
        module = load_module(write_module(text))

        async def where(**settings):
            pool = EnvPool(ScoringConfig(workers=1, main_modules=(module.__name__,), **settings))
            try:
                return await pool.call(module.Env(), "where")
            finally:
                await pool.aclose()

        assert asyncio.run(where()) == os.getpid()
        assert asyncio.run(where(modules=(module.__name__,))) != os.getpid()


def run_whole(name, folder, monkeypatch, changes, arguments=()):
    """A whole run in this process, on a backend without models."""
    from integrations.arctic_rl.entry_task import run_entry

    monkeypatch.setattr(entry_main, "start_task", lambda options, *given: SimpleNamespace(value=run_entry(*given)))
    monkeypatch.setattr("skyrl.train.trainer.configure_ray_worker_logging", lambda: None)
    monkeypatch.syspath_prepend(MODULES)
    RandomTokens.built.clear()
    changes = {
        "trainer.arctic_rl.backend": "random_tokens",
        "trainer.enable_ray_gpu_monitor": False,
        "generator.inference_engine.enable_ray_prometheus_stats": False,
        **changes,
    }
    launch.launch(name, [*arguments, *settings(folder, changes)])
    (backend,) = RandomTokens.built
    return backend, read_lines(folder / "logs" / "metrics.jsonl")


def test_a_generator_of_its_own_trains_on_our_client(tmp_path, in_process, monkeypatch):
    write_inputs(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    backend, logs = run_whole("own_generator", tmp_path, monkeypatch, {"environment.env_class": "nobody_asks"})
    steps = [line for line in logs if "trainer/global_step" in line]
    assert [line["trainer/global_step"] for line in steps] == [1, 2]
    requests = [request for (batch,) in backend.arguments("generate") for request in batch]
    assert len(requests) == 2 * 8 * 4
    assert len({request["session_id"] for request in requests}) == len(requests)
    assert backend.names().count("step") == 4 and backend.names().count("sync_weights") >= 2
    assert backend.names()[-1] == "destroy" and backend.names().count("destroy") == 1
    assert all(0 < line["reward/avg_raw_reward"] < 1 for line in steps)
    assert all("generate/scoring_busy_s" not in line for line in steps), "no environment, so no scoring pool"
    assert steps[0]["label"] == len("even"), "the recipe's own _setup_trainer ran around ours"


def test_rows_of_an_environment_that_nobody_registered_are_told_before_workers_start(
    tmp_path, in_process, monkeypatch
):
    write_inputs(tmp_path)
    table = pyarrow.parquet.read_table(tmp_path / "prompts.parquet")
    column = pyarrow.array(["never_made"] * len(table))
    table = table.set_column(table.column_names.index("env_class"), "env_class", column)
    pyarrow.parquet.write_table(table, tmp_path / "prompts.parquet")
    changes = {"environment.env_class": "gsm8k", "trainer.arctic_rl.env_modules": "[]"}
    with pytest.raises(ConfigError, match=r"data\.train_data: .*never_made \(16 rows\)"):
        run_whole("penalty", tmp_path, monkeypatch, changes)
    (backend,) = RandomTokens.built
    assert "initialize" not in backend.names() and backend.names()[-1] == "destroy"


def test_a_function_that_builds_no_experiment(write_module, tmp_path, in_process, monkeypatch):
    write_inputs(tmp_path)
    name = write_module(ENTRY + MAIN)
    with pytest.raises(UnsupportedError, match=f"{name}.skyrl_entrypoint built no BasePPOExp"):
        run_whole(name, tmp_path, monkeypatch, {})
