#!/usr/bin/env bash
# PPO on GSM8K: Qwen2.5-1.5B-Instruct and a critic of the same size on 4 GPUs, with the values of SkyRL's PPO recipe.
#
#   bash examples/gsm8k_ppo.sh [SkyRL overrides ...]
#   SMOKE=1 bash examples/gsm8k_ppo.sh
#   bash examples/gsm8k_ppo.sh trainer.arctic_rl.dry_run=true       check it without GPUs, model and data
#
# Change: GPUS; MODEL (policy) and CRITIC (its value head starts at random); the critic's learning
# rate; trainer.algorithm.gamma and lambd of the advantages.
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

model="${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}"
critic="${CRITIC:-$model}"
data="${DATA:-$HOME/data/gsm8k}"
gpus="${GPUS:-4}"

prepare examples.gsm8k_data --output_dir "$data"
exec "$PYTHON" -m skyrl.train.entrypoints.main_base \
    data.train_data="['$data/train.parquet']" \
    data.val_data="['$data/validation.parquet']" \
    environment.env_class=gsm8k \
    trainer.policy.model.path="$model" \
    trainer.critic.model.path="$critic" \
    trainer.placement.colocate_all=true \
    trainer.placement.policy_num_gpus_per_node="$gpus" \
    trainer.placement.critic_num_gpus_per_node="$gpus" \
    trainer.placement.ref_num_gpus_per_node="$gpus" \
    generator.inference_engine.num_engines="$gpus" \
    generator.inference_engine.gpu_memory_utilization=0.7 \
    trainer.arctic_rl.zero_stage=2 \
    trainer.epochs=20 \
    trainer.train_batch_size=1024 \
    trainer.policy_mini_batch_size=256 \
    trainer.critic_mini_batch_size=256 \
    trainer.micro_forward_batch_size_per_gpu=64 \
    trainer.micro_train_batch_size_per_gpu=64 \
    trainer.max_prompt_length=512 \
    trainer.algorithm.advantage_estimator=gae \
    trainer.algorithm.gamma=1.0 \
    trainer.algorithm.lambd=1.0 \
    trainer.algorithm.value_clip=0.2 \
    trainer.algorithm.use_kl_loss=true \
    trainer.policy.optimizer_config.lr=1.0e-6 \
    trainer.critic.optimizer_config.lr=5.0e-6 \
    generator.batched=true \
    generator.n_samples_per_prompt=5 \
    generator.sampling_params.max_generate_length=1024 \
    trainer.eval_batch_size=1024 \
    trainer.eval_before_train=true \
    trainer.eval_interval=5 \
    trainer.ckpt_interval=10 \
    trainer.max_ckpts_to_keep=2 \
    trainer.resume_mode=latest \
    trainer.ckpt_path="$run_dir/checkpoints" \
    trainer.export_path="$run_dir/exports" \
    trainer.log_path="$run_dir/logs" \
    trainer.logger=console \
    trainer.project_name=gsm8k \
    trainer.run_name="$(basename "$run_dir")" \
    "${smoke[@]}" "$@" \
    trainer.override_entrypoint=integrations.arctic_rl.entrypoint
