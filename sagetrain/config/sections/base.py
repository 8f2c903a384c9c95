"""The base class and the field types that all sections have in common."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Section(BaseModel):
    """The base of all sections. Sections are immutable, refuse unknown keys and convert nothing in silence: "1" and
    true are no numbers. The docstrings of their fields become the key reference."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


Name = Annotated[str, Field(min_length=1)]
LocalPath = Annotated[Name, AfterValidator(os.path.expanduser)]
"""The path of a file or folder. "~" is replaced by the home folder here, because no shell has done so."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
