"""What a user is told when an input, a machine or a result does not allow what was asked."""


def shown(text: str, longest: int = 200) -> str:
    """Text of unknown origin as a part of a sentence: on one line, and where it is long its two ends."""
    half = longest // 2
    cut = text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"
    return " ".join(cut.split())


class RungsError(Exception):
    """One sentence that names the thing, the rule it breaks and the fix. The command line prints it without a traceback."""


class Refused(RungsError):
    """A variant or a shape that cannot run, by a rule that is known before anything is launched.

    `status` is the word that tables show: `refused` or `not on this chip`.
    """

    def __init__(self, message: str, status: str = "refused") -> None:
        super().__init__(message)
        self.status = status
