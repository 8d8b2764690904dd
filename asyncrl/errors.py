"""Every error asyncrl raises on purpose. Each is also the standard-library error a caller would expect.

A message says the rule that was broken, the value that broke it and the way out. Adding one: subclass
`AsyncRLError` and the nearest built-in, keep the constructor's single message, and raise it where the rule lives.
"""


class AsyncRLError(Exception):
    """Base of all asyncrl errors."""


class ConfigError(AsyncRLError, ValueError):
    """A setting was refused at start: unknown key, impossible arithmetic, or a combination that would deadlock."""


class RunFolderError(AsyncRLError, FileExistsError):
    """The run folder is in use, or does not hold what a resume needs."""


class DataError(AsyncRLError, ValueError):
    """A prompt file or one of its rows cannot be used."""


class OverlongError(DataError):
    """A prompt has more tokens than `data.max_prompt_tokens`, and `data.overlong` says to drop it."""


class RewardError(AsyncRLError, RuntimeError):
    """A reward function raised, returned something that is no finite number, timed out or killed its process.

    Args:
        reason: one of `types.REWARD_FAILURES`, under which it is counted.
    """

    def __init__(self, message: str, reason: str = "raised") -> None:
        super().__init__(message)
        self.reason = reason


class HopelessRewardError(AsyncRLError, RuntimeError):
    """More completions got no reward than `reward.max_failure_share` allows. A restart cannot help."""


class HopelessFilterError(AsyncRLError, RuntimeError):
    """A filter failed for more completions than `reward.max_failure_share` allows. A restart cannot help."""


class FilterError(AsyncRLError, RuntimeError):
    """A function of `rollout.filters` raised, gave no answer that is one, timed out or killed its process."""


class HopelessRunError(AsyncRLError, RuntimeError):
    """Every group is dropped, so no step will ever be trained. A restart cannot help."""


class UserCodeError(AsyncRLError, RuntimeError):
    """A loss, an advantage or a hook of the user raised, or gave what is none. A restart cannot help."""


class EpisodeError(AsyncRLError, RuntimeError):
    """An environment of the user raised, or what it made cannot be trained on."""


class IncompleteGroupError(AsyncRLError, RuntimeError):
    """Members of a group failed as often as a group may be tried, and too few are left to train on."""


class SandboxError(AsyncRLError, RuntimeError):
    """A program could not be run in the sandbox. Never the program's own fault: what that does is an outcome."""


class GenerationError(AsyncRLError, RuntimeError):
    """An engine could not produce the completions it was asked for."""


class RequestError(GenerationError):
    """A request that the engine can never serve, however often it is asked: prompt and new tokens are too many."""


class ContextFullError(RequestError):
    """What came so far leaves no room for a single token more. A `ChatEnvironment` ends its episode there."""


class EngineDiedError(AsyncRLError, RuntimeError):
    """The processes of an engine are gone or mute: its worker ends with this, and the pool starts another."""


class WireError(AsyncRLError, ValueError):
    """A message broke the wire format: size, schema version, dtype, shape or field limits."""


class OtherSchemaError(WireError):
    """The message is of a version of asyncrl that writes them otherwise."""


class ReplayError(AsyncRLError, RuntimeError):
    """The replay server refused a request; the message carries the server's reason."""


class RefusedPeerError(ReplayError):
    """This process belongs to no run of that server: other settings, keys of another role, another version of asyncrl.
    A restart cannot help."""


class FencedError(ReplayError):
    """A newer incarnation of this peer, or a newer attempt at this group, has taken over. Stop; retrying is useless."""


class JournalError(AsyncRLError, OSError):
    """The journal cannot be trusted or written: damaged before its durable mark, of another schema, a failed sync."""


class DiskFullError(AsyncRLError, OSError):
    """There was no space on the disk. The run ends; once there is space it can be resumed."""


class NoProgress(AsyncRLError, TimeoutError):
    """A bounded wait ran out. The message names whom was waited for and for how long."""


class LedgerError(AsyncRLError, RuntimeError):
    """The conservation law, or a group's life cycle, was violated: a bug in asyncrl, never the user's fault."""


class WeightsError(AsyncRLError, RuntimeError):
    """Weights could not be sent, received or verified; the engine keeps the version it had."""


class ModelMismatchError(WeightsError):
    """Learner and engine have different models: another name, shape or kind of dtype. A restart cannot help."""


class WeightsGoneError(WeightsError):
    """A version that cannot be sent any more: the learner has changed the weights it would be read from."""


class OtherVersionError(WeightsError):
    """Learner and worker are of versions of asyncrl that speak otherwise about weights. A restart cannot help."""


class StepMemoryError(AsyncRLError, MemoryError):
    """A step of the learner did not fit its device; the ranks start again with smaller micro-batches."""


class CheckpointError(AsyncRLError, RuntimeError):
    """A checkpoint is missing, incomplete or does not fit the model."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint of another model, or of other roles, than these settings have. A restart cannot help."""


class CheckpointDamagedError(CheckpointError):
    """A file of a checkpoint, or of an exported model, is not what was written. A restart cannot help."""


class NonFiniteError(AsyncRLError, ArithmeticError):
    """Loss or gradient stayed non-finite for more steps than `learner.max_nonfinite_steps`, or the policy gives no
    numbers any more."""
