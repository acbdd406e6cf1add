#!/usr/bin/env bash
# Fully asynchronous GRPO on GSM8K: Qwen2.5-1.5B-Instruct, 4 GPUs train while 4 others generate.
#
#   bash examples/gsm8k_async.sh [SkyRL overrides ...]
#   SMOKE=1 bash examples/gsm8k_async.sh
#   bash examples/gsm8k_async.sh trainer.arctic_rl.dry_run=true     check it without GPUs, model and data
#
# Change: GPUS (for training) and ENGINES, until neither side waits for the other (timing/wait_for_generation_buffer);
# max_staleness_steps, and with it num_parallel_generation_workers, which may be mini-batch x (staleness + 1) at most.
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

model="${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}"
data="${DATA:-$HOME/data/gsm8k}"
gpus="${GPUS:-4}"
engines="${ENGINES:-4}"
source examples/gsm8k_values.sh

prepare examples.gsm8k_data --output_dir "$data"
exec "$PYTHON" -m skyrl.train.entrypoints.main_base "${run_values[@]}" "${values[@]}" \
    trainer.fully_async.enabled=true \
    trainer.fully_async.max_staleness_steps=4 \
    trainer.fully_async.num_parallel_generation_workers=768 \
    trainer.placement.colocate_all=false \
    generator.inference_engine.num_engines="$engines" \
    generator.inference_engine.gpu_memory_utilization=0.8 \
    trainer.train_batch_size=256 \
    trainer.micro_forward_batch_size_per_gpu=8 \
    trainer.micro_train_batch_size_per_gpu=8 \
    trainer.algorithm.advantage_estimator=grpo \
    trainer.algorithm.policy_loss_type=rollout_is \
    trainer.algorithm.use_kl_loss=false \
    generator.batched=false \
    generator.n_samples_per_prompt=5 \
    "${smoke[@]}" "$@" \
    trainer.override_entrypoint=integrations.arctic_rl.entrypoint
