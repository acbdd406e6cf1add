#!/usr/bin/env bash
# Sourced by the BIRD recipes, which set model, data, nodes, gpus and engines before: GRPO on text-to-SQL, 16 rollouts
# a question, one optimizer step a batch. What it sets means the same to SkyRL's own FSDP backend and to this one.
values=(
    data.train_data="['$data/train.parquet']"
    data.val_data="['$data/validation.parquet']"
    environment.env_class=bird
    trainer.policy.model.path="$model"
    trainer.placement.colocate_all=true
    trainer.placement.policy_num_nodes="$nodes"
    trainer.placement.policy_num_gpus_per_node="$gpus"
    generator.inference_engine.num_engines="$engines"
    generator.inference_engine.gpu_memory_utilization=0.5
    trainer.epochs=5
    trainer.train_batch_size=128
    trainer.policy_mini_batch_size=128
    trainer.micro_forward_batch_size_per_gpu=4
    trainer.micro_train_batch_size_per_gpu=2
    trainer.max_prompt_length=16384
    trainer.algorithm.advantage_estimator=grpo
    trainer.algorithm.use_kl_loss=false
    trainer.policy.optimizer_config.lr=2.0e-6
    trainer.policy.optimizer_config.adam_betas="[0.9,0.95]"
    trainer.policy.optimizer_config.num_warmup_steps=10
    trainer.policy.optimizer_config.max_grad_norm=1.0
    generator.batched=false
    generator.n_samples_per_prompt=16
    generator.sampling_params.temperature=1.0
    generator.sampling_params.max_generate_length=4096
    generator.eval_sampling_params.temperature=0.0
    generator.eval_sampling_params.max_generate_length=4096
    trainer.eval_batch_size=1024
    trainer.eval_before_train=true
    trainer.eval_interval=20
    trainer.ckpt_interval=20
    trainer.hf_save_interval=100
    trainer.project_name=bird
)
