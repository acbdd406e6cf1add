#!/usr/bin/env bash
# GRPO on GSM8K: Qwen3-0.6B on 1 to 4 GPUs of one node, with the values of SkyRL's own GSM8K recipe.
#
#   bash examples/gsm8k_0.6b.sh [SkyRL overrides ...]
#   GPUS=4 bash examples/gsm8k_0.6b.sh trainer.logger=wandb
#   SMOKE=1 bash examples/gsm8k_0.6b.sh
#   bash examples/gsm8k_0.6b.sh trainer.arctic_rl.dry_run=true      check it without GPUs, model and data
#
# Change: GPUS; MODEL; DATA (made there if missing); the values in gsm8k_values.sh; trainer.logger (wandb, tensorboard,
# mlflow). Out of GPU memory: halve both micro-batch sizes, which do not change the result, then gpu_memory_utilization.
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

model="${MODEL:-Qwen/Qwen3-0.6B}"
data="${DATA:-$HOME/data/gsm8k}"
gpus="${GPUS:-1}"
source examples/gsm8k_values.sh

prepare examples.gsm8k_data --output_dir "$data"
exec "$PYTHON" -m skyrl.train.entrypoints.main_base "${run_values[@]}" "${values[@]}" \
    trainer.placement.colocate_all=true \
    trainer.placement.ref_num_gpus_per_node="$gpus" \
    generator.inference_engine.num_engines="$gpus" \
    generator.inference_engine.gpu_memory_utilization=0.7 \
    trainer.train_batch_size=1024 \
    trainer.micro_forward_batch_size_per_gpu=64 \
    trainer.micro_train_batch_size_per_gpu=64 \
    trainer.algorithm.advantage_estimator=grpo \
    trainer.algorithm.use_kl_loss=true \
    trainer.algorithm.kl_loss_coef=0.001 \
    generator.batched=true \
    generator.n_samples_per_prompt=6 \
    "${smoke[@]}" "$@" \
    trainer.override_entrypoint=integrations.arctic_rl.entrypoint
