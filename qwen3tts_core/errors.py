"""Every error this project raises on purpose, in one tree.

    TTSError
    ├─ InvalidRequest            the caller can fix it; carries the field's name (`param`)
    │  ├─ TextTooLong
    │  ├─ UnknownVoice
    │  ├─ UnknownLanguage
    │  ├─ UnknownModel           -> 404, the others 400
    │  ├─ VoiceNameTaken         -> 409
    │  ├─ EncoderUnavailable     this machine's libraries lack it
    │  └─ InvalidReferenceAudio
    ├─ Overloaded                nobody's fault; carries retry_after_s
    ├─ FirstAudioTimeout         no audio by the deadline; what was started is freed
    ├─ StreamLost                its engine died, and no other took it over in time
    ├─ SlowReader                the client took nothing for too long; as if it had left
    ├─ StorageFull               no room for an uploaded voice; nothing was kept
    ├─ StreamCancelled           the caller left; not an error to log
    └─ EngineFault               ours
       ├─ EngineDown             the engine as a whole; another one may go on
       ├─ InvalidCodes
       └─ CheckpointMismatch     the files and the model disagree; stops the start

Errors cross process borders by pickle, which calls `cls(*args)`: every class takes its fields
positionally and hands the same fields to `Exception.__init__`. The HTTP statuses are given in
`deployments/http_errors.py`, nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence


class TTSError(Exception):
    """Base of every deliberate error."""


# ---------------------------------------------------------------- the caller can fix it
class InvalidRequest(TTSError):
    """The request can't be served as it is. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class TextTooLong(InvalidRequest):
    """The text doesn't fit the model, or is more than this server speaks at once; length and limit are in `unit`."""

    def __init__(self, length: int, limit: int, param: str = "input", unit: str = "tokens") -> None:
        super().__init__(f"{param} is {length:,} {unit}, the limit is {limit:,}", param)
        self.args = (length, limit, param, unit)
        self.length = length
        self.limit = limit
        self.unit = unit


class _UnknownName(InvalidRequest):
    """A name that isn't among the accepted ones."""

    noun = "name"
    default_param = "name"

    def __init__(self, name: str, accepted: Sequence[str], param: str | None = None) -> None:
        listed = ", ".join(accepted) or "none"
        param = param or self.default_param
        super().__init__(f"unknown {self.noun} {name!r}; accepted: {listed}", param)
        self.args = (name, tuple(accepted), param)
        self.name = name
        self.accepted = tuple(accepted)


class UnknownVoice(_UnknownName):
    """No such speaker in the checkpoint and no such uploaded voice."""

    noun = "voice"
    default_param = "voice"


class UnknownLanguage(_UnknownName):
    """The checkpoint doesn't name this language."""

    noun = "language"
    default_param = "language"


class UnknownModel(_UnknownName):
    """This server doesn't serve that model."""

    noun = "model"
    default_param = "model"


class VoiceNameTaken(InvalidRequest):
    """An uploaded voice may not carry the name of one that the checkpoint brings."""

    def __init__(self, name: str, param: str = "name") -> None:
        super().__init__(f"{name!r} is a built-in voice; choose another name", param)
        self.args = (name, param)
        self.name = name


class EncoderUnavailable(InvalidRequest):
    """This machine's libraries can't make what was asked for. what: "response_format mp3"; reason: what is missing."""

    def __init__(self, what: str, reason: str, param: str = "response_format") -> None:
        super().__init__(f"{what} isn't available on this server: {reason}", param)
        self.args = (what, reason, param)
        self.what = what
        self.reason = reason


class InvalidReferenceAudio(InvalidRequest):
    """The reference clip can't be read, is too short or long, or is silent."""

    def __init__(self, message: str, param: str = "ref_audio") -> None:
        super().__init__(message, param)


# ---------------------------------------------------------------- nobody's fault
class Overloaded(TTSError):
    """Every slot and every place in the queue is taken; nothing was started."""

    def __init__(self, what: str, retry_after_s: float = 1.0) -> None:
        super().__init__(what, retry_after_s)
        self.what = what
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.what}; retry after {self.retry_after_s:g} s"


class FirstAudioTimeout(TTSError):
    """A request had no audio by its deadline, and was given up."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"no audio within {self.timeout_s:g} s; the request was given up"


class SlowReader(TTSError):
    """A client took nothing of its body for so long that it is taken for gone."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"the client took nothing for {self.timeout_s:g} s; its stream was dropped"


class StorageFull(TTSError):
    """The disk has no room for an uploaded voice; nothing of it was kept."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class StreamLost(TTSError):
    """The engine of a stream died, and no other took the stream over within `timeout_s`."""

    def __init__(self, cause: str, timeout_s: float) -> None:
        super().__init__(cause, timeout_s)
        self.cause = cause
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"{self.cause}; nothing took the stream over within {self.timeout_s:g} s"


class StreamCancelled(TTSError):
    """The consumer of a stream left before its end."""


# ---------------------------------------------------------------- ours
class EngineFault(TTSError):
    """Something inside broke; the text is for the log, not for the client."""


class EngineDown(EngineFault):
    """An engine that has stopped or died, with every stream in it; none of them is to blame."""


class InvalidCodes(EngineFault):
    """Frames that no codec can decode: out of range, wrong shape, or out of order."""


class CheckpointMismatch(EngineFault):
    """The files on disk and the model they should fill disagree.

    `problems` holds one line each: a missing tensor, an unused one, a wrong shape, a missing key.
    """

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        super().__init__(where, tuple(problems))
        self.where = where
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return f"{self.where}: " + "; ".join(self.problems)
