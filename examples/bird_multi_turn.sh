#!/usr/bin/env bash
# GRPO on BIRD in several turns: the model looks into the database before it answers. Qwen2.5-Coder-7B-Instruct on 8
# GPUs, with the values of SkyRL's own text-to-SQL recipe.
#
#   python -m envs.bird.preprocess --bird_dir D --output_dir ~/data/bird_multi_turn --env_class bird_multi_turn
#   bash examples/bird_multi_turn.sh [SkyRL overrides ...]
#   SMOKE=1 bash examples/bird_multi_turn.sh
#   bash examples/bird_multi_turn.sh trainer.arctic_rl.dry_run=true check it without GPUs, model and data
#
# Change: GPUS; MODEL; DATA; generator.max_turns (the last one is the answer); max_input_length (prompt, all turns and
# results); what a query may show: environment.skyrl_gym.bird_multi_turn.tool_max_rows and its neighbours (README).
smoke_env=bird_multi_turn
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

model="${MODEL:-Qwen/Qwen2.5-Coder-7B-Instruct}"
data="${DATA:-$HOME/data/bird_multi_turn}"
gpus="${GPUS:-8}"
engines=$(((gpus + 3) / 4))

exec "$PYTHON" -m skyrl.train.entrypoints.main_base "${run_values[@]}" \
    data.train_data="['$data/train.parquet']" \
    data.val_data="['$data/validation.parquet']" \
    environment.env_class=bird_multi_turn \
    environment.skyrl_gym.bird_multi_turn.tool_max_rows=20 \
    trainer.policy.model.path="$model" \
    trainer.placement.colocate_all=true \
    trainer.placement.policy_num_gpus_per_node="$gpus" \
    generator.inference_engine.num_engines="$engines" \
    generator.inference_engine.tensor_parallel_size=4 \
    generator.inference_engine.gpu_memory_utilization=0.7 \
    trainer.arctic_rl.zero_stage=3 \
    trainer.epochs=30 \
    trainer.train_batch_size=256 \
    trainer.policy_mini_batch_size=256 \
    trainer.micro_forward_batch_size_per_gpu=8 \
    trainer.micro_train_batch_size_per_gpu=1 \
    trainer.max_prompt_length=6000 \
    trainer.algorithm.advantage_estimator=grpo \
    trainer.algorithm.use_kl_loss=false \
    trainer.policy.optimizer_config.lr=1.0e-6 \
    trainer.policy.optimizer_config.max_grad_norm=0.5 \
    generator.batched=false \
    generator.max_turns=6 \
    generator.max_input_length=29000 \
    generator.use_conversation_multi_turn=true \
    generator.append_eos_token_after_stop_str_in_multi_turn=true \
    generator.n_samples_per_prompt=5 \
    generator.sampling_params.temperature=0.6 \
    generator.sampling_params.top_p=0.95 \
    generator.sampling_params.max_generate_length=3000 \
    generator.sampling_params.stop='["</sql>"]' \
    generator.eval_sampling_params.max_generate_length=3000 \
    generator.eval_sampling_params.stop='["</sql>"]' \
    trainer.eval_batch_size=1024 \
    trainer.eval_before_train=true \
    trainer.eval_interval=5 \
    trainer.ckpt_interval=60 \
    trainer.hf_save_interval=30 \
    trainer.project_name=bird \
    "${smoke[@]}" "$@" \
    trainer.override_entrypoint=integrations.arctic_rl.entrypoint
