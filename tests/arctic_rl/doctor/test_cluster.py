"""Where the doctor says that workers would be, what they reach, and which folders they share."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from integrations.arctic_rl.doctor import cluster
from integrations.arctic_rl.doctor.cluster import file_system, folder_lines, placement_lines, port_lines
from integrations.arctic_rl.doctor.machine import Machine
from integrations.arctic_rl.skyrl_config import parse_config

MACHINE = Machine(cores=2, memory=2**33, shared=2**30, shared_folder="/dev/shm", gpus=())
GPU = ("H200", 141 * 2**30)


def recipe(*overrides):
    return parse_config(["trainer.logger=console", "trainer.algorithm.use_kl_loss=false", *overrides])


def test_the_plan_of_a_machine_without_gpus():
    cfg = recipe("trainer.placement.policy_num_gpus_per_node=2", "generator.inference_engine.num_engines=2")
    table, problems = placement_lines(cfg, MACHINE)
    assert [line.split() for line in table[1:]] == [
        ["policy", "0", "this", "machine", "cpu"],
        ["policy", "1", "this", "machine", "cpu"],
        ["sampling", "0", "this", "machine", "cpu"],
        ["sampling", "1", "this", "machine", "cpu"],
    ]
    assert problems == []


def test_the_plan_of_the_machines_gpus_and_of_a_described_cluster():
    sizes = ("trainer.placement.policy_num_gpus_per_node=2", "generator.inference_engine.num_engines=1")
    cfg = recipe(*sizes, "generator.inference_engine.tensor_parallel_size=2")
    two = Machine(cores=2, memory=2**33, shared=2**30, shared_folder="/dev/shm", gpus=(GPU, GPU))
    table, problems = placement_lines(cfg, two)
    assert table[-1].split() == ["sampling", "0", "this", "machine", "cuda", "0,1"] and problems == []
    cfg.trainer.placement.colocate_all = False
    assert "asks for 4 GPUs" in placement_lines(cfg, two)[1][0]
    cfg.trainer.arctic_rl.cluster_gpus = [2, 2]
    table, problems = placement_lines(cfg, MACHINE)
    assert table[-1].split() == ["sampling", "0", "node", "1", "cuda", "0,1"] and problems == []


def test_ports(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (line,), problems = port_lines()
    assert line.endswith("a port can be opened and reached") and problems == []
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert port_lines(url)[0][1:] == [f"trainer.arctic_rl.server_url={url} can be reached"]
    (problem,) = port_lines(url)[1]
    assert problem.startswith(f"trainer.arctic_rl.server_url={url} cannot be reached")
    monkeypatch.setenv("RAY_ADDRESS", url.removeprefix("http://"))
    assert port_lines()[1][0].startswith("RAY_ADDRESS=127.0.0.1:")
    monkeypatch.setattr(cluster, "own_address", lambda: "192.0.2.77")
    assert "192.0.2.77" in port_lines()[1][0] and "/etc/hosts" in port_lines()[1][0]


def test_folders_of_one_machine_are_told_where_there_are_several(monkeypatch):
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint="/shared", fstype="nfs4"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert file_system("/shared/a/b") == "nfs4" and file_system("/home/a") == "ext4"
    cfg = recipe("trainer.ckpt_path=/home/a", "trainer.export_path=/shared/b", "trainer.log_path=s3://bucket/c")
    found, problems = folder_lines(cfg)
    assert found == ["trainer.ckpt_path=/home/a: ext4", "trainer.export_path=/shared/b: nfs4"] and problems == []
    cfg.trainer.arctic_rl.cluster_gpus = [8, 8]
    (problem,) = folder_lines(cfg)[1]
    assert problem.startswith("trainer.ckpt_path=/home/a: a folder on ext4 is of this machine alone")


@pytest.mark.parametrize(
    ("place", "target"),
    [
        (None, None),
        ("auto", None),
        ("10.0.0.1:6380", ("10.0.0.1", 6380)),
        ("ray://head:10001", ("head", 10001)),
        ("https://server", ("server", 443)),
    ],
)
def test_what_an_address_names(place, target):
    assert cluster._target(place) == target
