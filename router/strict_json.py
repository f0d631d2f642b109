"""JSON to typed structs, strictly, with errors that name the field and the type wanted, never what was sent.

``msgspec`` takes no NaN, no bool for an int, no string for a number and no lone surrogate.
"""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec

from cluster.errors import InvalidRequestError

_Decoded = TypeVar("_Decoded")

_ERROR_PATH: Final = re.compile(
    r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$",
    re.DOTALL,
)
# The forms of msgspec's messages that speak only of our schema.
_SAFE_ERROR: Final = re.compile(
    r"Expected `[a-z| ]+`(, got `[a-z]+`| [<>]=? -?[0-9.e+-]+| of length [<>]=? [0-9]+)?"
    r"|Object missing required field `[a-z_]+`|(Integer value|Number) out of range"
)


def decode(decoder: msgspec.json.Decoder[_Decoded], body: bytes | msgspec.Raw) -> _Decoded:
    """Decode ``body``. Raises :class:`InvalidRequestError`."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise translate(error) from None


def translate(error: Exception) -> InvalidRequestError:
    """What the decoder says, in words that are safe to send."""
    if not isinstance(error, msgspec.ValidationError):
        return InvalidRequestError("The request body is not valid JSON (numbers must be finite, text valid Unicode).")
    found = _ERROR_PATH.match(str(error))
    what, path = ("", None) if found is None else (found["what"], found["path"] or None)
    if not _SAFE_ERROR.fullmatch(what):
        what = "Not an accepted value"
    missing = re.fullmatch("Object missing required field `(.*)`", what)
    if missing is not None:
        path = missing[1] if path is None else f"{path}.{missing[1]}"
        return InvalidRequestError(f"`{path}` is required.", param=path)
    where = "The request body" if path is None else f"`{path}`"
    return InvalidRequestError(f"{where}: {what[0].lower()}{what[1:].replace('`', '')}.", param=path)
