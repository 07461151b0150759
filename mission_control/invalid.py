"""Plain words for what pydantic finds wrong with a value: what to write, and what was written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, PlainSerializer

LIMITS = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}
NUMBERS = {
    **LIMITS,
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "int_type": "a whole number",
}
WORDS = {
    **NUMBERS,
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a table",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "a table",
    "string_type": "a text in quotes",
    "too_short": "at least {min_length} of them",
    "tuple_type": "a list",
}
"""What to write, for each type of error (pydantic, "Validation errors"); ``{}`` names its context."""
OWN = "value_error"
"""The type of what our own validators raise; their texts are in our words."""
TAG = re.compile(r"(int|float|bool|str|constrained-\w+)$|(function-|literal\[|tagged-union\[)")
"""What pydantic adds to the place of a value of several types: the type that was tried."""
SHOWN_MAX = 60
"""Letters of a value that are shown."""


def reason(model: type[BaseModel], errors: Sequence[Any]) -> str:
    """Say why the first value of these errors does not fit.

    Args:
        model: of the values.
        errors: ``ValidationError.errors()``. A value with several types has an error for each; all of them are named.
    """
    first = errors[0]
    if first["type"] == "missing":
        return "it is missing"
    place = place_of(first)
    of_value = [one for one in errors if place_of(one) == place]
    if any(one["type"] not in WORDS for one in of_value):
        # What our validator says of a value is more than the names of the other types.
        own = next((one for one in of_value if one["type"] == OWN), first)
        return str(own["msg"]).removeprefix("Value error, ")
    in_file = as_written(model, place)
    limits = [
        {name: in_file(whole(limit)) if one["type"] in LIMITS else limit for name, limit in one.get("ctx", {}).items()}
        for one in of_value
    ]
    texts = ", ".join(WORDS[one["type"]].format(**own) for one, own in zip(of_value, limits, strict=True))
    alternatives = list(dict.fromkeys(re.split(r", | or ", texts.replace("'", ""))))
    expected = " or ".join(filter(None, [", ".join(alternatives[:-1]), alternatives[-1]]))
    value = first["input"]
    if isinstance(value, int) and not isinstance(value, bool) and first["type"] in LIMITS:
        value = in_file(value)
    return f"write {expected}, not {shown(value, first['type'] in NUMBERS)}"


def whole(limit: float) -> float:
    """Return a whole number as one."""
    return int(limit) if float(limit).is_integer() else limit


def place_of(error: Any) -> tuple[int | str, ...]:
    """Return the keys that lead to the value of an error, without the type that was tried."""
    place: tuple[int | str, ...] = error["loc"]
    # A key that is not known may have any name.
    tagged = error["type"] != "extra_forbidden" and len(place) > 1 and TAG.match(str(place[-1]))
    return place[:-1] if tagged else place


def shown(value: Any, is_number: bool) -> str:
    """Show a value as a file has it; flags come as texts, and a number is shown as it was typed."""
    if isinstance(value, str):
        text = value if is_number and re.search(r"\d", value) else repr(value)
    elif isinstance(value, int) and value.bit_length() > SHOWN_MAX * 3:
        return "a number so large"  # Python makes no text of it (``sys.int_info``)
    else:
        text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."


def as_written(model: type[BaseModel], place: Sequence[int | str]) -> Any:
    """Return what writes a value of the key at a place as files do: `1 us` for 1, if the key has a unit."""
    fields, found = [model.model_fields], None
    for step in place:
        if field := next((own[step] for own in fields if step in own), None):
            found = [field.annotation, *field.metadata]
            fields = [part.model_fields for part in inner(field.annotation) if is_model(part)]
    parts = [part for own in found or [] for part in inner(own)]
    return next((part.func for part in parts if isinstance(part, PlainSerializer)), lambda value: value)


def inner(annotation: Any) -> list[Any]:
    """Return a type, and all types and metadata in it."""
    return [annotation, *(part for own in get_args(annotation) for part in inner(own))]


def is_model(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, BaseModel)
