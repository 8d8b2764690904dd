"""Random settings of a schedule of the simulator."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from asyncrl.drawing.curriculum import Curriculum
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.types import StalePolicy

CURRICULUM = Curriculum(low=0.1, high=0.9, explore=0.3, passes_at=0.5, weights=(1.0, 2.0), shuffle=True)
ORDERS = ("fifo", "freshest")


def drawn_settings(
    rng: Random, lots: Random, policy: StalePolicy | None, *, window: bool | None, by_sample: bool | None
) -> AdmissionSettings:
    """Args: lots: draws whether admission is by sample. policy, window, by_sample: not drawn, if given."""
    max_staleness = rng.choice((0, 1, 2, 3))
    group_size = rng.choice((1, 1, 2, 3))
    settings = AdmissionSettings(
        groups_per_step=rng.choice((1, 2, 3)),
        group_size=group_size,
        min_group_size=rng.choice((0, rng.randint(1, group_size))),
        max_staleness=max_staleness,
        pipeline_depth=rng.choice((max_staleness, rng.randint(0, max_staleness))),
        max_in_flight=rng.choice((1, 3, 16, 16)),
        stale_policy=policy or rng.choice(tuple(StalePolicy)[:2] if window else tuple(StalePolicy)),
        max_attempts=rng.choice((1, 2, 3)),
        group_timeout_s=rng.choice((0.0, 0.0, 9.0)),
        curriculum=rng.choice((None, None, CURRICULUM)),
    )
    if settings.stale_policy is not StalePolicy.WAIT:
        order, uses = rng.choice(ORDERS), rng.choice((1, 1, 2, 3))
        settings = replace(settings, order=order, max_times_sampled=1 if window else uses)
        if window or (window is None and settings.max_times_sampled == 1 and rng.random() < 0.4):
            settings = replace(settings, window=a_window(rng, settings))
    return perhaps_by_sample(lots, settings, by_sample)


def changed_settings(
    rng: Random, lots: Random, settings: AdmissionSettings, by_sample: bool | None
) -> AdmissionSettings:
    """Draw another batch size and staleness bound, as a resumed run may have."""
    bound = rng.choice((0, 1, 2, 3))
    windowed = settings.window > 0
    once = windowed or settings.stale_policy is StalePolicy.WAIT
    settings = replace(
        settings,
        max_times_sampled=1 if once else rng.choice((1, 2, 3)),
        groups_per_step=rng.choice((1, 2, 3)),
        max_staleness=bound,
        pipeline_depth=rng.randint(0, bound),
        window=0,
        by_sample=False,
    )
    if windowed:
        settings = replace(settings, window=a_window(rng, settings))
    return perhaps_by_sample(lots, settings, by_sample)


def perhaps_by_sample(lots: Random, settings: AdmissionSettings, by_sample: bool | None) -> AdmissionSettings:
    """Perhaps switch to admission by sample, if the settings allow it. With `by_sample`, always, adapting the
    settings."""
    if by_sample:
        return replace(settings, by_sample=True, window=0, max_times_sampled=1)
    can = not settings.window and settings.max_times_sampled == 1
    return replace(settings, by_sample=can and by_sample is None and lots.random() < 0.4)


def a_window(rng: Random, settings: AdmissionSettings) -> int:
    """Draw a window size that the settings allow."""
    spare = settings.max_staleness - settings.pipeline_depth
    return rng.randint(1, spare * settings.groups_per_step + 1)
