python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator={estimator} \
    data.train_files=/data/gsm8k/train.parquet \
    data.train_batch_size=64 \
    data.max_response_length=128 \
    data.truncation='left' \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.model.lora_rank=8 \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.use_kl_loss={kl} \
    actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    reward_model.enable=True reward_model.model.path=org/reward \
    trainer.logger='["console","wandb"]' \
    trainer.n_gpus_per_node=2 \
    trainer.test_freq=-1 $@
