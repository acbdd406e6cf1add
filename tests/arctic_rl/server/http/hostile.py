"""Malformed and hostile requests, by a seed: each is one that a server must answer with a status from 400 to 499."""

import json
import random
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import torch

from integrations.arctic_rl.backends.contract import PROMPTS, UPDATE, batch
from integrations.arctic_rl.client import make_meta
from integrations.arctic_rl.sampling_params import to_vllm_kwargs
from integrations.arctic_rl.wire.body import CONTENT_TYPE, VERSION, encode

PATHS = [
    "../outside",
    "../../etc/passwd",
    "/etc",
    "/",
    ".",
    "",
    "a/../../b",
    "\u0000x",
    "x" * 5000,
    "link/out",
    "~/../../x",
]
FUNCTIONS = ["os.system", "subprocess.run", "builtins.eval", "shutil.rmtree", "pickle.loads", "a.b.c", "__main__.x"]
UNKNOWN = ["gpro", "no_such_loss", "", "x" * 2000, "compute_logprob", "..", "__import__('os')"]


@dataclass
class Hostile:
    """One request; ``body`` is bytes, or a value that is sent as JSON."""

    what: str
    method: str = "POST"
    path: str = ""
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None


def hostile_requests(job_id: str, count: int, seed: int) -> Iterator[Hostile]:
    """``count`` requests, all kinds in turn.

    Args:
        job_id: of the job that runs.
        count: how many.
        seed: of their details.
    """
    rng = random.Random(seed)
    job = f"/v1/jobs/{job_id}"
    for number in range(count):
        request = KINDS[number % len(KINDS)](rng, job)
        request.headers = {
            "x-arctic-rl-version": str(VERSION),
            "x-request-id": f"hostile-{seed}-{number}",
            **request.headers,
        }
        yield request


def send_raw(url: str, data: bytes) -> int:
    """Status of the answer to bytes that no HTTP library would send."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(data)
        answer = connection.recv(4096)
    return int(answer.split(b" ", 2)[1])


def _good_pass(**changes: Any) -> bytes:
    rows = batch()
    values = {"job": "policy", "meta": make_meta(rows, dp_size=1), "processing": UPDATE, **changes.pop("values", {})}
    return encode(values, {**rows, **changes})


def _batch_call(rng: random.Random, job: str, what: str, body: bytes) -> Hostile:
    return Hostile(what, path=f"{job}/fwd_bwd", body=body, headers={"content-type": CONTENT_TYPE})


def truncated(rng: random.Random, job: str) -> Hostile:
    body = _good_pass()
    return _batch_call(rng, job, "truncated", body[: rng.randrange(len(body))])


def noise(rng: random.Random, job: str) -> Hostile:
    return _batch_call(rng, job, "noise", rng.randbytes(rng.randrange(1, 3000)))


def announced(rng: random.Random, job: str) -> Hostile:
    body = struct.pack("<Q", rng.choice([10 * 2**30, 2**63, 2**40])) + rng.randbytes(50)
    return _batch_call(rng, job, "a header of 10 GB", body)


def wrong_dtype(rng: random.Random, job: str) -> Hostile:
    rows = batch()
    name = rng.choice(["input_ids", "attention_mask", "responses", "advantages", "old_log_probs"])
    other = rows[name].to(torch.int32) if rows[name].is_floating_point() else rows[name].float() + 0.5
    return _batch_call(rng, job, f"{name} of {other.dtype}", _good_pass(**{name: other}))


def wrong_shape(rng: random.Random, job: str) -> Hostile:
    rows = batch()
    name = rng.choice(sorted(rows))
    value = rows[name]
    other = rng.choice([value[: rng.randrange(len(value))], value[:, :-1], value[None], torch.cat([value, value])])
    return _batch_call(rng, job, f"{name} of {list(other.shape)}", _good_pass(**{name: other}))


def not_finite(rng: random.Random, job: str) -> Hostile:
    name = rng.choice(["advantages", "old_log_probs", "loss_mask"])
    value = batch()[name].clone()
    value[1, 0] = rng.choice([float("nan"), float("inf"), -float("inf")])
    return _batch_call(rng, job, f"{name} is not finite", _good_pass(**{name: value}))


def huge_batch(rng: random.Random, job: str) -> Hostile:
    body = _good_pass()
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    inner = json.loads(header["__metadata__"]["arctic_rl"])
    inner["batch"]["rows"][rng.randrange(2)] = rng.choice([10**9, 2**31 - 1, 10**15, -3])
    header["__metadata__"]["arctic_rl"] = json.dumps(inner)
    text = json.dumps(header).encode()
    return _batch_call(rng, job, "a huge batch", struct.pack("<Q", len(text)) + text + body[8 + length :])


def unknown_processor(rng: random.Random, job: str) -> Hostile:
    name = rng.choice(UNKNOWN)
    processing = rng.choice(
        [
            {"loss_fn": name or "none", "config": {}},
            {"post": [name], **UPDATE},
            {"loss_fn": "regularized", "config": {"policy_loss": name or "none", "policy_loss_config": {}}},
            {**UPDATE, name or "surprise": 1},
            {"loss_fn": ["grpo"], "config": {}},
            {"loss_fn": "grpo", "config": [1]},
        ]
    )
    return _batch_call(rng, job, "an unknown processor", _good_pass(values={"processing": processing}))


def dotted_path(rng: random.Random, job: str) -> Hostile:
    name = rng.choice(FUNCTIONS)
    processing = rng.choice(
        [
            {"loss_fn": name, "config": {}},
            {**UPDATE, "post": [name]},
            {"loss_fn": "regularized", "config": {"policy_loss": name, "policy_loss_config": {}}},
            {"loss_fn": "regularized", "config": {"policy_loss": "skyrl_policy_loss", "policy_loss_config": {}}},
        ]
    )
    return _batch_call(rng, job, "a dotted path", _good_pass(values={"processing": processing}))


def wrong_meta(rng: random.Random, job: str) -> Hostile:
    scalars = make_meta(batch(), dp_size=1)
    name = rng.choice(["temperature", "max_token_len_per_gpu", "dp_size", "batch_num_tokens", "zorro_train_enable"])
    scalars[name] = rng.choice(["many", None, -4, [1], float("nan"), 10**30 if name == "dp_size" else {}])
    return _batch_call(rng, job, f"meta {name}={scalars[name]!r}", _good_pass(values={"meta": scalars}))


def path_traversal(rng: random.Random, job: str) -> Hostile:
    call = rng.choice(["save_checkpoint", "load_checkpoint", "save_weights", "start_profile"])
    folder = rng.choice(PATHS)
    body: dict[str, Any] = {"directory": folder}
    if call.endswith("checkpoint"):
        body["job"] = "policy"
    if call == "start_profile":
        body = {"settings": {"save_path": folder}}
    return Hostile(f"{call} {folder[:30]!r}", path=f"{job}/{call}", body=body)


def wrong_arguments(rng: random.Random, job: str) -> Hostile:
    call, body = rng.choice(
        [
            ("sleep_sampling", {"level": 7}),
            ("sleep_sampling", {}),
            ("wake_sampling", {"tags": ["everything"]}),
            ("pause_generation", {"in_flight": "abort"}),
            ("sync_weights", {"keep_cache": "yes"}),
            ("weight_norm", {"job": "critics"}),
            ("weight_norm", {"job": ["policy"]}),
            ("step", {"twice": True}),
            ("step", []),
            ("step", "step"),
            ("save_weights", {"directory": 5}),
            ("start_profile", {"settings": None}),
            ("start_profile", {"settings": {"save_path": 3}}),
        ]
    )
    return Hostile(f"{call} {body}", path=f"{job}/{call}", body=body)


def wrong_prompt(rng: random.Random, job: str) -> Hostile:
    prompt = {"prompt_token_ids": PROMPTS[0], "params": to_vllm_kwargs({"max_tokens": 4})}
    change = rng.choice(
        [
            {"prompt_token_ids": []},
            {"prompt_token_ids": [1, -5]},
            {"prompt_token_ids": ["one"]},
            {"prompt_token_ids": [5, 2**31]},
            {"prompt_token_ids": [2**70]},
            {"prompt_token_ids": None},
            {"params": {}},
            {"params": {**prompt["params"], "temprature": 1.0}},
            {"params": {**prompt["params"], "temperature": "hot"}},
            {"params": {**prompt["params"], "max_tokens": -1}},
            {"params": {**prompt["params"], "max_tokens": 10**12}},
            {"params": {**prompt["params"], "detokenize": "yes"}},
            {"params": {**prompt["params"], "n": 5}},
            {"params": {**prompt["params"], "logits_processors": ["os.system"]}},
            {"params": {**prompt["params"], "logit_bias": {"x": 1.0}}},
            {"params": {**prompt["params"], "logit_bias": {"1": 1.0, "01": 2.0}}},
            {"cache_salt": 5},
            {"session_id": {}},
            {"priority": 1},
        ]
    )
    return Hostile("a wrong prompt", path=f"{job}/generate", body={"requests": [{**prompt, **change}]})


def no_json(rng: random.Random, job: str) -> Hostile:
    call = rng.choice(["step", "generate", "save_weights"])
    body = rng.choice([b"{", b"\xff\xfe", b"", b"[" * 50_000, b'{"a":' * 20_000, b"null", b"NaN"])
    return Hostile("no JSON", path=f"{job}/{call}", body=body, headers={"content-type": "application/json"})


def wrong_place(rng: random.Random, job: str) -> Hostile:
    path = rng.choice(
        [
            f"/v1/jobs/{rng.randbytes(8).hex()}/step",
            f"{job}/destroy",
            f"{job}/__init__",
            f"{job}/initialize",
            "/v1/jobs/..%2f..%2fetc/step",
            "/v2/anything",
            "/%00",
            f"{job}/../../metrics/x",
        ]
    )
    return Hostile(f"no such place {path}", path=path, body={})


def wrong_method(rng: random.Random, job: str) -> Hostile:
    return Hostile("a wrong method", rng.choice(["GET", "PUT", "PATCH", "DELETE"]), f"{job}/step")


def wrong_headers(rng: random.Random, job: str) -> Hostile:
    headers = rng.choice(
        [
            {"x-arctic-rl-version": "0"},
            {"x-arctic-rl-version": "latest"},
            {"x-request-id": "a b"},
            {"x-request-id": "x" * 500},
            {"x-request-id": "../../x"},
        ]
    )
    return Hostile(f"headers {headers}", path=f"{job}/step", body={}, headers=headers)


def another_job(rng: random.Random, job: str) -> Hostile:
    body = rng.choice(
        [
            {"config": {}, "num_training_steps": 4},
            {"config": {}, "num_training_steps": -4},
            {"config": [], "num_training_steps": 4},
            {"num_training_steps": 4},
            {"config": {"policy": {"policy_loss": "gASV"}}, "num_training_steps": 10**30},
        ]
    )
    return Hostile("another job", path="/v1/jobs", body=body)


def raw_bytes(rng: random.Random, job: str) -> Hostile:
    start = f"POST {job}/fwd_bwd HTTP/1.1\r\nhost: x\r\nx-arctic-rl-version: {VERSION}\r\nx-request-id: raw\r\n"
    data = rng.choice(
        [
            f"{start}content-length: {10 * 2**30}\r\n\r\n",
            f"{start}content-length: 99999999999999999999\r\n\r\n",
            f"{start}content-length: -5\r\n\r\n",
            f"{start}content-length: ten\r\n\r\n",
            "NONSENSE\r\n\r\n",
            f"{start}x: {'y' * 100_000}\r\n\r\n",
        ]
    )
    return Hostile("raw bytes", raw=data.encode())


KINDS: list[Callable[[random.Random, str], Hostile]] = [
    truncated,
    noise,
    announced,
    wrong_dtype,
    wrong_shape,
    not_finite,
    huge_batch,
    unknown_processor,
    dotted_path,
    wrong_meta,
    path_traversal,
    wrong_arguments,
    wrong_prompt,
    no_json,
    wrong_place,
    wrong_method,
    wrong_headers,
    another_job,
    raw_bytes,
]
