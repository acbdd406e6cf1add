#!/usr/bin/env bash
# Sourced by the GSM8K recipes, which set model, data and gpus before: what SkyRL's own GSM8K recipes have in common.
values=(
    data.train_data="['$data/train.parquet']"
    data.val_data="['$data/validation.parquet']"
    environment.env_class=gsm8k
    trainer.policy.model.path="$model"
    trainer.placement.policy_num_gpus_per_node="$gpus"
    trainer.arctic_rl.zero_stage=2
    trainer.epochs=20
    trainer.policy_mini_batch_size=256
    trainer.max_prompt_length=512
    trainer.policy.optimizer_config.lr=1.0e-6
    generator.sampling_params.temperature=1.0
    generator.sampling_params.max_generate_length=1024
    trainer.eval_batch_size=1024
    trainer.eval_before_train=true
    trainer.eval_interval=5
    trainer.ckpt_interval=10
    trainer.project_name=gsm8k
)
