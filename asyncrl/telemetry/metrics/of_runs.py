"""Metrics of the run as a whole: time, engines, machines, checkpoints, replay, weights, evaluations, rows."""

from __future__ import annotations

from asyncrl.telemetry.metrics.metric import HIGHER, NEITHER, Metric, metrics

_TIME = metrics("""
time/step | s | lower | duration of a step; the other `time/*` of the row add up to it
time/wait_batch | s | lower | waiting for the next batch, while the learner is idle
time/train | s | - | packing, scoring and training the batch
time/publish | s | lower | waiting until the weights are copied and the other ranks have arrived
time/evaluate | s | - | requesting evaluations, and at the end waiting for them; with `asyncrl sft`, making them
time/log | s | - | writing the row of the previous step
time/checkpoint | s | lower | standing still for the checkpoint after the previous step
idle/learner | share | lower | share of the step in which the learner waited for a batch
idle/learner_s_<reason> | s | lower, total | time in which the learner could have trained but had no batch, for this
    reason
idle/replay | share | - | share of the time since the previous step in which the replay server waited for messages
idle/rollout | share | lower | share of the last seconds in which workers had nothing to generate
idle/rollout_s | s | lower, total | time in which workers had nothing to generate, added up over all workers
idle/rollout_busy_s | s | total | time in which workers were generating, added up over all workers
perf/trained_tokens_per_s | tokens/s | higher | loss tokens trained per second
perf/tokens_per_s | tokens/s | higher | tokens of rows trained per second, prompts included (`asyncrl sft`)
perf/generated_tokens_per_s | tokens/s | higher | tokens sampled per second by all engines, over the last seconds
perf/groups_per_s | groups/s | higher | groups trained per second
perf/tflops_per_rank | TFLOP/s | higher | the model's own arithmetic per second of training, per rank
perf/tokens_per_s_per_rank | tokens/s | higher | packed tokens per second of training, per rank
perf/mfu | share | higher | the model's arithmetic as a share of the most that the GPU could do (model FLOPs
    utilisation)
perf/padding_share | share | lower | share of padding among the tokens that went through the layers
perf/attention_padding_share | share | lower | share of padding among the tokens that attention held
perf/gather_s | s | lower | time in which FSDP2 gathered weights, hidden or not, mean over the ranks
perf/reduce_s | s | lower | time in which gradients were reduced over ranks and copies of the model, hidden or not, mean
    over the ranks
memory/peak_gb | GB | lower | most memory that tensors took on a rank's GPU during training, of the fullest rank
memory/planned_gb | GB | - | what the memory plan expects for the same micro-batches
machine/memory_free | share | higher | share of memory that is free on the fullest machine of the run
machine/clock_skew_s | s | lower | least by which the clock of a machine differs from the replay server's, of the worst
    machine
checkpoint/save_s | s | lower | time until the newest checkpoint was complete
checkpoint/wait_s | s | lower | time for which training stood still for the checkpoint
checkpoint/copy_wait_s | s | lower | part of `checkpoint/wait_s` spent on the copy of what is saved
checkpoint/<errand> | checkpoints | total | checkpoints copied (`copies`, `learner.copy_to`) or exported (`exports`)
checkpoint/<errand>_failed | checkpoints | lower, total | not copied or exported: it failed, or a newer one came
""")

_REPLAY = metrics("""
replay/admitted | groups | total | groups begun
replay/in_flight | groups | - | groups being generated
replay/inserted | groups | - | groups waiting to be trained
replay/inserted_age_<age> | groups | - | waiting groups that were begun this many versions ago (64: or more)
replay/leased | groups | - | groups in batches that are planned but not trained
replay/trained | groups | total | groups trained
replay/dropped_<reason> | groups | lower, total | groups dropped for this reason
replay/filtered_by_<filter> | groups | total | groups dropped by this filter of `rollout.filters`
replay/missing_members | trajectories | lower, total | members that groups were trained without
    (`rollout.min_group_size`)
replay/bytes | bytes | - | payloads in the server's memory
replay/workers | workers | - | workers connected
replay/workers_other_code | workers | lower | workers whose files of yours (rewards and so on) differ from the learner's
staleness/dropped | groups | lower, total | groups dropped for their age
staleness/masked_tokens | tokens | lower, total | tokens left out of a batch for their age
waste/tokens | tokens | lower, total | tokens sampled but never trained on because of their age
waste/tokens_by_position_q<quarter> | tokens | lower, total | tokens wasted by age in this quarter of their trajectory
waste/trained_length_bias | 1 | - | mean length of trained trajectories over that of stored ones; below 1, long ones get
    lost
goodput/share | share | higher, total | share of trained tokens among those whose fate is known
goodput/generated_tokens | tokens | total | tokens sampled by all engines, evaluations included, without the last second
    of a killed worker
goodput/trained_tokens | tokens | higher, total | tokens that were trained on, each counted once
goodput/lost_<fate> | tokens | lower, total | tokens that were not trained on, by what happened to them
data/zero_variance | share | lower | share of groups with equal rewards among the last 512 that came back, filtered ones
    included
data/overlong | prompts | lower, total | prompts that were too long to be used
data/passed_over | prompts | total | prompts not drawn because of their pass rate (`data.curriculum`)
data/pass_rate_measured | share | higher | share of rows whose pass rate is known
data/pass_rate_mean | share | - | mean pass rate of the rows that were measured
data/pass_rate_below | share | - | share of measured rows below `data.curriculum_window`
data/pass_rate_above | share | - | share of measured rows above `data.curriculum_window`
reward/failed | completions | lower, total | completions without a reward
reward/failed_<reason> | completions | lower, total | completions without a reward, for this reason
""")

_WEIGHTS = metrics("""
weights/bytes | bytes | - | size of a version
weights/wire_bytes | bytes | - | bytes sent of a version
weights/wire_s | s | lower | time for sending a version
weights/delta_s | s | lower | time for computing the difference to the previous version
weights/update_s | s | lower | time from the beginning of sending until every engine serves the version
weights/gather_s | s | lower | time that sending a version waited for other learner ranks
weights/wait_s | s | lower | time for which the optimizer waited until the version was sent
weights/wait_previous_s | s | lower | time for which a publication waited for earlier ones
weights/canary_s | s | lower | time in which the learner scored the probe tokens of a version
weights/learner_stall_s | s | lower | time for which a publication held up the learner
weights/load_s | s | lower | time for loading a version, of the slowest engine
weights/stall_s | s | lower | time for which an engine stood still to load a version, of the slowest one
weights/canary_max | nats | lower | largest difference between the log-probs of engine and learner on a probe token
weights/canary_mean | nats | lower | mean difference between the log-probs of engine and learner on the probe tokens
weights/canary_failed | engines | lower, total | engines that failed the canary
weights/engines | engines | - | engines that serve the last version sent
weights/resends | versions | lower, total | versions that were sent again
weights/dropped | engines | lower, total | engines left out when the weight group was formed again
weights/refused | engines | lower, total | engines that refused a version
weights/epoch | 1 | - | number of the weight group, one more whenever it is formed again
weights/sent_version | version | - | last version that was sent
""")

_EVALUATIONS = (
    *metrics("""
eval/<set>/accuracy | share | higher | mean score over the rows, with `reward.metric=accuracy`
eval/<set>/reward | reward | higher | mean score over the rows
eval/<set>/count | rows | - | rows with a score
eval/<set>/failed | rows | lower | rows without a score
eval/<set>/superseded | evaluations | lower | earlier evaluations cancelled because none of their rows was begun when
    this one was due
eval/<set>/version_min | version | - | oldest policy version that rows were sampled from
eval/<set>/version_max | version | - | newest policy version that rows were sampled from
eval/<set>/<figure>@<n> | share | higher | `pass`, `avg`, `best` or `maj` of n samples per row, mean over the rows
eval/<set>/<source>/mean | reward | higher | mean score over the rows of one `data_source`, if there are several
"""),
    *(
        Metric(f"eval/<set>/{name}_{end}", unit, f"{which} end of the 95 % interval of {what}", HIGHER)
        for name, unit, what in (
            ("<figure>", "1", "`reward`, `accuracy` or a figure (docs/evaluation.md)"),
            ("<source>/mean", "reward", "the mean of one `data_source`"),
        )
        for end, which in (("low", "lower"), ("high", "upper"))
    ),
    *metrics("""
eval/<set>/loss | nats | lower | mean loss per token of the answers (`asyncrl sft`)
eval/<set>/perplexity | 1 | lower | exponential of the loss per token (`asyncrl sft`)
eval/<set>/token_accuracy | share | higher | share of the answers' tokens that the model finds likeliest (`asyncrl sft`)
eval/<set>/tokens | tokens | - | tokens of the answers (`asyncrl sft`)
"""),
)

_OTHER = metrics("""
histogram/reward | episodes | - | episodes of the batch, by reward
histogram/completion/length | trajectories | - | trajectories of the batch, by number of sampled tokens
histogram/staleness | tokens | - | tokens trained on, by age in versions
histogram/ratio/age_<age> | tokens | - | tokens of this age in versions (64: or more), by log(π_θ/μ) in nats, over all
    updates of the step
data/rows | rows | - | rows in the batch (`asyncrl sft`)
data/tokens | tokens | - | tokens in the batch (`asyncrl sft`)
data/loss_tokens | tokens | - | tokens of the batch that are trained on (`asyncrl sft`)
data/overlong_dropped | rows | lower | rows of the batch that were left out for their length (`asyncrl sft`)
data/overlong_cut | rows | lower | rows of the batch that were cut to the longest length (`asyncrl sft`)
data/epoch | epochs | total | passes over the rows so far (`asyncrl sft`)
rerun/reward_of_data | reward | - | mean reward of a rerun's batch, as sampled by the policy of the original run
rerun/reward_estimate | reward | higher | mean reward of the rerun's policy, estimated by importance weights
rerun/ess | share | higher | effective sample size of these importance weights; near 0 the estimate means nothing
rerun/log_ratio | nats | - | mean log(π/μ) per token of the rerun's policy on the data: how likely it finds them
""")

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
