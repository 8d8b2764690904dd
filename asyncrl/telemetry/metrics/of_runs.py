"""Metrics of the run as a whole: time, engines, machines, checkpoints, replay, weights, evaluations, rows."""

from __future__ import annotations

from asyncrl.telemetry.metrics.metric import HIGHER, LOWER, NEITHER, Metric

_TIME = (
    Metric("time/step", "s", "duration of a step; the other `time/*` of the row add up to it", LOWER),
    Metric("time/wait_batch", "s", "waiting for the next batch, while the learner is idle", LOWER),
    Metric("time/early", "s", "packing, scoring and training the first groups before the others had arrived"),
    Metric("time/train", "s", "packing, scoring and training the batch"),
    Metric("time/publish", "s", "waiting until the weights are copied and the other ranks have arrived", LOWER),
    Metric(
        "time/evaluate", "s", "requesting evaluations, and at the end waiting for them; with `asyncrl sft`, making them"
    ),
    Metric("time/log", "s", "writing the row of the previous step"),
    Metric("time/checkpoint", "s", "standing still for the checkpoint after the previous step", LOWER),
    Metric("idle/learner", "share", "share of the step in which the learner waited for a batch", LOWER),
    Metric(
        "idle/learner_s_<reason>",
        "s",
        "time in which the learner could have trained but had no batch, for this reason",
        LOWER,
        True,
    ),
    Metric("autotune/pipeline_depth", "steps", "`replay.pipeline_depth` in force, with `rollout.autotune`"),
    Metric("autotune/max_in_flight", "groups", "`rollout.max_in_flight` in force, with `rollout.autotune`"),
    Metric(
        "autotune/moves",
        "moves",
        "changes that autotuning made since the server started; its log gives the reasons",
        NEITHER,
        True,
    ),
    Metric(
        "idle/replay",
        "share",
        "share of the time since the previous step in which the replay server waited for messages",
    ),
    Metric("idle/rollout", "share", "share of the last seconds in which workers had nothing to generate", LOWER),
    Metric(
        "idle/rollout_s", "s", "time in which workers had nothing to generate, added up over all workers", LOWER, True
    ),
    Metric(
        "idle/rollout_busy_s",
        "s",
        "time in which workers were generating, added up over all workers",
        NEITHER,
        True,
    ),
    Metric("perf/trained_tokens_per_s", "tokens/s", "loss tokens trained per second", HIGHER),
    Metric(
        "perf/tokens_per_s", "tokens/s", "tokens of rows trained per second, prompts included (`asyncrl sft`)", HIGHER
    ),
    Metric(
        "perf/generated_tokens_per_s",
        "tokens/s",
        "tokens sampled per second by all engines, over the last seconds",
        HIGHER,
    ),
    Metric("perf/groups_per_s", "groups/s", "groups trained per second", HIGHER),
    Metric("perf/tflops_per_rank", "TFLOP/s", "the model's own arithmetic per second of training, per rank", HIGHER),
    Metric("perf/tokens_per_s_per_rank", "tokens/s", "packed tokens per second of training, per rank", HIGHER),
    Metric(
        "perf/mfu",
        "share",
        "the model's arithmetic as a share of the most that the GPU could do (model FLOPs utilisation)",
        HIGHER,
    ),
    Metric("perf/padding_share", "share", "share of padding among the tokens that went through the layers", LOWER),
    Metric("perf/attention_padding_share", "share", "share of padding among the tokens that attention held", LOWER),
    Metric("perf/gather_s", "s", "time in which FSDP2 gathered weights, hidden or not, mean over the ranks", LOWER),
    Metric(
        "perf/reduce_s",
        "s",
        "time in which gradients were reduced over ranks and copies of the model, hidden or not, mean over the ranks",
        LOWER,
    ),
    Metric(
        "memory/peak_gb",
        "GB",
        "most memory that tensors took on a rank's GPU during training, of the fullest rank",
        LOWER,
    ),
    Metric("memory/planned_gb", "GB", "what the memory plan expects for the same micro-batches"),
    Metric("machine/memory_free", "share", "share of memory that is free on the fullest machine of the run", HIGHER),
    Metric(
        "machine/clock_skew_s",
        "s",
        "least by which the clock of a machine differs from the replay server's, of the worst machine",
        LOWER,
    ),
    Metric("checkpoint/save_s", "s", "time until the newest checkpoint was complete", LOWER),
    Metric("checkpoint/wait_s", "s", "time for which training stood still for the checkpoint", LOWER),
    Metric("checkpoint/copy_wait_s", "s", "part of `checkpoint/wait_s` spent on the copy of what is saved", LOWER),
    Metric(
        "checkpoint/<errand>",
        "checkpoints",
        "checkpoints copied (`copies`, `learner.copy_to`) or exported (`exports`)",
        NEITHER,
        True,
    ),
    Metric(
        "checkpoint/<errand>_failed", "checkpoints", "checkpoints that could not be copied or exported", LOWER, True
    ),
)

_REPLAY = (
    Metric("replay/admitted", "groups", "groups begun", NEITHER, True),
    Metric("replay/in_flight", "groups", "groups being generated"),
    Metric("replay/inserted", "groups", "groups waiting to be trained"),
    Metric(
        "replay/inserted_age_<age>", "groups", "waiting groups that were begun this many versions ago (64: or more)"
    ),
    Metric("replay/leased", "groups", "groups in batches that are planned but not trained"),
    Metric("replay/trained", "groups", "groups trained", NEITHER, True),
    Metric("replay/dropped_<reason>", "groups", "groups dropped for this reason", LOWER, True),
    Metric(
        "replay/filtered_by_<filter>", "groups", "groups dropped by this filter of `rollout.filters`", NEITHER, True
    ),
    Metric(
        "replay/missing_members",
        "trajectories",
        "members that groups were trained without (`rollout.min_group_size`)",
        LOWER,
        True,
    ),
    Metric("replay/bytes", "bytes", "payloads in the server's memory"),
    Metric("replay/workers", "workers", "workers connected"),
    Metric(
        "replay/workers_other_code",
        "workers",
        "workers whose files of yours (rewards and so on) differ from the learner's",
        LOWER,
    ),
    Metric("staleness/dropped", "groups", "groups dropped for their age", LOWER, True),
    Metric("staleness/masked_tokens", "tokens", "tokens left out of a batch for their age", LOWER, True),
    Metric("waste/tokens", "tokens", "tokens sampled but never trained on because of their age", LOWER, True),
    Metric(
        "waste/tokens_by_position_q<quarter>",
        "tokens",
        "tokens wasted by age in this quarter of their trajectory",
        LOWER,
        True,
    ),
    Metric(
        "waste/trained_length_bias",
        "1",
        "mean length of trained trajectories over that of stored ones; below 1, long ones get lost",
    ),
    Metric("goodput/share", "share", "share of trained tokens among those whose fate is known", HIGHER, True),
    Metric(
        "goodput/generated_tokens",
        "tokens",
        "tokens sampled by all engines, evaluations included, without the last second of a killed worker",
        NEITHER,
        True,
    ),
    Metric(
        "goodput/trained_tokens",
        "tokens",
        "tokens that were trained on, each counted once",
        HIGHER,
        True,
    ),
    Metric("goodput/lost_<fate>", "tokens", "tokens that were not trained on, by what happened to them", LOWER, True),
    Metric(
        "data/zero_variance",
        "share",
        "share of groups with equal rewards among the last 512 that came back, filtered ones included",
        LOWER,
    ),
    Metric("data/overlong", "prompts", "prompts that were too long to be used", LOWER, True),
    Metric(
        "data/passed_over", "prompts", "prompts not drawn because of their pass rate (`data.curriculum`)", NEITHER, True
    ),
    Metric("data/pass_rate_measured", "share", "share of rows whose pass rate is known", HIGHER),
    Metric("data/pass_rate_mean", "share", "mean pass rate of the rows that were measured"),
    Metric("data/pass_rate_below", "share", "share of measured rows below `data.curriculum_window`"),
    Metric("data/pass_rate_above", "share", "share of measured rows above `data.curriculum_window`"),
    Metric("reward/failed", "completions", "completions without a reward", LOWER, True),
    Metric("reward/failed_<reason>", "completions", "completions without a reward, for this reason", LOWER, True),
)

_WEIGHTS = (
    Metric("weights/bytes", "bytes", "size of a version"),
    Metric("weights/wire_bytes", "bytes", "bytes sent of a version"),
    Metric("weights/wire_s", "s", "time for sending a version", LOWER),
    Metric("weights/delta_s", "s", "time for computing the difference to the previous version", LOWER),
    Metric("weights/update_s", "s", "time from the beginning of sending until every engine serves the version", LOWER),
    Metric("weights/gather_s", "s", "time for copying (and gathering) a version, beside training", LOWER),
    Metric("weights/copy_wait_s", "s", "time for which the optimizer waited for that copy", LOWER),
    Metric("weights/wait_previous_s", "s", "time for which a publication waited for earlier ones", LOWER),
    Metric("weights/canary_s", "s", "time in which the learner scored the probe tokens of a version", LOWER),
    Metric("weights/learner_stall_s", "s", "time for which a publication held up the learner", LOWER),
    Metric("weights/load_s", "s", "time for loading a version, of the slowest engine", LOWER),
    Metric("weights/stall_s", "s", "time for which an engine stood still to load a version, of the slowest one", LOWER),
    Metric(
        "weights/canary_max",
        "nats",
        "largest difference between the log-probs of engine and learner on a probe token",
        LOWER,
    ),
    Metric(
        "weights/canary_mean",
        "nats",
        "mean difference between the log-probs of engine and learner on the probe tokens",
        LOWER,
    ),
    Metric("weights/canary_failed", "engines", "engines that failed the canary", LOWER, True),
    Metric("weights/engines", "engines", "engines that serve the last version sent"),
    Metric("weights/resends", "versions", "versions that were sent again", LOWER, True),
    Metric("weights/dropped", "engines", "engines left out when the weight group was formed again", LOWER, True),
    Metric("weights/refused", "engines", "engines that refused a version", LOWER, True),
    Metric("weights/epoch", "1", "number of the weight group, one more whenever it is formed again"),
    Metric("weights/sent_version", "version", "last version that was sent"),
)

_EVALUATIONS = (
    Metric("eval/<set>/accuracy", "share", "mean score over the rows, with `reward.metric=accuracy`", HIGHER),
    Metric("eval/<set>/reward", "reward", "mean score over the rows", HIGHER),
    Metric("eval/<set>/count", "rows", "rows with a score"),
    Metric("eval/<set>/failed", "rows", "rows without a score", LOWER),
    Metric(
        "eval/<set>/superseded",
        "evaluations",
        "earlier evaluations cancelled because none of their rows was begun when this one was due",
        LOWER,
    ),
    Metric("eval/<set>/version_min", "version", "oldest policy version that rows were sampled from"),
    Metric("eval/<set>/version_max", "version", "newest policy version that rows were sampled from"),
    Metric(
        "eval/<set>/<figure>@<n>",
        "share",
        "`pass`, `avg`, `best` or `maj` of n samples per row, mean over the rows",
        HIGHER,
    ),
    Metric(
        "eval/<set>/<source>/mean",
        "reward",
        "mean score over the rows of one `data_source`, if there are several",
        HIGHER,
    ),
    *(
        Metric(f"eval/<set>/{name}_{end}", unit, f"{which} end of the 95 % interval of {what}", HIGHER)
        for name, unit, what in (
            ("<figure>", "1", "`reward`, `accuracy` or a figure (docs/evaluation.md)"),
            ("<source>/mean", "reward", "the mean of one `data_source`"),
        )
        for end, which in (("low", "lower"), ("high", "upper"))
    ),
    Metric("eval/<set>/loss", "nats", "mean loss per token of the answers (`asyncrl sft`)", LOWER),
    Metric("eval/<set>/perplexity", "1", "exponential of the loss per token (`asyncrl sft`)", LOWER),
    Metric(
        "eval/<set>/token_accuracy",
        "share",
        "share of the answers' tokens that the model finds likeliest (`asyncrl sft`)",
        HIGHER,
    ),
    Metric("eval/<set>/tokens", "tokens", "tokens of the answers (`asyncrl sft`)"),
)

_OTHER = (
    Metric("histogram/reward", "episodes", "episodes of the batch, by reward"),
    Metric("histogram/completion/length", "trajectories", "trajectories of the batch, by number of sampled tokens"),
    Metric("histogram/staleness", "tokens", "tokens trained on, by age in versions"),
    Metric(
        "histogram/ratio/age_<age>",
        "tokens",
        "tokens of this age in versions (64: or more), by log(π_θ/μ) in nats, over all updates of the step",
    ),
    Metric("data/rows", "rows", "rows in the batch (`asyncrl sft`)"),
    Metric("data/tokens", "tokens", "tokens in the batch (`asyncrl sft`)"),
    Metric("data/loss_tokens", "tokens", "tokens of the batch that are trained on (`asyncrl sft`)"),
    Metric(
        "data/overlong_dropped", "rows", "rows of the batch that were left out for their length (`asyncrl sft`)", LOWER
    ),
    Metric("data/overlong_cut", "rows", "rows of the batch that were cut to the longest length (`asyncrl sft`)", LOWER),
    Metric("data/epoch", "epochs", "passes over the rows so far (`asyncrl sft`)", NEITHER, True),
    Metric(
        "rerun/reward_of_data", "reward", "mean reward of a rerun's batch, as sampled by the policy of the original run"
    ),
    Metric(
        "rerun/reward_estimate", "reward", "mean reward of the rerun's policy, estimated by importance weights", HIGHER
    ),
    Metric(
        "rerun/ess",
        "share",
        "effective sample size of these importance weights; near 0 the estimate means nothing",
        HIGHER,
    ),
    Metric(
        "rerun/log_ratio", "nats", "mean log(π/μ) per token of the rerun's policy on the data: how likely it finds them"
    ),
)

_ENGINE = tuple(
    Metric(f"engine/{kind}_{name}", unit, meaning, NEITHER, True)
    for kind, steps, rows in (("decode", "decode steps", "sequences"), ("prefill", "prefills", "prompts"))
    for name, unit, meaning in (
        ("steps", "steps", f"{steps} of all engines"),
        ("rows", rows, f"{rows} in the {steps} of all engines, added up"),
        (
            "rows_squared",
            f"{rows}²",
            f"squares of the numbers of {rows}, added up over the {steps} (`asyncrl plan --from`)",
        ),
        ("s", "s", f"duration of the {steps} of all engines"),
        ("rows_s", f"{rows}·s", f"{rows} times seconds, added up over the {steps} (`asyncrl plan --from`)"),
    )
)

OF_RUNS = (*_TIME, *_ENGINE, *_REPLAY, *_WEIGHTS, *_EVALUATIONS, *_OTHER)
