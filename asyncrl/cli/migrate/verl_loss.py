"""Translates the settings of verl's policy loss: `actor_rollout_ref.actor.*`."""

from __future__ import annotations

from asyncrl.cli.migrate.translation import Translation

ACTOR = "actor_rollout_ref.actor"
LOSSES = {
    "vanilla": "dual_clip",
    "gspo": "gspo",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "sapo": "sapo",
    "gpg": "reinforce",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "constant",
}
BY_SEQUENCE = ("gspo", "gmpo", "sapo")
"""Losses for which verl does not read `loss_agg_mode`: they are always aggregated by sequence, as here."""
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def translate_loss(made: Translation) -> None:
    mode = f"{ACTOR}.policy_loss.loss_mode"
    loss = LOSSES.get(str(made.take(mode)))
    if loss is None:
        made.refuse(mode, "the closest is a clip: `asyncrl settings loss` has all losses")
        loss = "dual_clip"
    made.put("loss", loss, mode)
    if loss == "dppo_tv":
        made.put("loss.behavior_kl", 0.0, mode)  # only here does it pull towards the data
    _region(made, loss)
    _aggregation(made, loss)
    if made.take(f"{ACTOR}.entropy_coeff"):
        made.move(f"{ACTOR}.entropy_coeff", "loss.entropy_coef")
    _kl(made)


def _region(made: Translation, loss: str) -> None:
    """Translate what bounds the ratio. verl calls it `clip_ratio_low` and `clip_ratio_high`, whatever the loss makes of
    it, and reads `clip_ratio` only where they are null."""
    bounds: dict[str, tuple[float, str]] = {}
    for side in ("low", "high"):
        key = f"{ACTOR}.clip_ratio_{side}"
        key = key if made.take(key) is not None else f"{ACTOR}.clip_ratio"
        bounds[side] = made.number(key) or 0.0, key
    made.take(f"{ACTOR}.clip_ratio")
    if not any(key.endswith("clip_ratio") for _, key in bounds.values()):
        made.refuse(f"{ACTOR}.clip_ratio", "verl itself reads clip_ratio_low and clip_ratio_high instead")
    (low, low_key), (high, high_key) = bounds["low"], bounds["high"]
    if loss == "cispo":
        made.put("loss.ratio_floor", round(1.0 - low, 12), low_key)
        made.put("loss.ratio_cap", round(1.0 + high, 12), high_key)
    elif loss in ("sapo", "reinforce"):
        for key in (low_key, high_key):
            made.refuse(key, f"loss={loss} has no such clip")
    else:
        ours = "divergence" if loss.startswith("dppo") else "clip"
        made.put(f"loss.{ours}_low", low, low_key)
        made.put(f"loss.{ours}_high", high, high_key)
    if loss == "sapo":
        made.move(f"{ACTOR}.tau_pos", "loss.tau_pos")
        made.move(f"{ACTOR}.tau_neg", "loss.tau_neg")
    if loss == "dual_clip" or loss.startswith("dppo"):
        made.move(f"{ACTOR}.clip_ratio_c", "loss.dual_clip" if loss == "dual_clip" else "loss.ratio_cap")
    else:
        made.refuse(f"{ACTOR}.clip_ratio_c", f"loss={loss} has no such bound")


def _aggregation(made: Translation, loss: str) -> None:
    key, scale = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
    if loss in BY_SEQUENCE:
        made.refuse(key, f"verl does not read it for this loss either: loss={loss} is aggregated by sequence")
        return
    how = AGGREGATIONS.get(str(made.take(key)))
    if how is None:
        made.refuse(key, "loss.aggregation is one of token_mean, seq_mean_token_mean, ...")
        return
    made.put("loss.aggregation", how, key)
    if how == "constant":
        length = scale if made.take(scale) is not None else "data.max_response_length"
        made.put("loss.constant_length", float(made.count(length)), length)


def _kl(made: Translation) -> None:
    if not made.take(f"{ACTOR}.use_kl_loss"):
        made.refuse(f"{ACTOR}.kl_loss_coef", "actor.use_kl_loss is off")
        made.refuse(f"{ACTOR}.kl_loss_type", "actor.use_kl_loss is off")
        return
    made.move(f"{ACTOR}.kl_loss_coef", "loss.kl_coef")
    kind = str(made.take(f"{ACTOR}.kl_loss_type"))
    ours = KL.get(kind.removesuffix("+"), "") + ("+" if kind.endswith("+") else "")
    if ours in ("k1", "k2", "k3", "abs", "k1+", "k3+"):
        made.put("loss.kl", ours, f"{ACTOR}.kl_loss_type")
    else:
        made.refuse(f"{ACTOR}.kl_loss_type", "loss.kl is one of k1, k2, k3, abs, k1+, k3+")
