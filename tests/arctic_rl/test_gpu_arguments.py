"""What would be passed to DeepSpeed, vLLM and Ray on GPUs, of which the machine that runs this needs none."""

import dataclasses
import os
import tempfile
from types import SimpleNamespace

import pytest
import ray

from integrations.arctic_rl.backends.builtin import BuiltinBackend
from integrations.arctic_rl.devices import device_here, device_of, device_of_cluster
from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.placement import ClusterDescription, Node, placement_request, plan_placement
from integrations.arctic_rl.server import training_worker
from integrations.arctic_rl.server.placement_groups import Reservation, bundle_places, gpu_share
from integrations.arctic_rl.server.sampling_spec import engine_arguments, engine_environment
from integrations.arctic_rl.server.weight_sync import plan_sync
from integrations.arctic_rl.server_config import server_config
from integrations.arctic_rl.skyrl_config import parse_config

NODE = ClusterDescription((Node("n0", 64, 8),))
SHARED = (
    "trainer.placement.policy_num_gpus_per_node=4",
    "trainer.placement.ref_num_gpus_per_node=4",
    "generator.inference_engine.num_engines=2",
    "generator.inference_engine.tensor_parallel_size=2",
)


def on_gpus(*overrides):
    cfg = parse_config(["trainer.logger=console", *overrides])
    return server_config(cfg, run_id="r", env_vars={}, device="cuda")


def test_the_device_is_the_settings_or_that_of_the_cluster(monkeypatch):
    cfg = parse_config(["trainer.logger=console"])
    assert (device_of(cfg, 8), device_of(cfg, 0)) == ("cuda", "cpu")
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 3.0})
    assert device_of_cluster(cfg) == "cuda"
    for device in ("cpu", "cuda"):
        cfg.trainer.arctic_rl.device = device
        assert device_of(cfg, 8) == device_of(cfg, 0) == device_of_cluster(cfg) == device_here(cfg) == device


def test_a_shared_engine_of_two_gpus():
    sampling = on_gpus(*SHARED, "generator.inference_engine.gpu_memory_utilization=0.45").sampling
    arguments = engine_arguments(sampling, {"enable_chunked_prefill"})
    assert {name: arguments[name] for name in ("tensor_parallel_size", "pipeline_parallel_size")} == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
    }
    assert arguments["distributed_executor_backend"] == "mp"
    assert arguments["gpu_memory_utilization"] == 0.45
    assert arguments["enable_sleep_mode"] is True
    assert arguments["enforce_eager"] is False
    assert "kv_cache_memory_bytes" not in arguments and "block_size" not in sampling.engine_kwargs
    environment = engine_environment(sampling)
    assert not any(name.startswith(("VLLM_CPU", "OMP", "VLLM_ENABLE")) for name in environment)


def test_an_engine_alone_on_one_gpu():
    alone = ("trainer.placement.colocate_all=false", "generator.inference_engine.engine_init_kwargs.block_size=64")
    sampling = on_gpus(*alone, "generator.inference_engine.enforce_eager=true").sampling
    arguments = engine_arguments(sampling, {"block_size", "enable_chunked_prefill"})
    assert arguments["distributed_executor_backend"] == "uni"
    assert arguments["enable_sleep_mode"] is False
    assert arguments["enforce_eager"] is True
    assert arguments["block_size"] == 64


def test_compiled_kernels_outlive_the_run_and_its_folder(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/somewhere")
    sampling = dataclasses.replace(on_gpus().sampling, scratch_directory="/dev/shm/run/s")
    environment = engine_environment(sampling)
    assert environment["TMPDIR"] == "/dev/shm/run/s"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == f"/somewhere/torchinductor_{os.getuid()}"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/users/own")
    assert engine_environment(sampling)["TORCHINDUCTOR_CACHE_DIR"] == "/users/own"
    assert "TORCHINDUCTOR_CACHE_DIR" not in engine_environment(dataclasses.replace(sampling, device="cpu"))


def test_data_parallel_engines_are_refused():
    with pytest.raises(UnsupportedError, match=r"data_parallel_size=2: .*num_engines"):
        on_gpus("generator.inference_engine.data_parallel_size=2")


def test_every_model_is_on_its_gpu(monkeypatch):
    config = on_gpus(*SHARED, "trainer.critic.model.path=some/critic", "trainer.arctic_rl.zero_stage=3")
    assert {spec.device for spec in (config.policy, config.critic, config.reference, config.sampling)} == {"cuda"}
    calls = []
    deepspeed = SimpleNamespace(
        init_distributed=lambda backend, **_: calls.append(backend), ops=SimpleNamespace(__compatible_ops__={})
    )
    monkeypatch.setitem(__import__("sys").modules, "deepspeed", deepspeed)
    training_worker._init_distributed("cuda")
    training_worker._init_distributed("cpu")
    assert calls == ["nccl", "gloo"]


def test_actors_get_their_share_of_their_gpu_and_engines_all_their_devices(tmp_path, monkeypatch):
    config = on_gpus(*SHARED)
    plan = plan_placement(placement_request(config), NODE)
    assert bundle_places(plan) == [("n0", gpu) for gpu in range(4)]
    assert gpu_share(plan, ("n0", 0)) == 0.3333
    places = bundle_places(plan)
    devices = dict(zip(places, ("3", "5", "6", "7"), strict=True))
    workers = BuiltinBackend.from_config(config)._workers
    bundles = {place: number for number, place in enumerate(places)}
    workers.reservation = Reservation(plan, SimpleNamespace(id="the group"), bundles, devices)
    workers.sync_plan = plan_sync(plan, None, here="n0")
    workers.run_dir = str(tmp_path)
    given = []

    class Actor:
        def options(self, **options):
            given.append(options)
            return self

        def remote(self, *arguments):
            return arguments

    def remote(*cls, **options):
        given.append(options)
        return Actor() if cls else lambda _: Actor()

    monkeypatch.setattr(ray, "remote", remote)
    for worker in (plan.of("policy")[2], plan.of("sampling")[1]):
        given.clear()
        (spec, *_) = workers.start_actor(worker, 4)
        options = {name: value for of_call in given for name, value in of_call.items()}
        assert options["num_gpus"] == 0.3333
        assert options["scheduling_strategy"].placement_group_bundle_index == 2
        assert spec.visible_devices == {"policy": "6", "sampling": "6,7"}[worker.job]
        if worker.job == "sampling":
            assert engine_environment(spec)["CUDA_VISIBLE_DEVICES"] == "6,7"
            assert "CUDA_VISIBLE_DEVICES" not in engine_environment(config.sampling)
