"""A policy loss of one's own, run by the server from a SkyRL recipe: REINFORCE weighted by a truncated ratio.

Append to any recipe, with this folder on the path of the run (``PYTHONPATH=examples``)::

    trainer.arctic_rl.processor_modules=[custom_loss] trainer.arctic_rl.loss_fn=truncated_reinforce \
        trainer.arctic_rl.loss_config.max_weight=2.0
"""

from integrations.arctic_rl.processors.pipeline import register_loss_fn


@register_loss_fn("truncated_reinforce")
def truncated_reinforce(model_outputs, batch, meta, config, device):
    """SkyRL has already weighted the advantages by ``trainer.algorithm.loss_reduction``: the terms are summed."""
    logprobs, mask = model_outputs["logprobs"], batch["loss_mask"]
    ratio = (logprobs - batch["old_log_probs"]).detach().exp()
    weight = ratio.clamp(max=config["max_weight"])
    loss = -(weight * batch["advantages"] * logprobs * mask).sum() * meta["dp_size"]
    return loss, {"weight": ((weight * mask).sum(), mask.sum())}
