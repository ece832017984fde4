"""Settings for tests whose pretrained model is as small as the tiny one."""

AS_TINY = (
    "model.context_tokens=512",
    "rollout.instructions=false",
    "rollout.max_new_tokens=6",
    "rollout.observation_tokens=32",
    "optimizer.lr=5e-4",
    "optimizer.grad_clip=0.3",
    "warm_start.optimizer.lr=2e-3",
    "warm_start.batch_size=16",
    "evaluation.num_items=8",
    "alarms.no_success=off",  # the weights are random
)
