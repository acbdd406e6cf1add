#!/usr/bin/env bash
# GRPO on GSM8K: Qwen3-0.6B on 1 to 4 GPUs of one node, with the values of SkyRL's own GSM8K recipe.
#
#   bash examples/gsm8k_0.6b.sh [SkyRL overrides ...]
#   GPUS=4 bash examples/gsm8k_0.6b.sh trainer.logger=wandb
#   SMOKE=1 bash examples/gsm8k_0.6b.sh
#   bash examples/gsm8k_0.6b.sh trainer.arctic_rl.dry_run=true      check it without GPUs, model and data
#
# Change: GPUS; MODEL; DATA (made there if missing); trainer.logger (wandb, tensorboard, mlflow). Out of GPU memory:
# halve both micro-batch sizes (the result stays the same), then gpu_memory_utilization.
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

model="${MODEL:-Qwen/Qwen3-0.6B}"
data="${DATA:-$HOME/data/gsm8k}"
gpus="${GPUS:-1}"

prepare examples.gsm8k_data --output_dir "$data"
exec "$PYTHON" -m skyrl.train.entrypoints.main_base \
    data.train_data="['$data/train.parquet']" \
    data.val_data="['$data/validation.parquet']" \
    environment.env_class=gsm8k \
    trainer.policy.model.path="$model" \
    trainer.placement.colocate_all=true \
    trainer.placement.policy_num_gpus_per_node="$gpus" \
    trainer.placement.ref_num_gpus_per_node="$gpus" \
    generator.inference_engine.num_engines="$gpus" \
    generator.inference_engine.gpu_memory_utilization=0.7 \
    trainer.arctic_rl.zero_stage=2 \
    trainer.epochs=20 \
    trainer.train_batch_size=1024 \
    trainer.policy_mini_batch_size=256 \
    trainer.micro_forward_batch_size_per_gpu=64 \
    trainer.micro_train_batch_size_per_gpu=64 \
    trainer.max_prompt_length=512 \
    trainer.algorithm.advantage_estimator=grpo \
    trainer.algorithm.use_kl_loss=true \
    trainer.algorithm.kl_loss_coef=0.001 \
    trainer.policy.optimizer_config.lr=1.0e-6 \
    generator.batched=true \
    generator.n_samples_per_prompt=6 \
    generator.sampling_params.temperature=1.0 \
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
