"""What sharing prompts saves on one GPU: ``bash scripts/gpu_zorro.sh``, or ``python -m benchmarks.zorro_gpu``.

Qwen3 shapes from 0.6B to 8B in bfloat16, random weights. First every attention back end that is installed is compared
with the plain softmax in float32, output and gradients. Then updates (forward, log-probs, loss, backward through
``run_pipeline``) with each prompt computed once for its group, and with rows packed end to end on the same back end,
in turn: the speed-up beside the ratios of operations and tokens, the share of the GPU's bfloat16 peak that the
operations of the model make (those of gradient checkpointing not counted), and the peak of allocated memory beyond
weights and gradients. Made to stay below 8 minutes on one H100.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks.packing import Engine
from benchmarks.report import at_least, print_line
from benchmarks.zorro import Case, register_loss, rollouts_of, update
from integrations.arctic_rl.zorro.attention import register_shared_attention
from integrations.arctic_rl.zorro.cost import cost_model, group_cost
from integrations.arctic_rl.zorro.groups import own_groups
from integrations.arctic_rl.zorro.kernel_check import KERNEL_BOUND, kernel_error
from integrations.arctic_rl.zorro.kernels import KERNELS, ScoreSettings

ATTENTION = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "tie_word_embeddings": True},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | ATTENTION
    | {"tie_word_embeddings": True},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
    | ATTENTION
    | {"tie_word_embeddings": True},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
    | ATTENTION
    | {"tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | ATTENTION
    | {"tie_word_embeddings": False},
}
CASES = {
    "tiny": (Case(48, 8, 3),),
    "full": (
        Case(1024, 64, 8, prompts=4),
        Case(2048, 128, 16),
        Case(32, 512, 4, prompts=4),
        Case(512, 256, 1, prompts=8),
    ),
}
CHECKPOINTED = ("4B", "8B")
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16 operations a second, from the vendor's data sheets."""


def installed_back_ends(device: str) -> list[str]:
    """Names of the attention back ends that can run here."""
    if device == "cpu":
        return ["cpu_flash", "math"]
    packages = {"flash_attn_2": "flash_attn", "flash_attn_3": "flash_attn_interface"}
    names = [name for name, package in packages.items() if importlib.util.find_spec(package)]
    return [*names, "torch_varlen", "math"]


def back_end_error(name: str, device: str) -> float:
    """Largest relative distance of a back end's output and gradients in bfloat16 from the plain ones in float32."""
    return kernel_error(KERNELS[name], torch.bfloat16, ScoreSettings(128**-0.5), (128, 128), device)


def model_of(shape: str, device: str) -> torch.nn.Module:
    """A random Qwen3 in bfloat16."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=8192)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=register_shared_attention()
        )
    if shape in CHECKPOINTED:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def operations(model: torch.nn.Module, case: Case, *, share: bool) -> float:
    """Of an update: forward, and twice as many backward."""
    groups = case.groups if share else own_groups(case.lengths)
    scored = [case.response] * len(case.lengths)
    return 3 * sum(group_cost(cost_model(model.config), group, case.lengths, scored) for group in groups)


def measure(engine: Engine, case: Case, device: str, repeats: int) -> dict[str, Any]:
    """Seconds, memory and utilisation of both ways."""
    batch = rollouts_of(case, engine.module.config.vocab_size)
    budget = max(case.shared_tokens, case.lengths[0])
    seconds: dict[bool, list[float]] = {True: [], False: []}
    memory: dict[bool, int] = {}
    for repeat in range(repeats + 1):
        for share in (True, False):
            before = _allocated(device)
            start = time.perf_counter()
            update(engine, batch, share=share, budget=budget, device=device)
            _synchronize(device)
            if repeat:
                seconds[share].append(time.perf_counter() - start)
            memory[share] = _peak(device) - before
    peak = next((flops for name, flops in PEAK_FLOPS.items() if device == "cuda" and name in _device_name()), None)
    result: dict[str, Any] = {
        "speedup": statistics.median(a / s for a, s in zip(seconds[False], seconds[True], strict=True)),
        "flop_ratio": round(case.flop_ratio(engine.module), 3),
        "token_ratio": round(case.token_ratio, 3),
    }
    for name, share in (("shared", True), ("unshared", False)):
        median = statistics.median(seconds[share])
        result[f"{name}_s"] = round(median, 4)
        result[f"{name}_peak_mib"] = memory[share] >> 20
        flops = operations(engine.module, case, share=share) / median
        result[f"{name}_tflops"] = round(flops / 1e12, 1)
        result[f"{name}_utilisation"] = None if peak is None else round(flops / peak, 3)
    return result


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _allocated(device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def _device_name() -> str:
    return torch.cuda.get_device_name()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zorro_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: does it run?")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6B", "1.7B", "4B", "8B"], help="models")
    parser.add_argument(
        "--repeats", type=at_least(1), default=3, help="timings of both ways, in turn, after one untimed"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was measured", file=sys.stderr)
        return 2
    register_loss()
    ok = []
    for name in installed_back_ends(args.device):
        error = back_end_error(name, args.device)
        ok.append(print_line("zorro_gpu/back_end", error, KERNEL_BOUND, "max", back_end=name))
    for shape in args.shapes:
        engine = Engine(model_of(shape, args.device))
        for case in CASES["tiny" if shape == "tiny" else "full"]:
            result = measure(engine, case, args.device, args.repeats)
            speed = result.pop("speedup")
            print_line("zorro_gpu/speedup", speed, None, "none", model=f"Qwen3-{shape}", **case.named(), **result)
        del engine
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return 0 if all(ok) else 1


if __name__ == "__main__":
    sys.exit(main())
