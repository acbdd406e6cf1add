"""Settings whose values cannot work, found by building everything that can be built without starting anything."""

from __future__ import annotations

import copy
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import Any

from .algorithm_rules import correction_refusals, loss_problems
from .backends.registry import RemoteBackendRegistry
from .config import PREFIX, ArcticRLConfig
from .devices import device_here
from .errors import UnsupportedError
from .horizon import warmup_problems
from .loss_config import loss_request
from .recipe_checks import tokens_of_a_rollout
from .sampling_params import sampling_problems
from .scoring_checks import scoring_problems
from .server.sampling_spec import PROTECTED_ENGINE_ARGS
from .server.schedule import schedule_problems
from .server_config import server_config
from .server_url import url_problem
from .support.leaves import MISSING, skyrl_leaves, value_of


def setting_problems(cfg: Any) -> list[str]:
    """Every setting that would fail later, a line each.

    Args:
        cfg: a ``SkyRLTrainConfig`` with ``trainer.arctic_rl``.
    """
    losses = (loss_problems, correction_refusals, _own_loss)
    checks = (
        _backend,
        _modules,
        _counts,
        _engine_sizes,
        _weight_sync,
        _seed,
        _optimizers,
        warmup_problems,
        _sampling,
        scoring_problems,
        *losses,
    )
    lines = [line for check in checks for line in check(cfg)]
    # What is said already does not hide the rest, nor is it said twice.
    for check in (_not_finite, _server):
        named = [_setting(line) for line in lines]
        lines += [line for line in check(_mended(cfg, named)) if _setting(line) not in named]
    return lines


def _setting(line: str) -> str:
    return re.split("[=:]", line, maxsplit=1)[0]


def _mended(cfg: Any, settings: Iterable[str]) -> Any:
    """A copy of a config in which settings have SkyRL's defaults."""
    mended, leaves = copy.deepcopy(cfg), skyrl_leaves()
    for setting in settings:
        section, _, name = setting.rpartition(".")
        if setting in leaves and leaves[setting].default is not MISSING:
            setattr(value_of(mended, section), name, copy.deepcopy(leaves[setting].default))
        elif section == PREFIX and name in vars(mended.trainer.arctic_rl):
            setattr(mended.trainer.arctic_rl, name, vars(ArcticRLConfig())[name])
    return mended


_MAY_BE_INFINITE = ("trainer.algorithm.off_policy_correction.", "trainer.algorithm.tis_imp_ratio_cap")


def _not_finite(cfg: Any) -> Iterator[str]:
    ours = {f"{PREFIX}.{name}": value for name, value in vars(cfg.trainer.arctic_rl).items()}
    values = {name: value_of(cfg, name) for name in skyrl_leaves()} | ours
    del values["trainer.algorithm.temperature"]  # a copy of the rollouts', which _sampling tells apart
    for setting, value in values.items():
        for item in value if isinstance(value, list) else [value]:
            bad = isinstance(item, float) and not math.isfinite(item)
            if bad and not (math.isinf(item) and setting.startswith(_MAY_BE_INFINITE)):
                yield f"{setting}={value}: must be a finite number"
                break


def _failure(function: Callable[[], Any]) -> Iterator[str]:
    try:
        function()
    except (ValueError, TypeError, IndexError) as error:
        yield from str(error).splitlines()


def _backend(cfg: Any) -> Iterator[str]:
    arctic = cfg.trainer.arctic_rl
    yield from _failure(lambda: RemoteBackendRegistry.check_name(arctic.backend))
    if arctic.backend == "arctic-platform":
        from .backends.arctic_platform.refusals import setting_refusals

        yield from setting_refusals(cfg)
        return
    if arctic.comm_protocol == "ray":
        if arctic.server_url is not None:
            yield (
                f"{PREFIX}.server_url={arctic.server_url!r} is read with {PREFIX}.comm_protocol=http only: write that "
                "too, or leave server_url out"
            )
        return
    problem = url_problem(arctic.server_url)
    if problem is not None:
        yield (
            f"{PREFIX}.comm_protocol=http needs {PREFIX}.server_url, which is {arctic.server_url!r} and {problem}: "
            "write the URL that python -m integrations.arctic_rl.server printed"
        )
    if arctic.backend not in ("builtin", "http"):
        yield (
            f"{PREFIX}.backend={arctic.backend!r} with {PREFIX}.comm_protocol=http: the server's own setting backend "
            "chooses; leave it out here"
        )
    yield from _failure(lambda: _check_code(cfg))


def _check_code(cfg: Any) -> None:
    """Refuse a policy loss that would have to travel as code."""
    if cfg.trainer.arctic_rl.loss_fn is not None:
        return
    if loss_request(cfg).own_micro_batches:
        raise UnsupportedError(
            f"trainer.algorithm.policy_loss_type={cfg.trainer.algorithm.policy_loss_type!r} travels to the workers as "
            f"code, which is not sent over HTTP: write {PREFIX}.comm_protocol=ray, or register the loss on the server "
            f"with {PREFIX}.processor_modules and name it in {PREFIX}.loss_fn"
        )


def _modules(cfg: Any) -> Iterator[str]:
    for name in ("env_modules", "processor_modules"):
        for module in vars(cfg.trainer.arctic_rl)[name]:
            if not _module_exists(module):
                yield f"{PREFIX}.{name}: there is no module {module!r}: install it, or start the run in its folder"


def _module_exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


_COUNTS = (
    "trainer.epochs",
    "trainer.update_epochs_per_batch",
    "trainer.train_batch_size",
    "trainer.policy_mini_batch_size",
    "trainer.micro_train_batch_size_per_gpu",
    "trainer.micro_forward_batch_size_per_gpu",
    "trainer.eval_batch_size",
    "trainer.max_prompt_length",
    "trainer.placement.policy_num_nodes",
    "trainer.placement.policy_num_gpus_per_node",
    "trainer.placement.ref_num_nodes",
    "trainer.placement.ref_num_gpus_per_node",
    "generator.n_samples_per_prompt",
    "generator.eval_n_samples_per_prompt",
    "generator.inference_engine.num_engines",
    "generator.inference_engine.tensor_parallel_size",
    "generator.inference_engine.pipeline_parallel_size",
    "generator.inference_engine.data_parallel_size",
    "generator.inference_engine.max_num_seqs",
    "generator.inference_engine.max_num_batched_tokens",
    "generator.max_turns",
)
_COUNTS_OF_A_CRITIC = (
    "trainer.critic_mini_batch_size",
    "trainer.placement.critic_num_nodes",
    "trainer.placement.critic_num_gpus_per_node",
)
_COUNTS_OF_EVALUATION = ("trainer.eval_batch_size", "generator.eval_n_samples_per_prompt")


def _counts(cfg: Any) -> Iterator[str]:
    unread = () if cfg.trainer.eval_interval > 0 else _COUNTS_OF_EVALUATION
    critics = _COUNTS_OF_A_CRITIC if cfg.trainer.critic.model.path else ()
    for setting in (*(name for name in _COUNTS if name not in unread), *critics):
        value = value_of(cfg, setting)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield f"{setting}={value!r} must be a whole number of at least 1"


def _engine_sizes(cfg: Any) -> Iterator[str]:
    """Sizes with which vLLM does not build an engine."""
    prefix, engine = "generator.inference_engine", cfg.generator.inference_engine
    share, tokens, sequences = engine.gpu_memory_utilization, engine.max_num_batched_tokens, engine.max_num_seqs
    if device_here(cfg) == "cuda" and not 0 < share <= 1:
        yield f"{prefix}.gpu_memory_utilization={share} must be above 0 and at most 1"
    if 1 <= tokens < sequences:
        yield (
            f"{prefix}.max_num_batched_tokens={tokens}: a step has a token of each of max_num_seqs={sequences} "
            "sequences; write at least as many, or a smaller max_num_seqs"
        )
    longest = engine.engine_init_kwargs.get("max_model_len") or tokens_of_a_rollout(cfg)
    if not engine.enable_chunked_prefill and sequences <= tokens < longest:
        yield (
            f"{prefix}.max_num_batched_tokens={tokens}: with {prefix}.enable_chunked_prefill=false a sequence of "
            f"{longest} tokens must fit; write at least {longest}, or enable_chunked_prefill=true"
        )


def _weight_sync(cfg: Any) -> Iterator[str]:
    """What a recipe's own placement says; the cluster's is looked at when it is known (``server.weight_sync``)."""
    wanted, colocated = cfg.trainer.arctic_rl.weight_sync, cfg.trainer.placement.colocate_all
    if wanted == "shared_memory" and device_here(cfg) == "cuda" and _is_spread(cfg):
        yield (
            f"{PREFIX}.weight_sync={wanted!r}: the first policy rank and the engines are on several nodes, and share "
            "memory on one alone: write low_memory, or leave it out"
        )
    if wanted not in ("nccl", "ipc"):
        return
    setting, instead = f"{PREFIX}.weight_sync={wanted!r}", "shared_memory or low_memory, or leave it out"
    if device_here(cfg) == "cpu":
        yield f"{setting} needs GPUs, and models run on CPUs ({PREFIX}.device): write {instead}"
    elif wanted == "nccl" and colocated:
        yield (
            f"{setting}: with trainer.placement.colocate_all=true an engine shares the GPU of the policy's first "
            "rank, and NCCL takes a GPU once: write ipc or low_memory, or leave it out"
        )
    elif wanted == "ipc" and not colocated:
        yield (
            f"{setting}: with trainer.placement.colocate_all=false the engines' GPUs have no training rank: write "
            "nccl or low_memory, or leave it out"
        )


def _is_spread(cfg: Any) -> bool:
    """Whether the recipe says that weights have to reach another node, whatever cluster it may get."""
    from .described_placement import gpu_plan

    placement = cfg.trainer.placement
    if cfg.trainer.arctic_rl.cluster_gpus is None:
        return placement.colocate_all and placement.policy_num_nodes > 1
    try:
        plan = gpu_plan(cfg)
    except (ValueError, TypeError, ArithmeticError, LookupError):
        return False  # the placement's own check tells why
    return len({worker.node_id for worker in (plan.of("policy")[0], *plan.of("sampling"))}) > 1


_LARGEST_SEED = 2**32 - 1
"""NumPy takes no larger one."""


def _seed(cfg: Any) -> Iterator[str]:
    seed = cfg.trainer.seed
    if not 0 <= seed <= _LARGEST_SEED:
        yield f"trainer.seed={seed} must be a whole number from 0 to {_LARGEST_SEED}"


def _optimizers(cfg: Any) -> Iterator[str]:
    yield from _optimizer("trainer.policy.optimizer_config", cfg.trainer.policy.optimizer_config)
    if cfg.trainer.critic.model.path:
        yield from _optimizer("trainer.critic.optimizer_config", cfg.trainer.critic.optimizer_config)


def _optimizer(prefix: str, optimizer: Any) -> Iterator[str]:
    for name in ("lr", "weight_decay", "max_grad_norm"):
        value = vars(optimizer)[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            yield f"{prefix}.{name}={value!r} must be a finite number of at least 0"
    betas = list(optimizer.adam_betas)
    if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        yield f"{prefix}.adam_betas={betas} must be two numbers from 0 to below 1"
    warmup = optimizer.num_warmup_steps
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        yield f"{prefix}.num_warmup_steps={warmup!r} must be a whole number of optimizer steps"


def _sampling(cfg: Any) -> Iterator[str]:
    """What SkyRL's generators would send to the engines; it drops some keys, which the support table refuses."""
    from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_vllm_sampling_params

    names = ["sampling_params"] + (["eval_sampling_params"] if cfg.trainer.eval_interval > 0 else [])
    for name in names:
        section, training = vars(cfg.generator)[name], cfg.generator.sampling_params
        for problem in sampling_problems(get_vllm_sampling_params(section)):
            key = "max_generate_length" if problem.name == "max_tokens" else problem.name
            if (
                key == "max_generate_length"
                and section is not training
                and problem.value == training.max_generate_length
            ):
                continue  # SkyRL copied it
            key = key if key in vars(section) and key != "repetition_penalty" else f"additional_kwargs.{key}"
            yield f"generator.{name}.{key}={problem.value!r}: {problem.why}"
    temperature = cfg.generator.sampling_params.temperature
    if temperature == 0:
        yield (
            f"generator.sampling_params.temperature={temperature!r}: training needs sampled rollouts, and their "
            "log-probs are taken at this temperature: write a number above 0"
        )
    asked = cfg.trainer.algorithm.temperature
    copied = asked is None or asked is temperature or asked == temperature
    if not copied and not (math.isfinite(asked) and asked > 0):
        yield f"trainer.algorithm.temperature={asked!r} divides logits in training: write a number above 0, or null"


def _server(cfg: Any) -> Iterator[str]:
    """What stands against the server's own config, whose classes tell one problem at a time."""
    engine = cfg.generator.inference_engine
    # The support table and ``recipe_checks`` judge these.
    engine.engine_init_kwargs = {
        name: value
        for name, value in engine.engine_init_kwargs.items()
        if name != "max_model_len" and name not in PROTECTED_ENGINE_ARGS
    }
    engine.tensor_parallel_size = 1
    engine.speculative_config = None
    said: set[str] = set()
    while True:
        try:
            config = server_config(cfg, run_id="", env_vars={}, device=device_here(cfg))
        except ValueError as error:
            lines = str(error).splitlines()
            yield from lines
            new = {_setting(line) for line in lines} & skyrl_leaves().keys() - said
            if not new:
                return
            said |= new
            cfg = _mended(cfg, new)
        else:
            for spec in filter(None, (config.policy, config.critic)):
                yield from schedule_problems(spec.optimizer)
            return


_TAKES_THE_REDUCTION_ITSELF = ("grpo", "verl_grpo", "regularized", "skyrl_policy_loss")


def _own_loss(cfg: Any) -> Iterator[str]:
    from .processors.registry import get_loss_fn

    arctic, policy_loss = cfg.trainer.arctic_rl, cfg.trainer.algorithm.policy_loss_type
    name = arctic.loss_fn
    if name is None:
        if arctic.loss_config:
            yield f"{PREFIX}.loss_config={arctic.loss_config}: there is no {PREFIX}.loss_fn that would read it"
        return
    if policy_loss != "regular":
        yield (
            f"{PREFIX}.loss_fn={name!r} and trainer.algorithm.policy_loss_type={policy_loss!r} both name the policy "
            "loss: leave one of them out"
        )
    elif name == "value":
        yield f"{PREFIX}.loss_fn='value' is the critic's loss, and the policy has no values: leave it out"
    elif name in _TAKES_THE_REDUCTION_ITSELF:
        yield (
            f"{PREFIX}.loss_fn={name!r} would reduce advantages that SkyRL has reduced already: leave it out and "
            "write trainer.algorithm.policy_loss_type=regular or dual_clip"
        )
    elif "." in name and not _module_exists(name.rpartition(".")[0]):
        module = name.rpartition(".")[0]
        yield f"{PREFIX}.loss_fn={name!r}: there is no module {module!r}: install it, or start the run in its folder"
    elif "." in name or all(module in sys.modules for module in arctic.processor_modules):
        # A plain name may be registered by a module that failed to import, which is said already.
        try:
            get_loss_fn(name)
        except UnsupportedError as error:
            yield f"{PREFIX}.loss_fn={name!r}: {error}"
