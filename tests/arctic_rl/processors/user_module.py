"""A user's module: it registers a loss when imported."""

from integrations.arctic_rl.processors.pipeline import register_loss_fn


@register_loss_fn("loss_of_a_user_module")
def loss(model_outputs, batch, meta, config, device):
    mask = batch["loss_mask"]
    terms = -model_outputs["logprobs"] * batch["advantages"] * mask
    return terms.sum() / meta["batch_num_tokens"] * meta["dp_size"], {"advantage": (terms.sum() * 0 + 1, mask.sum())}


def undecorated(model_outputs, batch, meta, config, device):
    return loss(model_outputs, batch, meta, config, device)


NUMBER = 3
