"""What vLLM's own transfer engines are told, read by vLLM's own classes."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.weight_transfer import VLLMWeightSyncClient
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
from vllm.v1.engine.async_llm import AsyncLLM

from integrations.arctic_rl.server.weight_sync import ipc, nccl
from integrations.arctic_rl.server.weight_sync.transfer import EngineClient, plain_update, weight_source
from integrations.arctic_rl.server.weights import TensorSpec, declare, write_weights


def test_the_client_is_what_vllm_asks_for_and_its_calls_exist():
    assert isinstance(EngineClient([], 1), VLLMWeightSyncClient)
    calls = {
        "init_weight_transfer_engine": ["request"],
        "start_weight_update": [],
        "update_weights": ["request"],
        "finish_weight_update": ["weight_version"],
    }
    for name, parameters in calls.items():
        assert list(inspect.signature(getattr(AsyncLLM, name)).parameters)[1:] == parameters


@pytest.mark.parametrize(("engines", "processes"), [(1, 1), (1, 4), (3, 1), (4, 2)])
def test_every_process_of_every_engine_has_a_rank_of_its_own(engines, processes):
    """vLLM adds an engine's own rank to its offset; rank 0 is the trainer's."""
    given = nccl.init_info(rank=0, address=("h", 1), processes=engines * processes, bucket_bytes=2**20)
    trainer = NCCLTrainerInitInfo(**given)
    assert trainer.is_sender and trainer.world_size == 1 + engines * processes
    payload = worker_init_payload(
        NCCLWeightTransferInitInfo(
            master_address=trainer.master_address,
            master_port=trainer.master_port,
            rank_offset=1,
            world_size=trainer.world_size,
            packed=trainer.packed,
            packed_buffer_size_bytes=trainer.packed_buffer_size_bytes,
            packed_num_buffers=trainer.packed_num_buffers,
        )
    )
    told = [NCCLWeightTransferInitInfo(**nccl.of_engine(payload, number, processes)) for number in range(engines)]
    ranks = [info.rank_offset + rank for info in told for rank in range(processes)]
    assert [0, *ranks] == list(range(trainer.world_size))
    assert {info.packed_buffer_size_bytes for info in told} == {2**20}
    assert not NCCLTrainerInitInfo(
        **nccl.init_info(rank=3, address=None, processes=engines * processes, bucket_bytes=1)
    ).is_sender


def test_ipc_needs_no_ranks_and_its_buffer_holds_the_largest_tensor():
    tensors = [TensorSpec("a", (3, 5), "float32"), TensorSpec("b", (7,), "bfloat16")]
    info = IPCTrainerInitInfo(**ipc.init_info(rank=1, tensors=tensors, lasting=False, bucket_bytes=16))
    assert (info.packed, info.packed_buffer_size_bytes, info.is_sender) == (True, 60, False)
    assert nccl.of_engine({"packed": True}, 1, 2) == {"packed": True}


def test_handles_of_gpu_memory_arrive_whole_as_plain_text(monkeypatch):
    handles = [{"GPU-1": (torch.Tensor, (2,), 0, b"\x00\xff")}, {"GPU-1": ("x",)}]
    update = {"names": ["a", "b"], "dtype_names": ["float32"] * 2, "shapes": [[2], [1]], "ipc_handles": handles}
    plain = plain_update({**update, "ipc_handles_pickled": None, "tensor_sizes": None})
    assert isinstance(plain["ipc_handles_pickled"], str) and plain.keys() == {*update, "ipc_handles_pickled"} - {
        "ipc_handles"
    }
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")
    with pytest.raises(ValueError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        IPCWeightTransferUpdateInfo(**plain)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    assert IPCWeightTransferUpdateInfo(**plain).ipc_handles == handles


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_source_reads_as_vllms_own_with_copies_behind_their_tensors(dtype):
    """vLLM's sender compares each tensor with the metadata; its own source gives a plain module's pairs."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    specs = declare(module.named_parameters(), dtype)
    read = module.named_parameters
    source = weight_source(specs, {"tied": "0.weight"}, read, lasting=False)
    pairs = list(NCCLTrainerWeightTransferEngine._checked_iter(source, source.metadata()))
    assert [name for name, _ in pairs] == ["0.weight", "tied", "0.bias", "1.weight", "1.bias"]
    values = dict(pairs)
    assert torch.equal(values["tied"], values["0.weight"])
    for name, value in ModuleSource(module):
        assert torch.equal(values[name], value.to(getattr(torch, dtype)))


def test_each_engine_is_called_once_and_waited_for(monkeypatch):
    calls = []
    engine = [
        SimpleNamespace(
            **{
                method: SimpleNamespace(remote=lambda *args, m=method, n=number: calls.append((n, m, *args)))
                for method in ("transfer_init", "transfer_start", "transfer_update", "transfer_finish")
            }
        )
        for number in range(2)
    ]
    monkeypatch.setattr("ray.get", lambda refs: calls.append(f"waited for {len(refs)}"))
    client = EngineClient(engine, 2)
    client.init_weight_transfer_engine({"rank_offset": 1})
    client.start_weight_update()
    client.update_weights({"names": []})
    client.finish_weight_update()
    assert calls == [
        (0, "transfer_init", {"rank_offset": 1}),
        (1, "transfer_init", {"rank_offset": 3}),
        "waited for 2",
        *[(0, "transfer_start"), (1, "transfer_start"), "waited for 2"],
        *[(0, "transfer_update", {"names": []}), (1, "transfer_update", {"names": []}), "waited for 2"],
        *[(0, "transfer_finish"), (1, "transfer_finish"), "waited for 2"],
    ]


def test_parts_of_an_update_that_was_given_up_are_not_counted_again(tmp_path):
    """A fused layer of which the first third had come when the update was given up gets all thirds of the next one."""
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from integrations.arctic_rl.server.weight_extension import WeightExtension

    class Fused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(6, 2), requires_grad=False)
            self.weight.weight_loader = lambda param, value, part: param.data[2 * part :][:2].copy_(value)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = Fused()

        def load_weights(self, named):
            parameters = dict(self.named_parameters())
            for name, value in named:
                parameters["qkv.weight"].weight_loader(parameters["qkv.weight"], value, int(name))

    class Extension(WeightExtension):
        def arctic_tied_copies(self):
            return {}

    def load(names, value):
        values = [(name, torch.full((2, 2), 10.0 * value + int(name))) for name in names]
        extension.arctic_load_part(str(write_weights(declare(values, "float32"), values, tmp_path, value, "float32")))

    model = Model()
    record_metadata_for_reloading(model)
    extension = Extension()
    extension.vllm_config, extension.model_config = VllmConfig(), SimpleNamespace(dtype=torch.float32)
    extension.model_runner = SimpleNamespace(
        get_model=lambda: model, reset_lora_state=int, reset_encoder_cache=int, reset_mm_cache=int
    )
    extension.arctic_begin_parts()
    load("0", 1)
    for value in (2, 3):
        extension.arctic_begin_parts()
        load("0", value)
        load("12", value)
        extension.arctic_end_parts()
        assert model.qkv.weight[:, 0].tolist() == [10.0 * value + part for part in (0, 0, 1, 1, 2, 2)]


def test_a_transfer_begins_when_the_gpu_is_done_with_the_step(monkeypatch):
    from integrations.arctic_rl.server.weight_sync import transfer
    from integrations.arctic_rl.server.weight_sync.sender import WeightSender

    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronized"))
    engine = SimpleNamespace(send_weights=lambda: calls.append("sent"))
    monkeypatch.setattr(transfer, "trainer_engine", lambda *_: engine)
    sender = WeightSender(SimpleNamespace(module=torch.nn.Linear(2, 3)), 2, 1)
    tensors = sender.declare("float32")
    for _ in range(2):
        sender.transfer("nccl", ["engine"], 1, tensors, {}, 2**20)
    assert calls == ["synchronized", "sent"] * 2
