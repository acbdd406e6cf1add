#!/usr/bin/env bash
# PPO on GSM8K: Qwen2.5-1.5B-Instruct and a critic of the same size on 4 GPUs, with the values of SkyRL's PPO recipe.
#
#   bash examples/gsm8k_ppo.sh [SkyRL overrides ...]
#   SMOKE=1 bash examples/gsm8k_ppo.sh
#   bash examples/gsm8k_ppo.sh trainer.arctic_rl.dry_run=true       check it without GPUs, model and data
#
# Change: GPUS; MODEL (policy) and CRITIC (its value head starts at random); the critic's learning rate; gamma and lambd
# of the advantages; the values in gsm8k_values.sh.
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

model="${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}"
critic="${CRITIC:-$model}"
data="${DATA:-$HOME/data/gsm8k}"
gpus="${GPUS:-4}"
source examples/gsm8k_values.sh

prepare examples.gsm8k_data --output_dir "$data"
exec "$PYTHON" -m skyrl.train.entrypoints.main_base "${run_values[@]}" "${values[@]}" \
    trainer.critic.model.path="$critic" \
    trainer.placement.colocate_all=true \
    trainer.placement.critic_num_gpus_per_node="$gpus" \
    trainer.placement.ref_num_gpus_per_node="$gpus" \
    generator.inference_engine.num_engines="$gpus" \
    generator.inference_engine.gpu_memory_utilization=0.7 \
    trainer.train_batch_size=1024 \
    trainer.critic_mini_batch_size=256 \
    trainer.micro_forward_batch_size_per_gpu=64 \
    trainer.micro_train_batch_size_per_gpu=64 \
    trainer.algorithm.advantage_estimator=gae \
    trainer.algorithm.gamma=1.0 \
    trainer.algorithm.lambd=1.0 \
    trainer.algorithm.value_clip=0.2 \
    trainer.algorithm.use_kl_loss=true \
    trainer.critic.optimizer_config.lr=5.0e-6 \
    generator.batched=true \
    generator.n_samples_per_prompt=5 \
    "${smoke[@]}" "$@" \
    trainer.override_entrypoint=integrations.arctic_rl.entrypoint
